"""Paintings and edits over HTTP: what is asked for is what comes, and it says what it is."""

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from PIL import Image

from server.tools import PAINT, PROMPT, assert_same_picture, data_url, decode, log_of, png
from underpaint import Pipeline
from underpaint.server.media import Output, send

DrawImage = Callable[..., Image.Image]


def paint(client: TestClient, **values: Any) -> dict[str, Any]:
    response = client.post("/v1/images/generations", json={**PAINT, **values})
    assert response.status_code == 200, response.text
    return response.json()


def edit(client: TestClient, files: list[Any], **values: Any) -> dict[str, Any]:
    response = client.post("/v1/images/edits", data={**PAINT, **values}, files=files)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_painting_equals_the_pipelines(painter: TestClient, painter_root: Any) -> None:
    direct = Pipeline.from_pretrained(painter_root, kv_cache_bytes=64 << 20)(
        PROMPT, width=64, height=64, num_inference_steps=2, seed=1, num_images=2
    )
    answer = paint(painter, n=2, background="transparent")
    assert [decode(one["b64_json"]).tobytes() for one in answer["data"]] == [i.tobytes() for i in direct.images]
    assert [one["seed"] for one in answer["data"]] == [1, 2]


def test_usage_counts_what_was_read_and_painted(painter: TestClient, draw_image: DrawImage) -> None:
    usage = edit(painter, [("image", png(draw_image(64, 64)))], n=3)["usage"]
    assert usage["output_tokens"] == 3 * (64 // 16) ** 2
    assert usage["input_tokens_details"]["image_tokens"] == (64 // 16) ** 2
    assert usage["input_tokens_details"]["text_tokens"] > 0
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_s19_the_size_asked_for_wins_over_the_references(painter: TestClient, draw_image: DrawImage) -> None:
    answer = edit(painter, [("image", png(draw_image(64, 64)))], size="128x96")
    assert answer["size"] == "128x96"
    assert decode(answer["data"][0]["b64_json"]).size == (128, 96)
    own = edit(painter, [("image", png(draw_image(128, 32)))], size="auto")
    assert own["size"] == "128x32"
    assert decode(own["data"][0]["b64_json"]).size == (128, 32)


@pytest.mark.parametrize("size", ["32x32", "64x32", "32x96", "160X64", "96x128"])
def test_s20_every_size_is_the_one_of_the_reply(painter: TestClient, size: str) -> None:
    answer = paint(painter, size=size, num_inference_steps=1)
    width, height = decode(answer["data"][0]["b64_json"]).size
    assert answer["size"] == f"{width}x{height}" == size.lower()


@pytest.mark.parametrize("n", range(1, 11))
def test_s21_n_pictures_that_differ(painter: TestClient, n: int) -> None:
    answer = paint(painter, n=n, num_inference_steps=1, size="32x32")
    assert len({one["b64_json"] for one in answer["data"]}) == len(answer["data"]) == n


def test_s23_each_returned_seed_paints_the_same_picture(painter: TestClient) -> None:
    answer = paint(painter, n=4, seed=2**40)
    for one in answer["data"]:
        assert_same_picture(paint(painter, seed=one["seed"])["data"][0]["b64_json"], one["b64_json"])
    random = paint(painter, seed=None)["data"][0]
    assert paint(painter, seed=random["seed"])["data"][0] == random


def test_s24_no_response_format_is_base64(painter: TestClient) -> None:
    assert decode(paint(painter)["data"][0]["b64_json"]).size == (64, 64)
    asked = paint(painter, response_format="b64_json")
    assert asked == paint(painter) | {"created": asked["created"]}


def variants() -> dict[str, bytes]:
    """Pictures of kinds that are easily got wrong; all must work."""
    colours = Image.linear_gradient("L").resize((48, 40))
    rotated = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    colours.convert("RGB").save(rotated, "JPEG", exif=exif)
    return {
        "1x1": png(Image.new("RGB", (1, 1), "red")),
        "gif": png(colours.convert("P"), "GIF"),
        "16 bit": png(Image.new("I;16", (32, 32), 40_000)),
        "rotated": rotated.getvalue(),
        "webp": png(colours.convert("RGBA"), "WEBP"),
        "grey": png(colours),
        "cmyk": png(colours.convert("CMYK"), "JPEG"),
        "tiff": png(colours, "TIFF"),
        "bmp": png(colours.convert("RGB"), "BMP"),
    }


@pytest.mark.parametrize("kind", variants())
def test_s26_unusual_pictures_work(painter: TestClient, kind: str) -> None:
    answer = edit(painter, [("image", variants()[kind])], num_inference_steps=1)
    assert answer["size"] == "64x64"


def test_s26_a_rotated_picture_is_read_upright(painter: TestClient) -> None:
    assert edit(painter, [("image", variants()["rotated"])], size="auto")["size"] == "64x64"
    long = Image.new("RGB", (128, 32), "blue")
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    long.save(file, "JPEG", exif=exif)
    assert edit(painter, [("image", file.getvalue())], size="auto")["size"] == "32x128"


@pytest.mark.parametrize("output_format", ["png", "webp", "jpeg"])
@pytest.mark.parametrize("background", ["transparent", "opaque", "auto"])
def test_s28_every_format_and_background(painter: TestClient, output_format: str, background: str) -> None:
    response = painter.post(
        "/v1/images/generations", json={**PAINT, "output_format": output_format, "background": background}
    )
    if (output_format, background) == ("jpeg", "transparent"):
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "background"
        return
    answer = response.json()
    image = decode(answer["data"][0]["b64_json"])
    assert image.format == output_format.upper()
    assert answer["output_format"] == output_format
    assert answer["background"] == ("transparent" if image.mode == "RGBA" else "opaque")
    assert background == "auto" or answer["background"] == background


@pytest.mark.parametrize(
    ("alpha", "background"), [(255, "opaque"), (237, "opaque"), (200, "transparent"), (0, "transparent")]
)
@pytest.mark.parametrize("output_format", ["png", "webp"])
def test_auto_is_transparent_where_one_can_see_through(alpha: int, background: str, output_format: Any) -> None:
    """One pixel is enough; a decoder's error is not."""
    image = Image.new("RGBA", (64, 64), (200, 0, 0, 255))
    image.putpixel((3, 5), (200, 0, 0, alpha))
    sent = send(image, Output(output_format))
    assert sent.background == background
    decoded = decode(sent.b64)
    assert decoded.mode == ("RGBA" if background == "transparent" else "RGB")
    assert decoded.convert("RGBA").getpixel((3, 5))[3] == (alpha if background == "transparent" else 255)  # type: ignore[index]
    assert send(image, Output(output_format, background="transparent")).background == "transparent"


def test_compression_is_honoured(painter: TestClient) -> None:
    sizes = [
        len(paint(painter, output_format="jpeg", output_compression=quality)["data"][0]["b64_json"])
        for quality in (0, 50, 100)
    ]
    assert sizes == sorted(set(sizes))


def test_s31_three_ways_to_send_pictures_are_one(painter: TestClient, draw_image: DrawImage) -> None:
    pictures = [png(draw_image(64, 64)), png(draw_image(96, 64))]
    whole = {**PAINT, "images": [{"image_url": data_url(picture)} for picture in pictures]}
    as_json = painter.post("/v1/images/edits", json=whole).json()
    answers = [
        edit(painter, [("image", pictures[0]), ("image", pictures[1])]),
        edit(painter, [("image[]", pictures[0]), ("image[]", pictures[1])]),
        as_json,
    ]
    assert len({one["data"][0]["b64_json"] for one in answers}) == 1
    assert answers[0]["data"] != edit(painter, [("image", pictures[0])])["data"]


def test_s46_another_picture_with_the_same_text(painter: TestClient, draw_image: DrawImage) -> None:
    first, second = (edit(painter, [("image", png(draw_image(64, 64)))]) for _ in range(2))
    assert first["data"] != second["data"]


def test_harmless_fields_have_no_effect(painter: TestClient) -> None:
    values = {"user": "u", "quality": "high", "style": "vivid", "moderation": "low", "safety_identifier": "s"}
    assert paint(painter, **values)["data"] == paint(painter)["data"]


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    blocks = [block.split("\n") for block in text.strip().split("\n\n")]
    return [(block[0].removeprefix("event: "), json.loads(block[1].removeprefix("data: "))) for block in blocks]


@pytest.mark.parametrize("num", range(4))
def test_a_stream_has_previews_and_ends(painter: TestClient, num: int) -> None:
    body = {**PAINT, "stream": True, "partial_images": num, "num_inference_steps": 8, "n": 2}
    events = events_of(painter.post("/v1/images/generations", json=body).text)
    plain = paint(painter, num_inference_steps=8, n=2)
    assert [name for name, _ in events] == ["image_generation.partial_image"] * 2 * num + [
        "image_generation.completed"
    ] * 2
    for name, event in events:
        assert event["type"] == name
        assert decode(event["b64_json"]).size == (64, 64)
    for (_, event), one in zip(events[-2:], plain["data"], strict=True):
        assert_same_picture(event["b64_json"], one["b64_json"])
    assert [event["seed"] for _, event in events[-2:]] == [1, 2]
    painted = sum(event["usage"]["total_tokens"] for _, event in events[-2:])
    assert painted == plain["usage"]["total_tokens"]
    for index in range(2):
        numbers = [event["partial_image_index"] for _, event in events[:-2] if event["index"] == index]
        assert numbers == list(range(num))


def test_previews_come_closer_to_the_picture(painter: TestClient) -> None:
    """They show where the painting is heading, and so differ less and less from it."""
    body = {**PAINT, "stream": True, "partial_images": 3, "num_inference_steps": 20, "background": "opaque"}
    events = events_of(painter.post("/v1/images/generations", json=body).text)
    *previews, last = [decode(event["b64_json"]).convert("L").tobytes() for _, event in events]
    distances = [sum(abs(a - b) for a, b in zip(one, last, strict=True)) for one in previews]
    assert distances == sorted(distances, reverse=True)


def test_edits_stream_under_their_own_name(painter: TestClient, draw_image: DrawImage) -> None:
    response = painter.post(
        "/v1/images/edits", data={**PAINT, "stream": "true"}, files=[("image", png(draw_image(64, 64)))]
    )
    assert [name for name, _ in events_of(response.text)] == ["image_edit.completed"]


def test_prompts_are_not_logged(painter: TestClient) -> None:
    paint(painter, prompt="a secret teapot")
    site = painter.app.user_middleware[0].kwargs["site"]  # type: ignore[attr-defined]
    assert '"endpoint": "/v1/images/generations"' in log_of(site)
    assert "secret" not in log_of(site)
