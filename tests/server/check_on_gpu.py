"""Processes on GPUs: the pictures of one process, from each mode and way, and a worker that is killed.

    PYTHONPATH=.:tests python tests/server/check_on_gpu.py

Needs one GPU, and two for ``separate``. Ends with status 1 where a picture differs by more than one 8-bit value, or
where something is left on a GPU.
"""

import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from server.serving import Serving, kill_a_worker, stop_the_server
from server.test_processes import PAINTING, TALK
from server.tools import assert_same_picture

ROOT = Path(__file__).parents[2]
MODELS = {
    "painter": (ROOT / "pocket" / "qwen-image-2.1", PAINTING),
    "talker": (ROOT / "tests" / "neo_unify" / "golden" / "dense", TALK),
}
ENGINE = {"device": "auto", "attention_backend": "piecewise"}
ROOM = {"handover_memory": 256 << 20}
"""The warm-up of a GPU paints 2048 x 2048, whose noise alone takes 48 MiB."""
ON_ONE: dict[str, dict[str, Any]] = {"colocate": {"mode": "colocate", **ROOM}}
ON_TWO: dict[str, dict[str, Any]] = {
    "separate, shm": {"mode": "separate", **ROOM},
    "separate, ipc": {"mode": "separate", "handover": "ipc", **ROOM},
    "separate, other way round": {"mode": "separate", "understand_devices": "1", "generate_devices": "0", **ROOM},
}


def answers(server: Serving, bodies: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    responses = [server.client.post(path, json=body) for path, body in bodies]
    assert all(response.status_code == 200 for response in responses), [response.text[:300] for response in responses]
    return [response.json() for response in responses]


def pictures(answer: dict[str, Any]) -> list[str]:
    """In base64, those of a dialogue too."""
    if "data" in answer:
        return [one["b64_json"] for one in answer["data"]]
    content = answer["choices"][0]["message"]["content"]
    parts = [part for part in content if part["type"] == "image_url"] if isinstance(content, list) else []
    return [part["image_url"]["url"].partition(",")[2] for part in parts]


def processes_on_gpus() -> set[str]:
    query = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    return set(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split())


def main() -> None:
    before = processes_on_gpus()
    num_cards = torch.cuda.device_count()
    for name, (root, bodies) in MODELS.items():
        began = time.monotonic()
        single = Serving(root, engine={**ENGINE, "device": "cuda:0"}, mode="single").wait_ready()
        print(f"{name:8} {'single':26} ready in {time.monotonic() - began:.1f} s", flush=True)
        expected = answers(single, bodies)
        single.process.terminate()
        single.process.wait(60)
        for way, how in {**ON_ONE, **(ON_TWO if num_cards > 1 else {})}.items():
            began = time.monotonic()
            server = Serving(root, engine=ENGINE, **how).wait_ready()
            ready = time.monotonic() - began
            for round_ in range(2):
                for ours, theirs in zip(answers(server, bodies), expected, strict=True):
                    for one, other in zip(pictures(ours), pictures(theirs), strict=True):
                        assert_same_picture(one, other)
                if not round_:
                    print(f"{name:8} {way:26} ready in {ready:.1f} s, answered; its workers are killed", flush=True)
                    kill_a_worker(server, "generation", None)
                    kill_a_worker(server, "understanding", None)
            server.assert_nothing_held()
            moved = server.metric("kv_handover_bytes_total")
            stop_the_server(server)
            print(f"{name:8} {way:26} ok, {moved:.0f} bytes of K/V copied", flush=True)
    left = processes_on_gpus() - before
    assert not left, f"still on a GPU: {left}"
    print(f"nothing is left on {num_cards} GPUs")


if __name__ == "__main__":
    main()
