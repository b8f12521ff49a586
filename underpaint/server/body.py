"""What a client sends: counted while it comes, refused where there is no room, and not waited for without end."""

import asyncio
from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

from underpaint.errors import UnderpaintError
from underpaint.server.config import Kind
from underpaint.server.desk import Desk
from underpaint.server.faults import BODY_TOO_LARGE, BODY_TOO_SLOW, CLIENT_GONE, error_headers


class Body:
    """Receives one request. Its bytes stand among those that the desk holds until it is complete: then what was made of
    it does. On the loop."""

    def __init__(self, receive: Receive, desk: Desk, kinds: Sequence[Kind]) -> None:
        """``kinds``: of the work that may be asked for; none: the body is not that of a request for work."""
        self.num_bytes = 0
        self._receive = receive
        self._desk = desk
        self._kinds = kinds
        self._complete = False
        self._until = asyncio.get_running_loop().time() + desk.config.timeout_seconds

    async def __call__(self) -> Message:
        """The next part. Raises HTTPException: frameworks take other exceptions for a body that is malformed."""
        if self._complete:  # only the news that the client is gone can come
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._until):
                message = await self._receive()
        except TimeoutError as error:
            sentence = f"the body was not complete after {self._desk.config.timeout_seconds} s"
            raise HTTPException(BODY_TOO_SLOW, sentence) from error
        if message["type"] == "http.disconnect" and self._kinds:
            raise HTTPException(CLIENT_GONE, "the client left before its body was complete")
        self._count(len(message.get("body", b"")))
        if not message.get("more_body", False):
            self.close()
        return message

    def close(self) -> None:
        """Nothing more is expected of it."""
        if not self._complete:
            self._complete = True
            self._desk.arriving -= self.num_bytes

    def _count(self, num_more: int) -> None:
        num_bytes, limit = self.num_bytes + num_more, self._desk.config.max_body_bytes
        if num_bytes > limit:
            raise HTTPException(BODY_TOO_LARGE, too_large(limit))
        self._desk.arriving -= self.num_bytes
        try:
            if num_more and self._kinds:
                self._desk.check_room(self._kinds, num_bytes)
            self.num_bytes = num_bytes
        except UnderpaintError as error:
            raise HTTPException(error.status, str(error), error_headers(error)) from error
        finally:
            self._desk.arriving += self.num_bytes


def too_large(limit: int) -> str:
    return f"the body has more than {limit} bytes"
