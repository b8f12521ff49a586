"""Some hundred mixed requests, a fifth of which are abandoned: one outcome each, and results as alone."""

import gc
import os
import random
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from server.tools import PAINT, Running, assert_same_picture, data_url, in_threads, png

NUM_REQUESTS = 150
NUM_CLIENTS = 8
MAX_GROWTH_BYTES = 40 << 20
NUM_HELPERS = 6
"""Threads that the event loop may have made for reading uploads, on few cores."""
COLOURS = ("red", "green", "blue")


def draw_request(generator: random.Random) -> dict[str, Any]:
    """A painting or an edit; few enough kinds that each can be compared with itself alone."""
    body = {
        **PAINT,
        "seed": generator.randrange(3),
        "size": generator.choice(["32x32", "64x64", "96x32"]),
        "num_inference_steps": generator.choice([1, 3]),
        "n": generator.choice([1, 1, 2]),
    }
    if generator.random() < 0.4:
        pictures = generator.sample(COLOURS, generator.choice([1, 2]))
        body["images"] = [{"image_url": data_url(png(Image.new("RGB", (64, 32), colour)))} for colour in pictures]
    if generator.random() < 0.2:
        body |= {"true_cfg_scale": 2.0, "negative_prompt": "blurred"}
    return body


def path_of(body: dict[str, Any]) -> str:
    return "/v1/images/edits" if "images" in body else "/v1/images/generations"


def run(server: Running, bodies: list[dict[str, Any]], left: set[int], first: int) -> list[tuple[int, str, Any]]:
    """What one client of several does: its share of the requests, one after another."""
    outcomes: list[tuple[int, str, Any]] = []
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
        for i in range(first, len(bodies), NUM_CLIENTS):
            if i not in left:
                response = client.post(path_of(bodies[i]), json=bodies[i])
                outcomes.append((i, "answered" if response.status_code == 200 else response.text, response.json()))
                continue
            body = {**bodies[i], "stream": True, "num_inference_steps": 1000}
            with client.stream("POST", path_of(body), json=body):
                outcomes.append((i, "left", None))
    return outcomes


def together(server: Running, bodies: list[dict[str, Any]], left: set[int]) -> list[tuple[int, str, Any]]:
    """What all clients did, at the same time."""
    calls = [partial(run, server, bodies, left, first) for first in range(NUM_CLIENTS)]
    outcomes = [one for some in in_threads(calls) for one in some]
    server.idle()
    gc.collect()
    return outcomes


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_soak(start: Callable[..., Running], seed: int) -> None:
    server = start(max_waiting=NUM_CLIENTS)
    generator = random.Random(seed)
    bodies = [draw_request(generator) for _ in range(NUM_REQUESTS)]
    left = set(generator.sample(range(NUM_REQUESTS), NUM_REQUESTS // 5))
    desk = server.site.desk
    together(server, bodies[::3], left={0, 5, 10})  # so that arenas and caches are what they will be
    accepted, before, threads = desk.num_accepted, resident_bytes(), threading.active_count()
    outcomes = together(server, bodies, left)
    assert resident_bytes() - before < MAX_GROWTH_BYTES
    assert threading.active_count() <= threads + NUM_HELPERS
    assert Counter(outcome for _, outcome, _ in outcomes) == {"answered": NUM_REQUESTS - len(left), "left": len(left)}
    assert len({i for i, _, _ in outcomes}) == NUM_REQUESTS
    assert desk.num_accepted - accepted == NUM_REQUESTS
    server.assert_nothing_taken()
    alone: dict[str, Any] = {}
    for i, outcome, answer in outcomes:
        body = bodies[i]
        if outcome == "answered":
            if str(body) not in alone:
                alone[str(body)] = server.post(path_of(body), **body).json()
            for ours, theirs in zip(answer["data"], alone[str(body)]["data"], strict=True):
                assert ours["seed"] == theirs["seed"]
                assert_same_picture(ours["b64_json"], theirs["b64_json"])
