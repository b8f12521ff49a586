"""Pictures by URL: the guard keeps out what must not be reached, and lets in what may."""

import asyncio
import gzip
import ipaddress
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from PIL import Image
from timing import in_time

from server.conftest import client_of
from server.test_bad_requests import BOMB_PNG, assert_refused
from server.tools import PAINT, data_url, make_site, png
from server.web import HOST, OTHER, PUBLIC, Web, Wire, body, endless, open_web, redirect, silent, status
from underpaint.errors import BadConfig, BadImage
from underpaint.server import ServerConfig
from underpaint.server.fetch import Fetcher, Room, is_public

RED = png(Image.new("RGB", (64, 64), "red"))
URL = f"https://{HOST}/red.png"
PRIVATE = [
    "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "192.0.0.1", "192.0.2.1", "198.18.0.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255",
    "::", "::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::7f00:1", "fe80::1", "fc00::1", "fd00:ec2::254", "ff02::1",
    "fec0::1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "2002:7f00:1::", "2001:0:4136:e378::1",
    "2001:db8::1", "100::1",
]  # fmt: skip
PUBLICS = ["8.8.8.8", PUBLIC, "100.128.0.1", "172.32.0.1", "2606:4700::6810:84e5", "::ffff:8.8.8.8", "64:ff9b::808:808"]


@pytest.fixture
def web() -> Iterator[Web]:
    with open_web() as served:
        served.answers["/red.png"] = body(RED)
        yield served


def get(fetcher: Fetcher, url: str = URL, room: int = 1 << 30) -> bytes:
    return asyncio.run(fetcher.fetch(url, "image 1", "images", Room(room)))


def refusal(fetcher: Fetcher, url: str = URL, room: int = 1 << 30) -> str:
    with pytest.raises(BadImage) as refused:
        get(fetcher, url, room)
    assert refused.value.param == "images"
    return str(refused.value)


@pytest.fixture
def serve(web: Web) -> Iterator[Callable[..., TestClient]]:
    """A client of a server that may fetch from ``HOST``."""
    stack = []

    def begin(root: Path) -> TestClient:
        site = make_site(root, allowed_media_domains=(HOST,), max_steps=60)
        opened = client_of(replace(site, fetcher=web.fetcher()))
        stack.append(opened)
        return opened.__enter__()

    yield begin
    for opened in stack:
        opened.__exit__(None, None, None)


def test_s32_a_picture_is_the_same_by_file_by_data_url_and_by_url(
    serve: Callable[..., TestClient], painter_root: Path, web: Web
) -> None:
    client = serve(painter_root)
    answers = [
        client.post("/v1/images/edits", data=PAINT, files=[("image", RED)]),
        *(
            client.post("/v1/images/edits", json={**PAINT, "images": [{"image_url": url}]})
            for url in (URL, data_url(RED))
        ),
    ]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert len({answer.json()["data"][0]["b64_json"] for answer in answers}) == 1
    job = client.post("/v1/jobs", json={**PAINT, "images": [{"image_url": URL}], "detach": True}).json()["id"]
    assert '"type":"job.completed"' in client.get(f"/v1/jobs/{job}/events").text
    result = client.get(f"/v1/jobs/{job}").json()["result"]
    assert result["data"][0]["b64_json"] == answers[0].json()["data"][0]["b64_json"]
    assert len(web.seen) == 2


def test_s32_chats_read_pictures_by_url(serve: Callable[..., TestClient], talker_root: Path) -> None:
    client = serve(talker_root)

    def ask(url: str) -> Any:
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8}
        return client.post("/v1/chat/completions", json=body)

    by_url, by_data = ask(URL), ask(data_url(RED))
    assert by_url.status_code == 200
    assert by_url.json()["choices"] == by_data.json()["choices"]
    assert_refused(ask("https://elsewhere.example.com/red.png"), "messages", "bad_image")


def test_s33_what_breaks_is_told_in_openais_shape(
    serve: Callable[..., TestClient], painter_root: Path, web: Web
) -> None:
    """By the way of a whole request: too many pixels, no picture, not there, elsewhere."""
    client = serve(painter_root)
    web.answers["/bomb.png"] = body(BOMB_PNG)
    web.answers["/page"] = body(b"<html>no picture</html>")
    for url, sentence in (
        (f"https://{HOST}/bomb.png", "pixels"),
        (f"https://{HOST}/page", "is not a picture"),
        (f"https://{HOST}/none", "HTTP 404"),
        ("https://169.254.169.254/latest/meta-data", "not allowed"),
    ):
        response = client.post("/v1/images/edits", json={**PAINT, "images": [{"image_url": url}]})
        assert sentence in assert_refused(response, "images", "bad_image")


@pytest.mark.parametrize("address", PRIVATE)
def test_s33_no_name_leads_to_an_address_that_is_not_public(web: Web, address: str) -> None:
    web.names[HOST] = [[address]]
    assert "not at a public address" in refusal(web.fetcher())
    web.names[HOST] = [[PUBLIC, address]]  # one of several is enough
    assert "not at a public address" in refusal(web.fetcher())
    assert web.dialled == []


@pytest.mark.parametrize("address", PUBLICS)
def test_s34_public_addresses_are_public(web: Web, address: str) -> None:
    assert is_public(ipaddress.ip_address(address))
    web.names[HOST] = [[address]]
    assert get(web.fetcher()) == RED
    assert web.dialled == [str(ipaddress.ip_address(address))]


@pytest.mark.parametrize("host", [
    "127.0.0.1", "2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "127.1", "0", "localhost", "[::1]",
    "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[0:0:0:0:0:ffff:127.0.0.1]",
])  # fmt: skip
def test_s33_however_an_address_is_written(web: Web, host: str) -> None:
    """Refused because it is not in the list; and where it were in the list, because of what it leads to."""
    refusal(web.fetcher(), f"https://{host}/red.png")
    listed = Fetcher((host.strip("[]"),), 1 << 20, 5.0, open_transport=lambda: pytest.fail("it was dialled"))
    refusal(listed, f"https://{host}/red.png")
    assert web.resolved == web.dialled == []


def test_s33_a_name_is_resolved_once(web: Web) -> None:
    """One that leads to a private address the second time gains nothing."""
    web.names[HOST] = [[PUBLIC], ["127.0.0.1"]]
    assert get(web.fetcher()) == RED
    assert (web.resolved, web.dialled) == ([HOST], [PUBLIC])


@pytest.mark.parametrize("url", [
    f"http://{HOST}/red.png", f"ftp://{HOST}/red.png", "file:///etc/passwd", "/etc/passwd", "", "red.png",
    f"//{HOST}/red.png", f"https://user@{HOST}/red.png", f"https://user:password@{HOST}/red.png",
    f"https://{HOST}:22/", f"https://{HOST}@{OTHER}/", f"https://{OTHER}\\@{HOST}/", f"https://{OTHER}#@{HOST}/",
    f"https://{HOST}.evil.example.net/", f"https://evil{HOST}/", "https:///red.png", f"https://{HOST}\n.{OTHER}/",
    f"https://{HOST}/" + "a" * 5000, "https://xn--.com/", "https://[::1/", "https://１２７.0.0.1/", f"HTTPS://{OTHER}/red.png",
])  # fmt: skip
def test_s33_urls_that_are_refused_before_anything_is_resolved(web: Web, url: str) -> None:
    refusal(web.fetcher(), url)
    assert web.resolved == web.dialled == []


@pytest.mark.parametrize("url", [
    URL, f"HTTPS://{HOST.upper()}/red.png", f"https://{HOST}./red.png", f"https://{HOST}:443/red.png", f"{URL}#part",
])  # fmt: skip
def test_s34_the_ways_to_write_an_allowed_url(web: Web, url: str) -> None:
    assert get(web.fetcher()) == RED
    assert get(web.fetcher(("*.example.com",)), url) == RED
    assert get(web.fetcher(("Pictures.Example.COM",)), url) == RED


def test_s34_a_star_stands_for_names_below_a_domain(web: Web) -> None:
    for domain in ("*.pictures.example.com", "*.ample.com", "example.com"):
        assert "not allowed" in refusal(web.fetcher((domain,)))


@pytest.mark.parametrize("location", ["/red.png", "red.png", URL, f"https://{OTHER}/red.png", f"//{OTHER}/red.png"])
@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_s34_redirects_inside_the_list_are_followed(web: Web, location: str, code: int) -> None:
    web.answers["/start"] = redirect(location, code)
    assert get(web.fetcher((HOST, OTHER)), f"https://{HOST}/start") == RED
    assert len(web.seen) == 2


def test_s34_three_redirects_are_followed_and_a_fourth_is_not(web: Web) -> None:
    for i in range(5):
        web.answers[f"/{i}"] = redirect(f"/{i + 1}")
    web.answers["/4"] = body(RED)
    assert get(web.fetcher(), f"https://{HOST}/1") == RED
    assert "more than 3 times" in refusal(web.fetcher(), f"https://{HOST}/0")


@pytest.mark.parametrize("location", [
    f"https://{OTHER}/red.png", f"http://{HOST}/red.png", "https://169.254.169.254/latest/meta-data",
    "http://127.0.0.1/", "https://[::ffff:127.0.0.1]/", "https://2130706433/", "file:///etc/passwd",
    f"https://user:password@{HOST}/red.png", f"https://{HOST}:8443/red.png", "https://[", "data:image/png;base64,AAAA",
    "https://xn--.com/", ":https://]",
])  # fmt: skip
def test_s33_redirects_out_of_the_list_are_not_followed(web: Web, location: str) -> None:
    web.answers["/start"] = redirect(location)
    refusal(web.fetcher(), f"https://{HOST}/start")
    assert len(web.seen) == len(web.dialled) == 1


def test_s33_a_redirect_to_a_name_that_leads_inside(web: Web) -> None:
    web.answers["/start"] = redirect(f"https://{OTHER}/red.png")
    web.names[OTHER] = [["10.0.0.7"]]
    assert "not at a public address" in refusal(web.fetcher((HOST, OTHER)), f"https://{HOST}/start")
    web.names = {HOST: [[PUBLIC], ["10.0.0.7"]]}
    web.resolved.clear()
    web.answers["/start"] = redirect("/red.png")
    assert "not at a public address" in refusal(web.fetcher(), f"https://{HOST}/start")


def test_s33_neither_cookies_nor_credentials_travel(web: Web) -> None:
    web.answers["/start"] = redirect(f"https://{OTHER}/middle")
    web.answers["/middle"] = redirect("/red.png")
    get(web.fetcher((HOST, OTHER)), f"https://{HOST}/start")
    assert [host for host, _, _ in web.seen] == [HOST, OTHER, OTHER]
    for _, _, headers in web.seen:
        assert headers.keys() == {"host", "user-agent", "accept", "accept-encoding", "connection"}


@pytest.mark.parametrize("path", ["/drip", "/silent"])
def test_s33_a_slow_server_is_not_waited_for(web: Web, path: str) -> None:
    web.answers |= {"/drip": endless(b"x", 0.05), "/silent": silent}

    def seconds_waited() -> float:
        start = time.monotonic()
        assert "did not come within 0.6 s" in refusal(web.fetcher(seconds=0.6), f"https://{HOST}{path}")
        return time.monotonic() - start

    in_time(seconds_waited, 2)


def test_s33_slow_redirects_share_one_time(web: Web) -> None:
    def late(handler: Any) -> None:
        time.sleep(0.4)
        redirect("/start")(handler)

    web.answers["/start"] = late
    assert "did not come within 0.6 s" in refusal(web.fetcher(seconds=0.6), f"https://{HOST}/start")


def test_s33_a_body_without_an_end_is_left(web: Web) -> None:
    web.answers["/endless"] = endless(b"x" * 10_000, 0)
    assert "the limit is 50000" in refusal(web.fetcher(max_bytes=50_000), f"https://{HOST}/endless")
    assert web.left.wait(60)


def test_s33_the_pictures_of_a_request_share_their_room(web: Web) -> None:
    fetcher, room = web.fetcher(), Room(len(RED) + 10)

    async def twice() -> None:
        assert await fetcher.fetch(URL, "image 1", "images", room) == RED
        await fetcher.fetch(URL, "image 2", "images", room)

    with pytest.raises(BadImage, match="image 2 has too many bytes"):
        asyncio.run(twice())


def test_s33_what_is_compressed_stays_so(web: Web) -> None:
    """Nothing is unpacked: a small body cannot become a large one."""
    packed = gzip.compress(bytes(10 << 20))
    web.answers["/packed"] = body(packed, headers={"Content-Encoding": "gzip"})
    assert get(web.fetcher(), f"https://{HOST}/packed") == packed


def test_s33_content_types_are_not_trusted(web: Web, serve: Callable[..., TestClient], painter_root: Path) -> None:
    web.answers["/red.png"] = body(RED, kind="text/html")
    web.answers["/fake.png"] = body(b"<svg/>", kind="image/png")
    client = serve(painter_root)
    paint = {**PAINT, "images": [{"image_url": URL}]}
    assert client.post("/v1/images/edits", json=paint).status_code == 200
    paint = {**PAINT, "images": [{"image_url": f"https://{HOST}/fake.png"}]}
    assert_refused(client.post("/v1/images/edits", json=paint), "images", "bad_image")


@pytest.mark.parametrize("code", [204, 206, 304, 400, 401, 404, 500, 503])
def test_s33_other_answers_are_no_pictures(web: Web, code: int) -> None:
    web.answers["/red.png"] = status(code)
    assert f"HTTP {code}" in refusal(web.fetcher())


def test_s33_a_certificate_must_be_the_hosts() -> None:
    with open_web(names=["another.example.com"]) as web:
        web.answers["/red.png"] = body(RED)
        assert "could not be fetched: ConnectError" in refusal(web.fetcher())
        assert web.seen == []


def test_s33_a_certificate_must_be_trusted(web: Web) -> None:
    with open_web() as other:
        web.trust = other.trust
        assert "could not be fetched: ConnectError" in refusal(web.fetcher())
        assert web.seen == []


def test_s34_the_next_address_is_tried_when_one_does_not_answer(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Wire.handle_async_request

    async def first_fails(self: Wire, request: httpx.Request) -> httpx.Response:
        if request.url.host == "8.8.8.8":
            web.dialled.append(request.url.host)
            raise httpx.ConnectError("nobody is there")
        return await whole(self, request)

    monkeypatch.setattr(Wire, "handle_async_request", first_fails)
    web.names[HOST] = [["8.8.8.8", PUBLIC]]
    assert get(web.fetcher()) == RED
    assert web.dialled == ["8.8.8.8", PUBLIC]
    web.names[HOST] = [["8.8.8.8"]]
    assert "could not be fetched" in refusal(web.fetcher())


def test_a_name_that_does_not_exist(web: Web) -> None:
    async def nobody(host: str) -> list[str]:
        raise OSError("unknown")

    fetcher = Fetcher((HOST,), 1 << 20, 5.0, nobody, lambda: pytest.fail("it was dialled"))
    assert f"there is no host '{HOST}'" in refusal(fetcher)


@pytest.mark.parametrize("domain", [
    "", "*", "*.com", "com", "https://example.com", "example.com/", "example.com:443", "10.0.0.1", "1.2.3.0x4", "[::1]",
    "a..b.com", "-a.example.com", "*.*.com", "exa mple.com", "example.com.",
])  # fmt: skip
def test_domains_that_are_none_are_refused(domain: str) -> None:
    with pytest.raises(BadConfig, match="is not a name"):
        ServerConfig("tiny", allowed_media_domains=(domain,))


def test_domains_that_are_names() -> None:
    ServerConfig("tiny", allowed_media_domains=("example.com", "*.example.com", "a-b.c3.xn--p1ai", "UPPER.example.com"))
