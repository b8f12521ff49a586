"""The official client, unchanged, against every endpoint that it knows."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from PIL import Image

from server.tools import PAINT, PROMPT, Running, assert_same_picture, data_url, decode, make_site, png

RED = png(Image.new("RGB", (64, 64), "red"))
OURS = {"num_inference_steps": 2, "seed": 1}


def sdk(server: Running, key: str = "secret") -> Any:
    """Untyped: the client's types do not know what our answers have beside OpenAI's fields."""
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def serve(root: Path) -> Iterator[Running]:
    server = Running(make_site(root, api_key="secret"))
    yield server
    server.stop()
    server.assert_nothing_taken()


@pytest.fixture(scope="module")
def paints(painter_root: Path) -> Iterator[Running]:
    yield from serve(painter_root)


@pytest.fixture(scope="module")
def talks(talker_root: Path) -> Iterator[Running]:
    yield from serve(talker_root)


def test_s25_no_options_at_all(paints: Running) -> None:
    answer = sdk(paints).images.generate(prompt=PROMPT)
    assert answer.data
    assert answer.data[0].b64_json
    assert decode(answer.data[0].b64_json).size == (64, 64)
    assert answer.size == "64x64"
    assert answer.usage
    assert answer.usage.output_tokens == 16


def test_generate_and_edit(paints: Running) -> None:
    client = sdk(paints)
    painted = client.images.generate(prompt=PROMPT, model="tiny", n=2, size="64x96", extra_body=OURS)
    assert [decode(one.b64_json).size for one in painted.data] == [(64, 96)] * 2
    assert [one.seed for one in painted.data] == [1, 2]
    edited = client.images.edit(image=[("a.png", RED), ("b.png", RED)], prompt=PROMPT, extra_body=OURS)
    assert edited.data
    one = client.images.edit(image=RED, prompt=PROMPT, extra_body=OURS)
    assert one.data
    assert one.data[0].b64_json != edited.data[0].b64_json


@pytest.mark.parametrize("kind", ["generate", "edit"])
def test_streams(paints: Running, kind: str) -> None:
    client = sdk(paints)
    body = {**OURS, "num_inference_steps": 8}
    if kind == "generate":
        stream = client.images.generate(prompt=PROMPT, stream=True, partial_images=2, extra_body=body)
    else:
        stream = client.images.edit(image=RED, prompt=PROMPT, stream=True, partial_images=2, extra_body=body)
    events = list(stream)
    name = "image_generation" if kind == "generate" else "image_edit"
    assert [event.type for event in events] == [f"{name}.partial_image"] * 2 + [f"{name}.completed"]
    assert all(decode(event.b64_json).size == (64, 64) for event in events)
    assert events[-1].type.endswith("completed")
    assert events[-1].usage.total_tokens


def test_errors_are_the_clients_own(paints: Running) -> None:
    client = sdk(paints)
    with pytest.raises(openai.BadRequestError) as refused:
        client.images.generate(prompt=PROMPT, size="100x64")
    assert refused.value.param == "size"
    assert refused.value.code == "bad_size"
    with pytest.raises(openai.AuthenticationError):
        sdk(paints, "wrong").models.list()
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")
    with pytest.raises(openai.BadRequestError, match="does not talk"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])


def test_models(paints: Running) -> None:
    assert [model.id for model in sdk(paints).models.list()] == ["tiny"]
    assert sdk(paints).models.retrieve("tiny").owned_by == "underpaint"


def test_a_dialogue_with_a_picture(talks: Running) -> None:
    client = sdk(talks)
    question = {
        "role": "user",
        "content": [
            {"type": "text", "text": "what is this?"},
            {"type": "image_url", "image_url": {"url": data_url(RED)}},
        ],
    }
    answer = client.chat.completions.create(
        model="tiny",
        messages=[question],
        max_completion_tokens=8,
        temperature=0,
    )
    choice = answer.choices[0]
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage
    assert 1 <= answer.usage.completion_tokens <= 8
    stream = client.chat.completions.create(
        model="tiny", messages=[question], max_completion_tokens=8, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == choice.message.content
    assert chunks[-1].usage == answer.usage


def test_a_talking_model_paints_as_well(talks: Running) -> None:
    values = {"prompt": PROMPT, "size": "64x32"}
    first = sdk(talks).images.generate(**values, extra_body=OURS)
    again = talks.client.post(
        "/v1/images/generations", json={**PAINT, **values}, headers={"Authorization": "Bearer secret"}
    ).json()
    assert_same_picture(first.data[0].b64_json, again["data"][0]["b64_json"])
    assert first.background == "opaque"
