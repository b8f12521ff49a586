"""A small web of TLS hosts on the loopback, and a way to it that looks like the Internet to a ``Fetcher``."""

import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import trustme

from underpaint.server.fetch import Fetcher

HOST, OTHER = "pictures.example.com", "cdn.example.org"
PUBLIC = "93.184.215.14"
Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Answers what its web has under the path. Lets nobody wait for a name server, and prints nothing."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        assert isinstance(self.server, Listener)
        web = self.server.web
        web.seen.append(
            (self.headers["Host"], self.path, {name.lower(): value for name, value in self.headers.items()})
        )
        self.close_connection = True
        try:
            web.answers.get(self.path, nothing)(self)
        except OSError:
            web.left.set()

    def log_message(self, *_: object) -> None:
        return


@dataclass(eq=False)
class Web:
    """What is served, what was asked for, and which addresses were dialled. ``left``: a reader was gone before the
    end of a body."""

    answers: dict[str, Answer] = field(default_factory=dict)
    seen: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    dialled: list[str] = field(default_factory=list)
    resolved: list[str] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)
    names: dict[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    port: int = 0
    trust: ssl.SSLContext = field(default_factory=ssl.create_default_context)

    async def resolve(self, host: str) -> Sequence[str]:
        """The next of the answers that ``names`` has for a host; without any, one public address."""
        self.resolved.append(host)
        answers = self.names.get(host, [[PUBLIC]])
        return answers[min(self.resolved.count(host), len(answers)) - 1]

    def fetcher(self, domains: Sequence[str] = (HOST,), max_bytes: int = 1 << 20, seconds: float = 60.0) -> Fetcher:
        return Fetcher(domains, max_bytes, seconds, self.resolve, lambda: Wire(self))


class Wire(httpx.AsyncBaseTransport):
    """The lowest layer: a connection to any address reaches this web. The name asked for and the certificate stay."""

    def __init__(self, web: Web) -> None:
        self._web = web
        self._inner = httpx.AsyncHTTPTransport(verify=web.trust)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self._web.dialled.append(request.url.host)
        request.url = request.url.copy_with(host="127.0.0.1", port=self._web.port)
        return await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        await self._inner.aclose()


class Listener(ThreadingHTTPServer):
    web: Web
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that does not trust us is what some tests are about."""


@contextmanager
def open_web(names: Sequence[str] = (HOST, OTHER)) -> Iterator[Web]:
    """A web of these hosts; its authority is trusted by its own fetchers only."""
    authority = trustme.CA()
    web = Web()
    authority.configure_trust(web.trust)
    listener = Listener(("127.0.0.1", 0), Handler)
    listener.web, web.port = web, listener.server_address[1]
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(*names).configure_cert(context)
    listener.socket = context.wrap_socket(listener.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield web
    listener.shutdown()
    thread.join()
    listener.server_close()


def nothing(handler: Handler) -> None:
    handler.send_response(404)
    handler.send_header("Content-Length", "0")
    handler.end_headers()


def body(data: bytes, kind: str = "image/png", headers: Mapping[str, str] | None = None) -> Answer:
    def answer(handler: Handler) -> None:
        handler.send_response(200)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **(headers or {})}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(data)

    return answer


def status(code: int, headers: Mapping[str, str] | None = None) -> Answer:
    def answer(handler: Handler) -> None:
        handler.send_response(code)
        for name, value in {"Content-Length": "0", **(headers or {})}.items():
            handler.send_header(name, value)
        handler.end_headers()

    return answer


def redirect(location: str, code: int = 302) -> Answer:
    return status(code, {"Location": location, "Set-Cookie": "secret=1; Path=/"})


def endless(piece: bytes, pause: float) -> Answer:
    """A body without an end, in pieces."""

    def answer(handler: Handler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while True:
            handler.wfile.write(piece)
            time.sleep(pause)

    return answer


def silent(handler: Handler) -> None:
    """Takes the request and never answers it."""
    handler.rfile.read(1)
