"""Answers in progress."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

from torch import Tensor

from underpaint.errors import Cancelled, UnderpaintError
from underpaint.kv.tree import Unit
from underpaint.models.neo_unify import Passage, Picture
from underpaint.understanding.reading import Reading
from underpaint.understanding.sampler import StopWatch, TokenSampler, Transcript

Finish = Literal["stop", "length", "pause", "read"]
"""Why a reply rests: a stop token or text, the limit of tokens, a token to pause at, or it was only to be read."""


@dataclass(eq=False)
class Reply:
    """A passage that is read, and then goes on token by token.

    Without a ``sampler`` it is read and no more. ``pause_tokens`` become part of the passage and are read, then the
    reply rests with its pages, until ``Reply.resume`` or its end. ``stop_tokens`` end it and become part of nothing.
    ``born``: its age among requests; the branches of a dialogue share it, so that a dialogue gets pages as a whole.
    ``ids`` are the tokens chosen, pauses included; ``forced`` overrule the first choices. ``deltas``: settled text
    that nobody took yet. ``logits``: of every choice, if ``keep_logits``. ``rests_as``: how it rested when its pages
    were taken; once they are read again it rests so again.
    """

    passage: Passage
    sampler: TokenSampler | None = None
    stop_tokens: frozenset[int] = frozenset()
    pause_tokens: frozenset[int] = frozenset()
    forced: Iterator[int] = field(default_factory=lambda: iter(()))
    deadline: float | None = None
    keep_logits: bool = False
    born: float = field(default_factory=time.monotonic)
    ids: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    deltas: deque[str] = field(default_factory=deque)
    units: tuple[Unit, ...] = ()
    reading: Reading | None = None
    finish: Finish | None = None
    rests_as: Finish | None = None
    error: UnderpaintError | None = None
    ended: bool = False
    text_from: int = 0
    transcript: Transcript = field(init=False)
    watch: StopWatch = field(init=False)

    def __post_init__(self) -> None:
        self.transcript, self.watch = Transcript(), StopWatch(self.sampler.options.stop if self.sampler else ())

    @property
    def resting(self) -> bool:
        """Nothing more happens to it by itself."""
        return self.ended or self.finish is not None

    @property
    def held(self) -> bool:
        """It rests, and all its rows are in pages."""
        return self.finish in ("pause", "read") and self.reading is not None

    @property
    def num_read(self) -> int:
        return self.reading.num_rows if self.reading else 0

    @property
    def num_behind_units(self) -> int:
        """Rows of the passage that are in no unit."""
        return self.passage.num_rows - (self.units[-1].stop if self.units else 0)

    @property
    def num_unread(self) -> int:
        return self.passage.num_rows - self.num_read

    def units_to_come(self) -> Iterator[Unit]:
        """Those whose rows are not all in pages."""
        return takewhile(lambda unit: unit.stop > self.num_read, reversed(self.units))

    def resume(self, *more: tuple[int, ...] | Picture) -> None:
        """Go on after a pause, or after a passage was read, with ``more`` behind it."""
        assert (self.finish or self.rests_as) in ("pause", "read")
        self.passage = self.passage.followed_by(*more)
        self.finish = self.rests_as = None
        self.text_from = len(self.ids)
        self.transcript, self.watch = Transcript(), StopWatch(self.sampler.options.stop if self.sampler else ())

    def cancel(self) -> None:
        """Ask for an end before the next pass. May be called from any thread, at any time."""
        if not self.ended and self.error is None:
            self.error = Cancelled(f"cancelled after {len(self.ids)} tokens")

    def take_deltas(self) -> Sequence[str]:
        """The settled text since the last call."""
        taken = []
        while self.deltas:
            taken.append(self.deltas.popleft())
        return taken
