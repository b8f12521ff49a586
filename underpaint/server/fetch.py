"""Pictures by URL: only from hosts that the operator named, only over TLS, and only from public addresses.

A name is resolved once and the connection goes to the address that was checked, so a name that changes its mind in
between gains nothing. Redirects are followed by the same rules. No cookies, credentials or proxies are used.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial

import httpx

from underpaint.errors import BadImage

MAX_REDIRECTS = 3
MAX_URL_CHARACTERS = 4096
REDIRECTS = (301, 302, 303, 307, 308)
HEADERS = {"User-Agent": "underpaint", "Accept": "image/*", "Accept-Encoding": "identity", "Connection": "close"}
GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""RFC 6052: how a network without IPv4 writes an IPv4 address, in the last 32 bits."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str], Awaitable[Sequence[str]]]


async def resolve(host: str) -> Sequence[str]:
    """The addresses of a name, by the system's resolver. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, 443, type=socket.SOCK_STREAM)
    return [str(sockaddr[0]) for *_, sockaddr in found]


def is_public(address: Address) -> bool:
    """Whether an address is one of the open Internet: neither of this host, nor of a network around it.

    IPv4 addresses are looked at through every IPv6 form that leads to them; what only tunnels lead to is not public.
    """
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address in NAT64:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address not in GLOBAL_UNICAST or address.sixtofour is not None or address.teredo is not None:
            return False
    return address.is_global and not address.is_multicast


def is_allowed(host: str, domains: Sequence[str]) -> bool:
    """``*.example.com`` stands for every name below example.com, and not for itself."""
    return any(host == domain or (domain.startswith("*.") and host.endswith(domain[1:])) for domain in domains)


@dataclass(eq=False)
class Room:
    """How many bytes the pictures of one request may still have, together. Below 0 there is none left."""

    num_bytes: int


class Fetcher:
    """Fetches pictures. ``domains``: the hosts allowed, none by default. ``max_bytes`` bounds one picture, ``seconds``
    all of a request, redirects and the slowest of bodies included.

    ``resolve`` and ``open_transport`` are how names and addresses are reached; the rules hold whatever they are.
    """

    def __init__(
        self,
        domains: Sequence[str],
        max_bytes: int,
        seconds: float,
        resolve: Resolve = resolve,
        open_transport: Callable[[], httpx.AsyncBaseTransport] | None = None,
    ) -> None:
        self.domains = tuple(domain.lower() for domain in domains)
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._resolve = resolve
        # Opened anew each time: a kept connection belongs to the host whose certificate was checked, not to an address.
        self._open_transport = open_transport or partial(httpx.AsyncHTTPTransport, verify=ssl.create_default_context())

    async def fetch(self, url: str, name: str, param: str, room: Room) -> bytes:
        """The body that a URL leads to; what it is, nobody has looked at. Raises BadImage, naming ``name``."""
        try:
            async with asyncio.timeout(self._seconds):
                return await self._follow(url, name, param, room)
        except TimeoutError as error:
            raise BadImage(f"{name} did not come within {self._seconds:g} s", param=param) from error
        except httpx.HTTPError as error:
            raise BadImage(f"{name} could not be fetched: {type(error).__name__}", param=param) from error

    async def _follow(self, url: str, name: str, param: str, room: Room) -> bytes:
        for _ in range(1 + MAX_REDIRECTS):
            target = self._check(url, name, param)
            addresses = await self._addresses(target, name, param)
            async with self._answer(target, addresses) as response:
                if response.status_code in REDIRECTS and "location" in response.headers:
                    url = self._join(target, response.headers["location"], name, param)
                    continue
                if response.status_code != 200:
                    raise BadImage(f"{name} could not be fetched: HTTP {response.status_code}", param=param)
                return await self._read(response, name, param, room)
        raise BadImage(f"{name} is redirected more than {MAX_REDIRECTS} times", param=param)

    def _check(self, url: str, name: str, param: str) -> httpx.URL:
        """The URL in its parts, if they are allowed. Everything later uses these parts, not the text again."""
        if not self.domains:
            raise BadImage(f"{name}: this server fetches no URLs; send the picture as a data URL", param=param)
        if len(url) > MAX_URL_CHARACTERS:
            raise BadImage(f"{name}: a URL may have {MAX_URL_CHARACTERS} characters", param=param)
        try:
            target = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise BadImage(f"{name} is not a URL that can be read: {error}", param=param) from error
        if target.scheme != "https":
            raise BadImage(f"{name} must be an https URL, or a data URL", param=param)
        if target.userinfo:
            raise BadImage(f"{name}: a URL must not have a user or a password", param=param)
        if target.port is not None:
            raise BadImage(f"{name}: a URL must not name a port", param=param)
        if not is_allowed(_host(target), self.domains):
            host = _host(target)  # as it is written: not all that begins with xn-- can be decoded
            raise BadImage(f"{name}: pictures from {host!r} are not allowed on this server", param=param)
        return target

    def _join(self, base: httpx.URL, location: str, name: str, param: str) -> str:
        try:
            return str(base.join(location))
        except (httpx.InvalidURL, ValueError) as error:  # the latter of what only looks like an address
            raise BadImage(f"{name} is redirected to what is not a URL", param=param) from error

    async def _addresses(self, target: httpx.URL, name: str, param: str) -> list[Address]:
        """The addresses of a host, every one of them public."""
        host = _host(target)
        try:
            found = [ipaddress.ip_address(text) for text in dict.fromkeys(await self._resolve(host))]
        except (OSError, UnicodeError) as error:
            raise BadImage(f"{name}: there is no host {host!r}", param=param) from error
        if not found or not all(map(is_public, found)):
            raise BadImage(f"{name}: {host!r} is not at a public address", param=param)
        return found

    @asynccontextmanager
    async def _answer(self, target: httpx.URL, addresses: Sequence[Address]) -> AsyncIterator[httpx.Response]:
        """The answer of the first of these addresses that takes the connection; its body is yet to be read."""
        async with self._open_transport() as transport:
            for left, address in reversed(list(enumerate(reversed(addresses)))):
                try:
                    response = await transport.handle_async_request(self._request(target, address))
                    break
                except httpx.ConnectError:
                    if not left:
                        raise
            async with aclosing(response):
                yield response

    def _request(self, target: httpx.URL, address: Address) -> httpx.Request:
        """To an address, in the name of a host: its certificate is asked for and checked."""
        host = _host(target)
        return httpx.Request(
            "GET",
            target.copy_with(host=str(address), fragment=None),
            headers={"Host": host, **HEADERS},
            extensions={"sni_hostname": host, "timeout": httpx.Timeout(self._seconds).as_dict()},
        )

    async def _read(self, response: httpx.Response, name: str, param: str, room: Room) -> bytes:
        """The body as it is on the wire: what a server compressed in spite of our asking is not unpacked."""
        body = bytearray()
        async for piece in response.aiter_raw():
            body += piece
            room.num_bytes -= len(piece)
            if len(body) > self._max_bytes or room.num_bytes < 0:
                raise BadImage(f"{name} has too many bytes; the limit is {self._max_bytes}", param=param)
        return bytes(body)


def _host(url: httpx.URL) -> str:
    """The host's name in ASCII, lower case, without the dot that may end it."""
    return url.raw_host.decode("ascii").lower().removesuffix(".")
