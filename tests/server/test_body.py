"""Bodies while they come, over real sockets: none holds what others need, and none is waited for without end."""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from timing import wait_until

from server.tools import PAINT, Running, log_of

Start = Callable[..., Running]
JSON, FORM = "application/json", "multipart/form-data; boundary=b"
BEGINNINGS = {
    JSON: b'{"prompt": "' + b"a" * 500,
    FORM: b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\n' + b"a" * 500,
}
WAYS = [("/v1/images/edits", FORM)] + [
    (path, JSON)
    for path in ("/v1/images/edits", "/v1/images/generations", "/v1/jobs", "/v1/chat/completions", "/v1/responses")
]


class Sender:
    """A client that sends a body piece by piece."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def begin(self, path: str, kind: str, length: int | None = None) -> None:
        size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
        head = f"POST {path} HTTP/1.1\r\nHost: here\r\nContent-Type: {kind}\r\n{size}\r\n\r\n"
        self._connection.sendall(head.encode())

    def send(self, piece: bytes) -> None:
        self._connection.sendall(piece)

    def chunk(self, piece: bytes) -> None:
        self.send(b"%x\r\n%s\r\n" % (len(piece), piece))

    def answer(self) -> tuple[int, dict[str, str], Any]:
        """Status, headers and body; read to the end of the connection or of the body."""
        with self._connection.makefile("rb") as file:
            status = int(file.readline().split()[1])
            lines = iter(lambda: file.readline().decode().strip(), "")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            return status, headers, json.loads(file.read(int(headers["content-length"])))


@contextmanager
def sender(server: Running) -> Iterator[Sender]:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        yield Sender(connection)


@pytest.mark.parametrize(("path", "kind"), WAYS)
def test_a_body_that_stops_coming(start: Start, path: str, kind: str) -> None:
    server = start(timeout_seconds=0.5)
    with sender(server) as client:
        client.begin(path, kind, length=1000)
        client.send(BEGINNINGS[kind])
        status, _, answer = client.answer()
    assert (status, answer["error"]["code"]) == (408, "body_too_slow")
    assert "not complete after 0.5 s" in answer["error"]["message"]
    wait_until(lambda: server.site.desk.arriving == 0)


def test_bodies_that_come_hold_no_more_than_there_is_room_for(start: Start) -> None:
    """Who passes the limit is refused; the other goes on, alone even beyond it."""
    server = start(max_held_bytes=10_000)
    desk = server.site.desk
    body = json.dumps(PAINT).encode()
    with sender(server) as first, sender(server) as second:
        first.begin("/v1/images/generations", JSON)
        first.chunk(b" " * 6000)
        wait_until(lambda: desk.arriving == 6000)
        second.begin("/v1/images/generations", JSON)
        second.chunk(b" " * 3000)
        wait_until(lambda: desk.arriving == 9000)
        second.chunk(b" " * 3000)
        status, headers, answer = second.answer()
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        assert int(headers["retry-after"]) >= 1
        wait_until(lambda: desk.arriving == 6000)
        first.chunk(b" " * 6000)
        first.chunk(body)
        first.send(b"0\r\n\r\n")
        status, _, answer = first.answer()
    assert status == 200
    assert answer["data"]
    wait_until(lambda: desk.arriving == 0)


@pytest.mark.parametrize(("path", "kind"), WAYS)
def test_a_client_that_goes_while_it_sends(start: Start, path: str, kind: str) -> None:
    """It is nobody's fault: 499 in the log."""
    server = start()
    beginning = BEGINNINGS[kind]
    with sender(server) as client:
        client.begin(path, kind)
        client.chunk(beginning)
        wait_until(lambda: server.site.desk.arriving == len(beginning))
    wait_until(lambda: server.site.desk.arriving == 0)
    wait_until(lambda: '"request"' in log_of(server.site))
    assert '"status": 499' in log_of(server.site)
    assert server.paint().status_code == 200
