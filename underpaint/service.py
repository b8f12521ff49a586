"""A loaded model with its pages and its engines: the only module that knows both engines.

Whoever waits for something turns the engines, under one lock; so calls from several threads advance together.
"""

import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from underpaint.attention import choose
from underpaint.config import EngineConfig, cache_bytes
from underpaint.errors import BadConfig, OutOfPages
from underpaint.generation.engine import GenerationEngine
from underpaint.generation.job import Order
from underpaint.generation.prefix import Borrowed, PrefixCache
from underpaint.generation.runner import Runner
from underpaint.kv.codec import CODECS
from underpaint.kv.pool import PagePool
from underpaint.kv.tree import PrefixTree
from underpaint.models.neo_unify import NeoUnify
from underpaint.models.qwen_image21 import QwenImage21
from underpaint.understanding.engine import UnderstandingEngine
from underpaint.understanding.reply import Reply

STALL_SECONDS = 60.0
"""How long a request waits without any pass of any engine before it is told that its pages are held by others."""
STALL_PAUSE_SECONDS = 0.001

Model = QwenImage21 | NeoUnify


class Service:
    """Engines over one page pool. ``understanding`` is None for a family that does not talk."""

    def __init__(self, model: Model, config: EngineConfig) -> None:
        """``config`` is resolved."""
        self.model = model
        self.config = config
        page_rows = model.checkpoint.defaults.page_rows
        backend = choose(config.attention_backend, config.device)
        self.pool = PagePool(model.cache_shape, CODECS[config.kv_codec], cache_bytes(config), config.device, page_rows)
        self.tree = PrefixTree(self.pool)
        painter: Any = model  # each family's painter takes conditions of its own type
        self.runner = Runner(painter, self.pool, backend, config.device)
        self.prefixes = PrefixCache(self.tree, self.runner)
        self.generation = GenerationEngine(self.prefixes, self.runner, config.max_batch_rows)
        self.understanding: UnderstandingEngine | None = None
        if isinstance(model, NeoUnify):
            self.understanding = UnderstandingEngine(model, self.tree, backend, config.max_batch_rows)
        self._lock = threading.Lock()

    @property
    def qwen(self) -> QwenImage21:
        """The model, where it must be a Qwen-Image 2.1. Raises BadConfig."""
        if not isinstance(self.model, QwenImage21):
            raise BadConfig("this needs a Qwen-Image 2.1 checkpoint")
        return self.model

    @property
    def neo(self) -> NeoUnify:
        """The model, where it must be a SenseNova-U1. Raises BadConfig."""
        if not isinstance(self.model, NeoUnify):
            raise BadConfig("this needs a SenseNova-U1 checkpoint; Qwen-Image paints but does not talk")
        return self.model

    def submit_order(self, order: Order) -> None:
        """Queue an order. Raises BudgetTooSmall."""
        with self._lock:
            self.generation.submit(order)

    def finish_order(self, order: Order) -> Generator[None, None, None]:
        """Turn the engines until an order ends, yielding after each turn, and raise its error if it has one.

        The caller may cancel the order between turns. However this ends, the order has ended and nothing of it stays
        taken.
        """
        try:
            yield from self._turns(lambda: order.ended)
        finally:
            with self._lock:
                self.generation.drop(order)
        if order.error is not None:
            raise order.error

    def submit_reply(self, reply: Reply) -> None:
        """Queue a reply. Raises BudgetTooSmall."""
        with self._lock:
            self._talking.submit(reply)

    def resume_reply(self, reply: Reply, *more: Any) -> None:
        """Let a reply that rests with its pages go on, with tokens and pictures behind it."""
        with self._lock:
            self._talking.resume(reply, *more)

    def rest_reply(self, reply: Reply) -> Generator[None, None, None]:
        """Turn the engines until a reply rests, yielding after each turn, and raise its error if it has one.

        A reply that paused keeps its pages until ``drop_reply``.
        """
        yield from self._turns(lambda: reply.resting)
        if reply.error is not None:
            raise reply.error

    def borrow(self, replies: Sequence[Reply]) -> Generator[None, None, Borrowed]:
        """Turn the engines until these replies rest with all their rows in pages at once, yielding after each turn;
        then hold those pages for a painting. Raises the error of one that fails."""
        turns = self._turns(lambda: False)
        while True:
            with self._lock:
                if all(reply.held for reply in replies):
                    views = [reply.reading.view() for reply in replies if reply.reading is not None]
                    return Borrowed(self.pool, views)
            for reply in replies:
                if reply.error is not None:
                    raise reply.error
            next(turns)
            yield

    def drop_reply(self, reply: Reply) -> None:
        """Give back what a reply holds, whatever its state."""
        with self._lock:
            self._talking.drop(reply)

    @property
    def _talking(self) -> UnderstandingEngine:
        assert self.understanding is not None, "this family does not talk"
        return self.understanding

    def _passes(self) -> int:
        return self.runner.passes + (self.understanding.passes if self.understanding else 0)

    def _turns(self, done: Callable[[], bool]) -> Generator[None, None, None]:
        """Yield after every turn until ``done``; the lock is not held then. Raises OutOfPages when nothing moves."""
        passes, since = self._passes(), time.monotonic()
        while not done():
            with self._lock:
                if not done():
                    self.generation.turn()
                    if self.understanding is not None:
                        self.understanding.turn()
            yield
            if self._passes() != passes:
                passes, since = self._passes(), time.monotonic()
            elif time.monotonic() - since > STALL_SECONDS:
                raise OutOfPages(f"no page became free in {STALL_SECONDS:.0f} s; others hold them, try again later")
            elif not done():
                time.sleep(STALL_PAUSE_SECONDS)
