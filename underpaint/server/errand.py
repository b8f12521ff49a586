"""A request at work, as its work sees it."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from underpaint.server.claim import RequestClaim
from underpaint.server.config import Kind
from underpaint.server.news import Closing, Entered, Event, Moved, News, Told, Took
from underpaint.service import Service
from underpaint.studio import Studio

Tell = Callable[[News], None]


@dataclass(eq=False)
class Errand:
    """What the work of one request is done with, and how it tells of itself.

    ``service`` and ``studio`` are the request's own view of the engines: what is submitted through them is under
    ``claim``. ``task`` is the id that the desk knows, ``stage`` what was begun last.
    """

    task: str
    claim: RequestClaim
    service: Service
    studio: Studio
    tell: Tell
    stage: str = ""
    _inside: str | None = None
    _progress: tuple[int, int] = (0, 0)

    def emit(self, event: Event) -> None:
        """Tell the client."""
        self.tell(Told(self.task, event))

    def progress(self, step: int, num_steps: int) -> None:
        if (step, num_steps) != self._progress:
            self._progress = step, num_steps
            self.tell(Moved(self.task, step, num_steps))

    def took(self, stage: str, seconds: float) -> None:
        self.tell(Took(self.task, stage, seconds))

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """A stage of the work; within another one, that goes on after it. Raises Cancelled or DeadlinePassed if it
        must not begin."""
        self.claim.check()
        outer, self._inside = self._inside, stage
        start = time.monotonic()
        self._enter(stage)
        yield
        self.took(stage, time.monotonic() - start)
        self._inside = outer
        if outer is not None:
            self._enter(outer)

    def _enter(self, stage: str) -> None:
        self.stage = stage
        self.tell(Entered(self.task, stage))


class Work(Protocol):
    """What a request asks for, as data."""

    @property
    def kind(self) -> Kind: ...

    def __call__(self, errand: Errand) -> Closing | None:
        """Do it, telling events on the way. Raises what refuses or breaks it."""
        ...

    def result(self, events: Sequence[Event], closing: Closing | None) -> Any:
        """What it came to, by all that was told."""
        ...
