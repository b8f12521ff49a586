"""Dialogues over HTTP: text and pictures as the engine gives them, whole or in a stream."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from PIL import Image

from server.conftest import client_of
from server.tools import (
    ENGINE,
    Running,
    assert_leaving_costs_one_pass,
    assert_same_picture,
    data_url,
    in_threads,
    make_site,
    png,
    slow_down,
)
from underpaint import Chat, PaintingOptions, PicturePart, TextPart
from underpaint.chat import PreviewPart
from underpaint.models import registry
from underpaint.service import Service
from underpaint.understanding.reply import Reply

ASK = {"messages": [{"role": "user", "content": "draw"}], "max_tokens": 12, "seed": 3}
JSON = {"content-type": "application/json"}
PICTURES = {"modalities": ["text", "image"], "image_config": {"width": 64, "height": 32, "steps": 2}}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, talker_root: Path) -> list[int]:
    """Makes every answer a text, a picture, a text, and the end: random weights would hardly paint by themselves."""
    tokenizer = Service(registry.load(talker_root, ENGINE), ENGINE).neo.tokenizer
    words = tokenizer.tokenize("describe the picture")
    forced = [*words, tokenizer.image_start, *words, tokenizer.turn_stop]
    plain = Reply.__init__

    def scripted(self: Reply, *arguments: Any, **values: Any) -> None:
        if values.get("pause_tokens"):
            values["forced"] = iter(forced)
        plain(self, *arguments, **values)

    monkeypatch.setattr(Reply, "__init__", scripted)
    return forced


def ask(client: TestClient, **values: Any) -> dict[str, Any]:
    response = client.post("/v1/chat/completions", json={**ASK, **values})
    assert response.status_code == 200, response.text
    return response.json()


def deltas(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_text_equals_the_engines(talker: TestClient, talker_root: Path) -> None:
    direct = Chat.from_pretrained(talker_root, kv_cache_bytes=64 << 20)
    parts = list(direct.send("draw", max_pictures=0, max_tokens=12, seed=3))
    answer = ask(talker)
    assert answer["choices"][0]["message"]["content"] == "".join(p.text for p in parts if isinstance(p, TextPart))
    assert answer["choices"][0]["finish_reason"] == direct.finish
    assert answer["usage"]["completion_tokens"] == len(direct.ids)
    assert answer["object"] == "chat.completion"


def test_pictures_in_an_answer(talker: TestClient, talker_root: Path, script: list[int]) -> None:
    direct = Chat.from_pretrained(talker_root, kv_cache_bytes=64 << 20)
    painting = PaintingOptions(num_inference_steps=2, sizes=((64, 32),))
    parts = list(direct.send("draw", painting=painting, seed=3, max_tokens=len(script)))
    picture = next(part.image for part in parts if isinstance(part, PicturePart))
    content = ask(talker, **PICTURES, max_tokens=len(script))["choices"][0]["message"]["content"]
    assert [part["type"] for part in content] == ["text", "image_url", "text"]
    head, _, b64 = content[1]["image_url"]["url"].partition(",")
    assert head == "data:image/png;base64"
    assert_same_picture(b64, data_url(png(picture)).partition(",")[2])
    assert [part["text"] for part in content[::2]] == ["describe the picture"] * 2


def test_defect_k_a_stream_is_the_answer_in_pieces(talker: TestClient, script: list[int]) -> None:
    whole = ask(talker, **PICTURES, max_tokens=len(script))["choices"][0]
    response = talker.post("/v1/chat/completions", json={**ASK, **PICTURES, "max_tokens": len(script), "stream": True})
    chunks = deltas(response.text)
    told = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    pictures = [content for content in told if isinstance(content, list)]
    assert pictures == [[whole["message"]["content"][1]]]
    assert "".join(content for content in told if isinstance(content, str)) == "describe the picture" * 2
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"] == "stop"


@pytest.mark.parametrize("num", [0, 1, 3])
def test_pictures_of_a_stream_have_previews(talker: TestClient, talker_root: Path, script: list[int], num: int) -> None:
    """Those of the engine, beside the content, which they leave as it is."""
    direct = Chat.from_pretrained(talker_root, kv_cache_bytes=64 << 20)
    painting = PaintingOptions(num_inference_steps=20, sizes=((64, 32),), num_previews=num)
    parts = list(direct.send("draw", painting=painting, seed=3, max_tokens=len(script)))
    expected = [part.image for part in parts if isinstance(part, PreviewPart)]
    assert len({image.tobytes() for image in expected}) == num
    config = {"width": 64, "height": 32, "steps": 20, "partial_images": num}
    body = {**ASK, **PICTURES, "image_config": config, "max_tokens": len(script), "stream": True}
    chunks = deltas(talker.post("/v1/chat/completions", json=body).text)
    told = [chunk["choices"][0]["delta"] for chunk in chunks]
    previews = [delta["partial_image"] for delta in told if "partial_image" in delta]
    assert [(preview["index"], preview["partial_image_index"]) for preview in previews] == [(0, i) for i in range(num)]
    for preview, image in zip(previews, expected, strict=True):
        assert_same_picture(preview["image_url"]["url"].partition(",")[2], data_url(png(image)).partition(",")[2])
    (picture,) = [delta["content"][0] for delta in told if isinstance(delta.get("content"), list)]
    plain = {**PICTURES, "image_config": {**config, "partial_images": 0}}
    assert picture == ask(talker, **plain, max_tokens=len(script))["choices"][0]["message"]["content"][1]


def test_a_picture_of_an_answer_can_be_talked_about(talker: TestClient, script: list[int]) -> None:
    content = ask(talker, **PICTURES, max_tokens=len(script))["choices"][0]["message"]["content"]
    messages = [*ASK["messages"], {"role": "assistant", "content": content}, {"role": "user", "content": "again"}]  # type: ignore[misc]
    answer = ask(talker, messages=messages, max_tokens=3)
    assert answer["usage"]["prompt_tokens"] > ask(talker)["usage"]["prompt_tokens"]


def test_u20_a_picture_changes_the_answer_and_its_place_does_not_matter_to_the_client(talker: TestClient) -> None:
    urls = [data_url(png(Image.new("RGB", (64, 64), colour))) for colour in ("red", "blue")]
    contents = [[{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}] for url in urls]
    texts = [
        ask(talker, messages=[{"role": "user", "content": content}])["choices"][0]["message"]["content"]
        for content in contents
    ]
    assert texts[0] != texts[1]


def test_thoughts_are_kept_apart(talker: TestClient) -> None:
    message = ask(talker, think=True, max_think_tokens=4, max_tokens=4)["choices"][0]["message"]
    assert message["reasoning_content"]
    assert message["reasoning_content"] not in message["content"]


def test_the_number_of_pictures_is_a_limit(talker: TestClient, script: list[int]) -> None:
    config = {**PICTURES["image_config"], "num_images": 1}  # type: ignore[dict-item]
    answer = ask(talker, modalities=["text", "image"], image_config=config, max_tokens=len(script))
    assert sum(part["type"] == "image_url" for part in answer["choices"][0]["message"]["content"]) == 1


@pytest.fixture
def talks(start: Callable[..., Running], talker_root: Path) -> Running:
    return start(talker_root)


@pytest.mark.parametrize("while_painting", [False, True])
def test_s1_an_answer_ends_when_its_reader_is_gone(
    talks: Running, monkeypatch: pytest.MonkeyPatch, script: list[int], while_painting: bool
) -> None:
    """While it is written, and in the middle of a picture, between whose steps nothing is sent."""
    assert talks.service.understanding
    runner: Any = talks.service.runner if while_painting else talks.service.understanding.runner
    body: dict[str, Any] = {**ASK, "max_tokens": 1000, "stream": True}
    if while_painting:
        body |= {**PICTURES, "image_config": {"width": 64, "height": 32, "steps": 60}}

    def ask(until: Callable[[], None]) -> None:
        with talks.client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            until()

    assert_leaving_costs_one_pass(talks, monkeypatch, ask, runner)


def test_s7_a_picture_in_an_answer_has_the_deadline_of_the_request(
    start: Callable[..., Running], talker_root: Path, monkeypatch: pytest.MonkeyPatch, script: list[int]
) -> None:
    server = start(talker_root, timeout_seconds=0.8)
    slow_down(monkeypatch, server.site, 0.1)
    body = {**ASK, **PICTURES, "image_config": {"width": 64, "height": 32, "steps": 100}}
    response = server.post("/v1/chat/completions", **body)
    assert response.status_code == 504


def test_many_dialogues_at_once_are_as_each_alone(talks: Running) -> None:
    def say(i: int) -> str:
        messages = [{"role": "user", "content": f"tell me about {i}"}]
        answer = talks.post("/v1/chat/completions", messages=messages, max_tokens=6)
        assert answer.status_code == 200
        return answer.json()["choices"][0]["message"]["content"]

    assert in_threads([partial(say, i) for i in range(8)]) == [say(i) for i in range(8)]


def test_a_picture_of_no_given_size_keeps_to_the_limit_of_the_server(talker_root: Path, script: list[int]) -> None:
    site = make_site(talker_root, max_output_pixels=64 * 64)
    with client_of(site) as client:
        body = {**ASK, "modalities": ["text", "image"]}
        refused = client.post("/v1/chat/completions", json=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "bad_size"
        assert refused.json()["error"]["param"] == "image_config"
        assert ask(client, **PICTURES)["choices"]
        assert ask(client)["choices"]


def test_two_seeds_are_one_too_many(talker: TestClient) -> None:
    body = {**ASK, **PICTURES, "image_config": {"seed": 4}}
    response = talker.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "image_config.seed"


def test_the_coldest_of_temperatures_is_greedy(talker: TestClient) -> None:
    """1e-50 is nothing in fp32, and 1e-40 makes every logit infinite."""
    greedy = ask(talker)["choices"]
    for temperature in (1e-50, 1e-40, 1e-30):
        assert ask(talker, temperature=temperature)["choices"] == greedy


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"messages": [{"role": "user", "content": "half \ud83d a pair"}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud83d"}]}]}, "messages.0.content.0"),
        ({"stop": "\ud83d"}, "stop"),
        ({"stop": ["end", "\ud83d"]}, "stop"),
    ],
)
def test_half_a_character_is_refused_before_it_goes_to_a_worker(
    talker: TestClient, values: dict[str, Any], param: str
) -> None:
    """No message between processes can hold it: the request would have no outcome until its deadline."""
    response = talker.post("/v1/chat/completions", content=json.dumps({**ASK, **values}), headers=JSON)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(param)
