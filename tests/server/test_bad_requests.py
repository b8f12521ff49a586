"""What is refused: always with the documented status, in OpenAI's shape, naming the parameter, and before any work."""

import json
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from PIL import Image
from timing import in_time

from server.conftest import client_of
from server.tools import PAINT, assert_nothing_taken, data_url, make_site, png
from underpaint.errors import UnderpaintError
from underpaint.server.faults import CODES, error_object
from underpaint.server.media import MAX_IMAGES

RED = png(Image.new("RGBA", (64, 64), "red"))
RED_JPEG = png(Image.effect_noise((64, 64), 50), "JPEG")
ASK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(*chunks: bytes, width: int = 64, height: int = 64) -> bytes:
    """A PNG of an RGB picture that is made of these chunks, whatever they are."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IEND", b"")


def bmp_header(width: int, height: int) -> bytes:
    file = b"BM" + struct.pack("<IHHI", 118, 0, 0, 54)
    return file + struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)


def user(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}]}


GENERATIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "bad_parameter"),
    ({"prompt": 3}, "prompt", "bad_parameter"),
    ({"prompt": ["a", "b"]}, "prompt", "bad_parameter"),
    ({"prompt": "x" * 32_001}, "prompt", "bad_parameter"),
    ({"prompt": "\ud800"}, "prompt", "bad_parameter"),
    ({"cfg_norm": "\ud800"}, "cfg_norm", "bad_parameter"),
    ({"quality": "\ud800"}, "quality", "bad_parameter"),
    ({"n": 0}, "n", "bad_parameter"),
    ({"n": 11}, "n", "bad_parameter"),
    ({"n": -1}, "n", "bad_parameter"),
    ({"n": "2"}, "n", "bad_parameter"),
    ({"n": True}, "n", "bad_parameter"),
    ({"n": 1.5}, "n", "bad_parameter"),
    ({"size": "100x64"}, "size", "bad_size"),
    ({"size": "64x100"}, "size", "bad_size"),
    ({"size": "0x64"}, "size", "bad_size"),
    ({"size": "-64x64"}, "size", "bad_size"),
    ({"size": "64"}, "size", "bad_size"),
    ({"size": "64x64x64"}, "size", "bad_size"),
    ({"size": "axb"}, "size", "bad_size"),
    ({"size": "٦٤x٦٤"}, "size", "bad_size"),
    ({"size": "8192x64"}, "size", "bad_size"),
    ({"size": "9" * 30 + "x1"}, "size", "bad_size"),
    ({"size": "9" * 300 + "x1"}, "size", "bad_parameter"),
    ({"size": 64}, "size", "bad_parameter"),
    ({"seed": -1}, "seed", "bad_parameter"),
    ({"seed": 2**63}, "seed", "bad_parameter"),
    ({"seed": 2**70}, "seed", "bad_parameter"),
    ({"seed": "1"}, "seed", "bad_parameter"),
    ({"num_inference_steps": 0}, "num_inference_steps", "bad_parameter"),
    ({"num_inference_steps": 61}, "num_inference_steps", "bad_parameter"),
    ({"num_inference_steps": 2**64}, "num_inference_steps", "bad_parameter"),
    ({"true_cfg_scale": -1}, "true_cfg_scale", "bad_parameter"),
    ({"true_cfg_scale": 1e30}, "true_cfg_scale", "bad_parameter"),
    ({"true_cfg_scale": 4}, "negative_prompt", "bad_parameter"),
    ({"guidance_scale": 4}, "guidance_scale", "bad_parameter"),
    ({"think": True}, "think", "bad_parameter"),
    ({"max_think_tokens": 3}, "max_think_tokens", "bad_parameter"),
    ({"reference_resolution": 100}, "reference_resolution", "bad_size"),
    ({"reference_resolution": 2**40}, "reference_resolution", "bad_size"),
    ({"reference_resolution": 10**4000}, "reference_resolution", "bad_parameter"),
    ({"background": "blue"}, "background", "bad_parameter"),
    ({"background": "transparent", "output_format": "jpeg"}, "background", "bad_parameter"),
    ({"output_format": "bmp"}, "output_format", "bad_parameter"),
    ({"output_compression": 101, "output_format": "webp"}, "output_compression", "bad_parameter"),
    ({"output_compression": 50}, "output_compression", "bad_parameter"),
    ({"response_format": "url"}, "response_format", "bad_parameter"),
    ({"response_format": "xml"}, "response_format", "bad_parameter"),
    ({"partial_images": 4, "stream": True}, "partial_images", "bad_parameter"),
    ({"partial_images": 1}, "partial_images", "bad_parameter"),
    ({"stream": "yes"}, "stream", "bad_parameter"),
    ({"stream": True, "size": "100x64"}, "size", "bad_size"),
    ({"stream": True, "think": True}, "think", "bad_parameter"),
    ({"steps": 3}, "steps", "unknown_parameter"),
    ({"Prompt": "a"}, "Prompt", "unknown_parameter"),
    ({"images": []}, "images", "unknown_parameter"),
    ({"model": "another"}, "model", "model_not_found"),
    ({"model": 3}, "model", "bad_parameter"),
]
NOISE = Image.effect_noise((64, 64), 50)
BOMB = zlib.compress(bytes(200 << 20), 9)
BOMB_PNG = png_of(chunk(b"IDAT", BOMB), width=30_000, height=30_000)
PIXELS = chunk(b"IDAT", zlib.compress(bytes((64 * 3 + 1) * 64)))
FILES: list[tuple[str, bytes, str]] = [
    ("empty", b"", "is empty"),
    ("text", b"hello, I am a picture", "is not a picture"),
    ("cut jpeg", RED_JPEG[:-128], "truncated"),
    ("cut header", RED[:20], "image 1"),
    ("cut png", RED[:60], "truncated"),
    ("postscript", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not a picture"),
    ("svg", b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is not a picture"),
    ("ribbon", png(Image.new("1", (4000, 10))), "factor of 200"),
    ("bomb", BOMB_PNG, "pixels"),
    ("bomb in a text", png_of(chunk(b"zTXt", b"a\0\0" + BOMB), PIXELS), "too large"),
    ("bomb in another text", png_of(chunk(b"iTXt", b"a\0\1\0\0\0" + BOMB), PIXELS), "too large"),
    ("bomb in a profile", png_of(chunk(b"iCCP", b"a\0\0" + BOMB), PIXELS), "too large"),
    ("png of no size", png_of(PIXELS, width=0, height=0), "is not a picture"),
    ("png of any size", png_of(PIXELS, width=2**31 - 1, height=2**31 - 1), "pixels"),
    ("gif of any size", b"GIF89a" + b"\xff" * 4 + b"\0\0\0,\0\0\0\0" + b"\xff" * 4 + b"\0\2\2L\1\0;", "pixels"),
    ("bmp of any size", bmp_header(2**30, 2**30) + bytes(64), "pixels"),
    ("bmp upside down", bmp_header(-64, 64) + bytes(64), "pixels"),
    ("tiff in a loop", b"II*\0\x08\0\0\0\0\0\x08\0\0\0", "is not a picture"),
    ("wrong sum", RED[:40] + bytes([RED[40] ^ 255]) + RED[41:], "is not a picture"),
    ("cut webp", png(NOISE, "WEBP")[:-60], "image 1"),
    ("cut gif", png(NOISE, "GIF")[:-900], "truncated"),
    ("cut tiff", png(NOISE, "TIFF")[:-900], "truncated"),
    ("cut bmp", png(NOISE, "BMP")[:-900], "truncated"),
    ("ico", png(Image.new("RGB", (64, 64)), "ICO"), "is not a picture"),
    ("ppm", png(Image.new("RGB", (64, 64)), "PPM"), "is not a picture"),
    ("pdf", b"%PDF-1.7\n1 0 obj<<>>endobj", "is not a picture"),
    ("zip", b"PK\3\4" + bytes(60), "is not a picture"),
    ("html", b"<!doctype html><img src='a.png'>", "is not a picture"),
]
URLS = [
    "http://example.com/a.png", "https://example.com/a.png", "http://169.254.169.254/latest/meta-data",
    "http://[::ffff:127.0.0.1]/a.png", "http://2130706433/", "file:///etc/passwd", "/etc/passwd", "", "data:,",
    "data:image/png;base64,", "data:image/png;base64,####", "data:image/png,abc", "ftp://example.com/a.png",
]  # fmt: skip
CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "assistant", "content": "a"}]}, "messages"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "a <image> b"}]}, "messages.0"),
    ({"messages": [{"role": "user", "content": "a <img> b"}]}, "messages"),
    (user({"type": "text"}), "messages.0.content.0"),
    (user({"type": "audio", "text": "a"}), "messages.0.content.0.type"),
    (user({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}), "messages"),
    (user({"type": "image_url", "image_url": {"url": data_url(b"nothing")}}), "messages"),
    (user({"type": "image_url", "image_url": {"url": data_url(RED[:60])}}), "messages"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2**64}, "max_tokens"),
    ({"max_completion_tokens": 2**64}, "max_completion_tokens"),
    ({"top_k": 2**64}, "top_k"),
    ({"think": True, "max_think_tokens": 2**64}, "max_think_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"stop": ["a", ""]}, "stop"),
    ({"n": 2}, "n"),
    ({"tools": []}, "tools"),
    ({"frequency_penalty": 1}, "frequency_penalty"),
    ({"logprobs": True}, "logprobs"),
    ({"modalities": ["image"]}, "modalities"),
    ({"modalities": []}, "modalities"),
    ({"modalities": ["audio"]}, "modalities.0"),
    ({"image_config": {"width": 64, "height": 64}}, "image_config"),
    ({"modalities": ["text", "image"], "image_config": {"width": 64}}, "image_config"),
    ({"modalities": ["text", "image"], "image_config": {"width": 65, "height": 64}}, "image_config.width"),
    (
        {"modalities": ["text", "image"], "image_config": {"width": 10**4000, "height": 10**4000}},
        "image_config.width",
    ),
    ({"modalities": ["text", "image"], "image_config": {"aspect_ratio": "wide"}}, "image_config.aspect_ratio"),
    ({"modalities": ["text", "image"], "image_config": {"steps": 61}}, "image_config.steps"),
    ({"modalities": ["text", "image"], "image_config": {"cfg_norm": "x"}}, "image_config.cfg_norm"),
    ({"modalities": ["text", "image"], "image_config": {"partial_images": 1}}, "image_config.partial_images"),
    (
        {"modalities": ["text", "image"], "image_config": {"partial_images": 4}, "stream": True},
        "image_config.partial_images",
    ),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"max_think_tokens": 5}, "max_think_tokens"),
    ({"model": "another"}, "model"),
]


def documented() -> set[tuple[int, str, str]]:
    """Status, type and code of every error in the table of docs/api.md."""
    lines = (Path(__file__).parents[2] / "docs" / "api.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in lines if re.match(r"\| \d{3} \|", line)]
    return {(int(status), kind, code) for status, kind, code in rows}


ERRORS = documented()


def assert_refused(response: Any, param: str | None, code: str | None = None, status: int = 400) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert response.json() == {"error": error}
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert (status, error["type"], error["code"]) in ERRORS, error
    assert error["param"] == param, error
    assert code is None or error["code"] == code, error
    return error["message"]


@pytest.mark.parametrize(("values", "param", "code"), GENERATIONS, ids=lambda value: str(value)[:40])
def test_s27_generations(painter: TestClient, values: dict[str, Any], param: str, code: str) -> None:
    body = json.dumps({**PAINT, **values})  # by hand: a client might refuse to send some of these
    response = painter.post("/v1/images/generations", content=body, headers={"Content-Type": "application/json"})
    assert_refused(response, param, code, status=404 if code == "model_not_found" else 400)


@pytest.mark.parametrize(("body", "kind"), [
    (b"", "application/json"), (b"{", "application/json"), (b"[]", "application/json"), (b"null", "application/json"),
    (b"\xff\xfe", "application/json"), (b"[" * 100_000, "application/json"), (b'{"prompt": "a"}', "text/plain"),
    (b'{"prompt": "a", "seed": NaN}', "application/json"), (b"prompt=a", "application/x-www-form-urlencoded"),
])  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/images/generations", "/v1/images/edits", "/v1/jobs"])
def test_s27_bodies_that_are_none(painter: TestClient, path: str, body: bytes, kind: str) -> None:
    response = painter.post(path, content=body, headers={"Content-Type": kind})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(("name", "data", "sentence"), FILES, ids=[name for name, _, _ in FILES])
def test_s26_files(painter: TestClient, name: str, data: bytes, sentence: str) -> None:
    as_form = painter.post("/v1/images/edits", data=PAINT, files=[("image", ("a", data))])
    assert sentence in assert_refused(as_form, "image", "bad_image")
    as_json = painter.post("/v1/images/edits", json={**PAINT, "images": [{"image_url": data_url(data)}]})
    assert sentence in assert_refused(as_json, "images", "bad_image")


@pytest.mark.parametrize("url", URLS)
def test_s33_urls_are_not_fetched(painter: TestClient, url: str) -> None:
    response = painter.post("/v1/images/edits", json={**PAINT, "images": [{"image_url": url}]})
    assert_refused(response, "images", "bad_image")


@pytest.mark.parametrize(("files", "values", "param"), [
    ([], {}, None),
    ([("picture", RED)], {}, "picture"),
    ([("mask", RED), ("image", RED)], {}, "mask"),
    ([("image", RED)], {"n": "two"}, "n"),
    ([("image", RED)], {"n": "11"}, "n"),
    ([("image", RED)], {"n": ["1", "2"]}, "n"),
    ([("image", RED)], {"what": "1"}, "what"),
    ([("image", RED)], {"images": "1"}, "images"),
    ([("image", RED)], {"size": "65x64"}, "size"),
    ([("image", RED)], {"stream": "perhaps"}, "stream"),
    ([("image", RED)] * 11, {}, "image"),
    ([("image[]", RED)] * 17, {}, "image"),
])  # fmt: skip
def test_s27_forms(painter: TestClient, files: Any, values: dict[str, Any], param: str | None) -> None:
    response = painter.post("/v1/images/edits", data={**PAINT, **values}, files=files)
    assert_refused(response, param)


def test_s27_a_form_in_an_encoding_that_reads_nothing(painter: TestClient) -> None:
    body = b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na\r\n--x--\r\n'
    kind = "multipart/form-data; boundary=x; charset=undefined"
    assert_refused(painter.post("/v1/images/edits", content=body, headers={"Content-Type": kind}), None)


@pytest.mark.parametrize(("values", "param"), CHATS, ids=lambda value: str(value)[:60])
def test_s27_chats(talker: TestClient, values: dict[str, Any], param: str) -> None:
    response = talker.post("/v1/chat/completions", json={**ASK, **values})
    assert_refused(response, param, status=404 if "model" in values else 400)


def test_s15_too_many_images_are_refused_before_they_are_looked_at(painter: TestClient) -> None:
    files = [("image", b"no picture at all")] * (MAX_IMAGES + 1)

    def seconds() -> float:
        response = painter.post("/v1/images/edits", data=PAINT, files=files)
        assert f"the limit is {MAX_IMAGES}" in assert_refused(response, "image")
        return response.elapsed.total_seconds()

    in_time(seconds, 0.1)
    urls = [{"image_url": "no URL at all"}] * (MAX_IMAGES + 1)
    assert "the limit is" in assert_refused(painter.post("/v1/images/edits", json={**PAINT, "images": urls}), "images")


def test_s16_a_long_prompt_is_refused_before_it_is_read(painter_root: Any, talker: TestClient) -> None:
    with client_of(make_site(painter_root)) as client:
        assert_refused(client.post("/v1/images/generations", json={**PAINT, "prompt": "a " * 100_000}), "prompt")
        long = client.post("/v1/images/generations", json={**PAINT, "prompt": "龘" * 32_000})
        assert "the limit is 8192" in assert_refused(long, "prompt", "prompt_too_long")
    body = {"messages": [{"role": "user", "content": "word " * 50_000}]}
    assert_refused(talker.post("/v1/chat/completions", json=body), "messages", "prompt_too_long")


def test_s29_transparency_is_refused_where_the_model_paints_none(talker: TestClient) -> None:
    response = talker.post("/v1/images/generations", json={**PAINT, "background": "transparent"})
    assert "paints no transparency" in assert_refused(response, "background")


def test_a_model_that_does_not_talk_says_so(painter: TestClient) -> None:
    assert "does not talk" in assert_refused(painter.post("/v1/chat/completions", json=ASK), "model")


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/v1/nothing", 404), ("GET", "/nothing", 404), ("GET", "/../pyproject.toml", 404), ("PUT", "/v1/jobs", 405),
    ("GET", "/v1/models/another", 404), ("GET", "/v1/jobs/none", 404), ("DELETE", "/v1/jobs/none", 404),
    ("GET", "/v1/jobs/none/events", 404), ("GET", "/v1/images/generations", 405),
])  # fmt: skip
def test_paths_that_are_none(painter: TestClient, method: str, path: str, status: int) -> None:
    response = painter.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_limits_of_bodies(painter_root: Any) -> None:
    site = make_site(painter_root, max_body_bytes=20_000, max_image_bytes=2000, max_output_pixels=64 * 64)
    with client_of(site) as client:
        too_large = client.post("/v1/images/generations", json={**PAINT, "prompt": "a" * 20_000})
        assert_refused(too_large, None, "body_too_large", 413)
        chunked = client.post(
            "/v1/images/edits",
            content=(b"x" * 1000 for _ in range(21)),
            headers={"Content-Type": "application/json"},
        )
        assert_refused(chunked, None, "body_too_large", 413)
        large = png(Image.effect_noise((64, 64), 50).convert("RGB"))
        assert "2000" in assert_refused(client.post("/v1/images/edits", data=PAINT, files=[("image", large)]), "image")
        assert "4096" in assert_refused(client.post("/v1/images/generations", json={**PAINT, "size": "96x64"}), "size")
        own = {**PAINT, "size": "auto", "reference_resolution": 96}
        assert_refused(client.post("/v1/images/generations", json=own), "reference_resolution", "bad_size")
        assert_nothing_taken(site)


def test_sizes_can_be_rounded_down(painter_root: Any) -> None:
    with client_of(make_site(painter_root, round_sizes=True)) as client:
        response = client.post("/v1/images/generations", json={**PAINT, "size": "100x70"})
        assert response.json()["size"] == "96x64"
        assert_refused(client.post("/v1/images/generations", json={**PAINT, "size": "20x64"}), "size")


def test_the_api_key(painter_root: Any) -> None:
    with client_of(make_site(painter_root, api_key="secret")) as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
            response = client.get("/v1/models", headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert client.get("/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200
        assert client.get("/health/live").status_code == 200


def test_s33_what_unpacks_to_more_than_it_shows_costs_nothing(painter: TestClient) -> None:
    """Pixels beyond the header's are never unpacked: 200 MB in 200 kB of file, and the picture is 64 x 64."""

    def seconds() -> float:
        response = painter.post("/v1/images/edits", data=PAINT, files=[("image", png_of(chunk(b"IDAT", BOMB)))])
        assert response.status_code == 200
        return response.elapsed.total_seconds()

    in_time(seconds, 2)


def test_every_error_is_documented() -> None:
    """Whatever the package can raise has its line in docs/api.md, with its status; and no line is of nothing."""

    def below(kind: type[UnderpaintError]) -> set[type[UnderpaintError]]:
        return {kind}.union(*(below(child) for child in kind.__subclasses__()))

    own = {kind for kind in below(UnderpaintError) if kind.__module__.startswith("underpaint.")}
    never_sent = {"bad_config", "bad_checkpoint"}
    raised = {(kind.status, kind.code) for kind in own} - {(500, code) for code in never_sent}
    framework = {(status, code) for status, code in CODES.items()}
    assert raised | framework == {(status, code) for status, _, code in ERRORS}
    for status, kind, _ in ERRORS:
        assert error_object("", status, "")["error"]["type"] == kind


def test_the_matrix_is_large() -> None:
    assert len(GENERATIONS) + len(FILES) + len(URLS) + len(CHATS) >= 120
