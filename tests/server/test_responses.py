"""``/v1/responses`` by the official client: dialogues and paintings, whole and in a stream."""

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient
from PIL import Image

from server.test_bad_requests import assert_refused
from server.test_chat import script as script
from server.test_openai_sdk import paints as paints
from server.test_openai_sdk import sdk
from server.test_openai_sdk import talks as talks
from server.tools import (
    PROMPT,
    Running,
    assert_leaving_costs_one_pass,
    assert_same_picture,
    data_url,
    decode,
    png,
)

RED = png(Image.new("RGB", (64, 64), "red"))
TOOL = {"type": "image_generation", "size": "64x64", "num_inference_steps": 6, "seed": 1}
IN_CHAT = {"type": "image_generation", "size": "64x32", "num_inference_steps": 2, "seed": 3}


def said(text: str, *urls: str) -> dict[str, Any]:
    pictures = [{"type": "input_image", "image_url": url, "detail": "auto"} for url in urls]
    return {"role": "user", "content": [{"type": "input_text", "text": text}, *pictures]}


def pictures_of(response: Any) -> list[str]:
    return [item.result for item in response.output if item.type == "image_generation_call"]


def plain(response: Any) -> dict[str, Any]:
    """A response without what differs from one to the next."""
    values = response.to_dict()
    for item in values["output"]:
        item.pop("id")
    return {name: value for name, value in values.items() if name not in ("id", "created_at")}


def test_a_painting_is_that_of_the_images_endpoint(paints: Running) -> None:
    response = sdk(paints).responses.create(input=PROMPT, tools=[TOOL])
    direct = paints.client.post(
        "/v1/images/generations",
        json={"prompt": PROMPT, **{name: value for name, value in TOOL.items() if name != "type"}},
        headers={"Authorization": "Bearer secret"},
    ).json()
    (item,) = response.output
    assert item.result == direct["data"][0]["b64_json"]
    assert (item.status, item.size, item.output_format, item.seed) == ("completed", "64x64", "png", 1)
    assert item.background == direct["background"]
    assert response.status == "completed"
    assert response.store is False
    assert response.usage.total_tokens == direct["usage"]["total_tokens"]
    assert response.tool_usage.image_gen.to_dict() == direct["usage"]


def test_a_painting_streams_with_previews(paints: Running) -> None:
    whole = sdk(paints).responses.create(input=PROMPT, tools=[TOOL])
    events = list(sdk(paints).responses.create(input=PROMPT, tools=[{**TOOL, "partial_images": 2}], stream=True))
    assert [event.type for event in events] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.image_generation_call.in_progress", "response.image_generation_call.generating",
        "response.image_generation_call.partial_image", "response.image_generation_call.partial_image",
        "response.image_generation_call.completed", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    previews = [event for event in events if event.type.endswith("partial_image")]
    assert [event.partial_image_index for event in previews] == [0, 1]
    assert [decode(event.partial_image_b64).size for event in previews] == [(64, 64)] * 2
    assert plain(events[-1].response)["output"] == plain(whole)["output"]
    assert events[-1].response.id == events[0].response.id
    assert {event.item_id for event in events[3:8]} == {events[-1].response.output[0].id}


def test_an_edit_and_then_an_edit_of_it(paints: Running) -> None:
    """The client sends the answer back with the next question, as it got it."""
    client = sdk(paints)
    dialogue: list[Any] = [said(PROMPT, data_url(RED))]
    first = client.responses.create(input=dialogue, tools=[TOOL], tool_choice={"type": "image_generation"})
    form = {"prompt": PROMPT, "size": "64x64", "extra_body": {"num_inference_steps": 6, "seed": 1}}
    assert pictures_of(first) == [client.images.edit(image=RED, **form).data[0].b64_json]
    dialogue += [item.to_dict() for item in first.output]
    dialogue.append(said(PROMPT))
    second = client.responses.create(input=dialogue, tools=[{**TOOL, "action": "edit"}], store=False)
    edited = client.images.edit(image=base64.b64decode(pictures_of(first)[0]), **form)
    assert pictures_of(second) == [edited.data[0].b64_json]
    again = client.responses.create(input=[*dialogue[:-1], said(PROMPT, data_url(RED))], tools=[TOOL])
    assert pictures_of(again) not in (pictures_of(first), pictures_of(second))


def test_webp_and_opaque(paints: Running) -> None:
    tool = {**TOOL, "output_format": "webp", "output_compression": 50, "background": "opaque"}
    (item,) = sdk(paints).responses.create(input=PROMPT, tools=[tool]).output
    assert decode(item.result).format == "WEBP"
    assert (item.background, item.output_format) == ("opaque", "webp")


def test_a_text_is_that_of_the_chat(talks: Running) -> None:
    client = sdk(talks)
    response = client.responses.create(
        input="hello", instructions="be short", max_output_tokens=8, temperature=0, metadata={"a": "b"}
    )
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=8, temperature=0)
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens
    assert response.metadata == {"a": "b"}
    if chat.choices[0].finish_reason == "length":
        assert response.status == "incomplete"
        assert response.incomplete_details.reason == "max_output_tokens"
    else:
        assert response.status == "completed"


def test_a_text_streams_as_the_sdk_adds_it_up(talks: Running) -> None:
    client = sdk(talks)
    whole = client.responses.create(model="tiny", input=[said("what is this?", data_url(RED))], max_output_tokens=12)
    with client.responses.stream(
        model="tiny", input=[said("what is this?", data_url(RED))], max_output_tokens=12
    ) as stream:
        events = list(stream)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert len(deltas) > 1
    assert plain(events[-1].response) | {"output": 0} == plain(whole) | {"output": 0}
    assert events[-1].response.output[0].content[0].text == whole.output_text
    assert events[-1].type == ("response.incomplete" if whole.status == "incomplete" else "response.completed")


def test_a_thought_is_an_item_of_its_own(talks: Running) -> None:
    client = sdk(talks)
    values = {"input": "hello", "reasoning": {"effort": "low"}, "max_output_tokens": 4, "temperature": 0}
    whole = client.responses.create(**values)
    assert whole.output[0].type == "reasoning"
    assert whole.output[0].content[0].text
    assert whole.output[0].content[0].text not in whole.output_text
    events = list(client.responses.create(**values, stream=True))
    thought = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert thought == whole.output[0].content[0].text
    plainly = client.responses.create(**values | {"reasoning": {"effort": "none"}})
    assert [item.type for item in plainly.output] == ["message"]
    sent_back = [*(item.to_dict() for item in whole.output), said("and?")]
    assert client.responses.create(input=[said("hello"), *sent_back], max_output_tokens=2).usage.input_tokens > 0


def test_text_and_pictures_in_one_answer(talks: Running, script: list[int]) -> None:
    client = sdk(talks)
    values = {"input": "draw", "max_output_tokens": len(script), "tools": [IN_CHAT]}
    whole = client.responses.create(**values)
    assert [item.type for item in whole.output] == ["message", "image_generation_call", "message"]
    assert whole.status == "completed"
    config = {"width": 64, "height": 32, "steps": 2}
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "draw"}], max_completion_tokens=len(script), seed=3,
        modalities=["text", "image"], extra_body={"image_config": config},
    )  # fmt: skip
    content: Any = chat.choices[0].message.content
    assert_same_picture(pictures_of(whole)[0], content[1]["image_url"]["url"].partition(",")[2])
    assert whole.output_text == content[0]["text"] + content[2]["text"]
    events = list(client.responses.create(**values, stream=True))
    assert plain(events[-1].response)["output"] == plain(whole)["output"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.type for item in done] == ["message", "image_generation_call", "message"]
    assert [event.output_index for event in events if event.type == "response.output_item.added"] == [0, 1, 2]
    # Sent back item by item, the answer is one message again, as it was when the model wrote it.
    parts = client.chat.completions.create(
        model="tiny", max_completion_tokens=2,
        messages=[{"role": "user", "content": "draw"}, {"role": "assistant", "content": content},
                  {"role": "user", "content": "again"}],
    )  # fmt: skip
    back = client.responses.create(
        input=[said("draw"), *(item.to_dict() for item in whole.output), said("again")], max_output_tokens=2
    )
    assert back.usage.input_tokens == parts.usage.prompt_tokens


def test_a_picture_within_a_dialogue_has_previews(talks: Running, script: list[int]) -> None:
    client = sdk(talks)
    tool = {**IN_CHAT, "num_inference_steps": 6}
    values = {"input": "draw", "max_output_tokens": len(script), "stream": True}
    plainly = list(client.responses.create(**values, tools=[tool]))
    events = list(client.responses.create(**values, tools=[{**tool, "partial_images": 2}]))
    partial = "response.image_generation_call.partial_image"
    kinds = [event.type for event in events if "image_generation_call" in event.type]
    assert kinds == [
        "response.image_generation_call.in_progress", "response.image_generation_call.generating",
        partial, partial, "response.image_generation_call.completed",
    ]  # fmt: skip
    previews = [event for event in events if event.type == partial]
    assert [event.partial_image_index for event in previews] == [0, 1]
    assert [decode(event.partial_image_b64).size for event in previews] == [(64, 32)] * 2
    item = events[-1].response.output[1]
    assert {(event.item_id, event.output_index) for event in previews} == {(item.id, 1)}
    assert item.result not in [event.partial_image_b64 for event in previews]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert plain(events[-1].response)["output"] == plain(plainly[-1].response)["output"]


def test_a_talking_model_paints_on_demand(talks: Running) -> None:
    client = sdk(talks)
    tool = {**TOOL, "size": "64x32", "partial_images": 1}
    events = list(client.responses.create(input=PROMPT, tools=[tool], tool_choice="required", stream=True))
    assert sum(event.type.endswith("partial_image") for event in events) == 1
    direct = client.images.generate(prompt=PROMPT, size="64x32", extra_body={"num_inference_steps": 6, "seed": 1})
    assert_same_picture(pictures_of(events[-1].response)[0], direct.data[0].b64_json)


def test_a_stream_that_breaks_ends_with_failed(paints: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("injected")

    monkeypatch.setattr(paints.service.qwen.image_codec, "decode", broken)
    events = list(sdk(paints).responses.create(input=PROMPT, tools=[TOOL], stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed"
    assert events[-1].response.error.code == "engine_failure"
    assert events[-1].response.output == []
    with pytest.raises(openai.InternalServerError):
        sdk(paints).responses.create(input=PROMPT, tools=[TOOL])


def test_s1_a_client_that_is_gone_costs_no_more_than_a_step(paints: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(until: Callable[[], None]) -> None:
        stream = sdk(paints).responses.create(input=PROMPT, tools=[{**TOOL, "num_inference_steps": 50}], stream=True)
        until()
        stream.close()

    assert_leaving_costs_one_pass(paints, monkeypatch, ask)


ASK: dict[str, Any] = {"input": "hello", "max_output_tokens": 2}
PAINTS: dict[str, Any] = {"input": PROMPT, "tools": [TOOL]}
OF_BOTH: list[tuple[dict[str, Any], str]] = [
    ({"store": True}, "store"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"include": ["reasoning.encrypted_content"]}, "include"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "a"}}, "prompt"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 3}, "input"),
    ({"input": "x" * 32_001}, "input"),
    ({"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]}, "input.0"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input.0.role"),
    ({"input": [{"role": "user"}]}, "input.0.content"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "a"}]}]}, "input.0.content.0"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "a"}]}]},
        "input.0.content.0.image_url",
    ),
    ({"input": [said("a", "https://example.com/a.png")]}, "input"),
    ({"input": [said("a", "data:image/png;base64,####")]}, "input"),
    ({"input": [said("a", data_url(b"nothing"))]}, "input"),
    ({"input": [said("a", data_url(RED[:60]))]}, "input"),
    ({"input": [said("a", *[data_url(RED)] * 17)]}, "input"),
    ({"input": [{"role": "assistant", "content": "a"}]}, "input"),
    ({"input": [{"type": "image_generation_call", "result": "####"}, said("a")]}, "input"),
    ({"tools": [{"type": "function", "name": "f"}]}, "tools.0.type"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [{**TOOL, "size": "65x64"}]}, "tools.0.size"),
    ({"tools": [{**TOOL, "size": 64}]}, "tools.0.size"),
    ({"tools": [{**TOOL, "num_inference_steps": 1001}]}, "tools.0.num_inference_steps"),
    ({"tools": [{**TOOL, "steps": 3}]}, "tools.0.steps"),
    ({"tools": [{**TOOL, "model": "gpt-image-2"}]}, "tools.0.model"),
    ({"tools": [{**TOOL, "partial_images": 4}]}, "tools.0.partial_images"),
    ({"tools": [{**TOOL, "output_format": "gif"}]}, "tools.0.output_format"),
    ({"tools": [{**TOOL, "input_image_mask": {"image_url": "a"}}]}, "tools.0.input_image_mask"),
    ({"tools": [], "tool_choice": "required"}, "tools"),
    ({"tools": None, "tool_choice": {"type": "image_generation"}}, "tools"),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.type"),
    ({"tool_choice": "always"}, "tool_choice"),
    ({"max_tool_calls": 0}, "max_tool_calls"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"text": {"format": {"type": "json_object"}}}, "text.format.type"),
    ({"truncation": "auto"}, "truncation"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"reasoning": {"effort": "xhigh"}}, "reasoning.effort"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"metadata": {str(i): "a" for i in range(17)}}, "metadata"),
    ({"metadata": {"a": "\ud800"}}, "metadata"),
    ({"metadata": {"\ud800": "a"}}, "metadata"),
    ({"tools": [{**TOOL, "quality": "\ud800"}]}, "tools.0.quality"),
    ({"model": "another"}, "model"),
    ({"messages": []}, "messages"),
]
OF_PAINTERS: list[tuple[dict[str, Any], str]] = [
    ({"tools": []}, "tools"),
    ({"tools": None}, "tools"),
    ({"tool_choice": "none"}, "tool_choice"),
    ({"instructions": "be quick"}, "instructions"),
    ({"temperature": 1.0}, "temperature"),
    ({"max_output_tokens": 3}, "max_output_tokens"),
    ({"reasoning": {"effort": "low"}}, "reasoning"),
    ({"input": [{"role": "system", "content": "a"}, said("b")]}, "input"),
    ({"input": [said("x" * 20_000), said("x" * 32_001)]}, "input"),
    ({"tools": [{**TOOL, "action": "edit"}]}, "input"),
    ({"tools": [{**TOOL, "action": "generate"}], "input": [said("a", data_url(RED))]}, "tools.0.action"),
    ({"tools": [{**TOOL, "guidance_scale": 4}]}, "tools.0.guidance_scale"),
    ({"tools": [{**TOOL, "true_cfg_scale": 4}]}, "tools.0.negative_prompt"),
    ({"tools": [{**TOOL, "background": "transparent", "output_format": "jpeg"}]}, "tools.0.background"),
    ({"tools": [{**TOOL, "output_compression": 50}]}, "tools.0.output_compression"),
    ({"tools": [{**TOOL, "partial_images": 1}]}, "tools.0.partial_images"),
]
OF_TALKERS: list[tuple[dict[str, Any], str]] = [
    ({"max_tool_calls": 2}, "max_tool_calls"),
    ({"input": "a <image> b"}, "input"),
    ({"tools": [{**IN_CHAT, "partial_images": 1}]}, "tools.0.partial_images"),
    ({"tools": [{**IN_CHAT, "output_format": "webp"}]}, "tools.0.output_format"),
    ({"tools": [{**IN_CHAT, "background": "transparent"}]}, "tools.0.background"),
    ({"tools": [{**IN_CHAT, "action": "edit"}]}, "tools.0.action"),
    ({"tools": [{**IN_CHAT, "negative_prompt": "a"}]}, "tools.0.negative_prompt"),
    ({"tools": [{**IN_CHAT, "cfg_norm": "x"}]}, "tools.0.cfg_norm"),
    ({"tools": [IN_CHAT], "tool_choice": "required", "max_output_tokens": None, "instructions": "a"}, "instructions"),
    ({"input": [{"type": "reasoning", "id": "a", "summary": []}]}, "input"),
]


def name_of(value: object) -> str:
    return str(value)[:60]


def post_by_hand(client: TestClient, body: dict[str, Any]) -> Any:
    """A client might refuse to send some of these."""
    return client.post("/v1/responses", content=json.dumps(body), headers={"Content-Type": "application/json"})


@pytest.mark.parametrize(("values", "param"), OF_BOTH + OF_PAINTERS, ids=name_of)
def test_s27_paintings_that_are_refused(painter: TestClient, values: dict[str, Any], param: str) -> None:
    response = post_by_hand(painter, {**PAINTS, **values})
    assert_refused(response, param, status=404 if param.endswith("model") else 400)


@pytest.mark.parametrize(("values", "param"), OF_BOTH + OF_TALKERS, ids=name_of)
def test_s27_dialogues_that_are_refused(talker: TestClient, values: dict[str, Any], param: str) -> None:
    response = post_by_hand(talker, {**ASK, **values})
    assert_refused(response, param, status=404 if param.endswith("model") else 400)


@pytest.mark.parametrize("values", [
    {"store": False}, {"store": None}, {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k"},
    {"service_tier": "auto", "parallel_tool_calls": True}, {"truncation": "disabled", "include": []},
    {"tools": [{**TOOL, "quality": "high", "moderation": "low", "input_fidelity": "high", "action": "auto"}]},
    {"text": {"format": {"type": "text"}}},
])  # fmt: skip
def test_what_other_clients_send_has_no_effect(painter: TestClient, values: dict[str, Any]) -> None:
    answers = [painter.post("/v1/responses", json=body).json() for body in (PAINTS, {**PAINTS, **values})]
    assert answers[0]["output"][0]["result"] == answers[1]["output"][0]["result"]


def test_nothing_is_stored(painter: TestClient) -> None:
    made = painter.post("/v1/responses", json=PAINTS).json()
    response = painter.get(f"/v1/responses/{made['id']}")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


@pytest.fixture(autouse=True)
def _nothing_stays(request: pytest.FixtureRequest) -> Iterator[Path | None]:
    """After every test of a running server, it has nothing at work."""
    yield None
    for name in ("paints", "talks"):
        if name in request.fixturenames:
            request.getfixturevalue(name).idle()
