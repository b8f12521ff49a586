"""A loaded model with its pages and its engines: the only module that knows both engines.

Whoever waits for something turns the engines, one thread at a time; so calls from several threads advance together.
"""

import time
from collections.abc import Callable, Generator, Sequence
from copy import copy
from typing import Any, Protocol, TypeVar

from underpaint.attention import choose, settle
from underpaint.capture.reads import make_reads
from underpaint.config import EngineConfig, cache_bytes
from underpaint.errors import BadConfig, BudgetTooSmall, OutOfPages, UnderpaintError
from underpaint.generation.engine import GenerationEngine
from underpaint.generation.graphs import make_graphs
from underpaint.generation.job import Order
from underpaint.generation.prefix import Borrowed, PrefixCache
from underpaint.generation.runner import Runner
from underpaint.kv.pool import PagePool, pages_for
from underpaint.kv.tile_codec import find_codec
from underpaint.kv.tree import PrefixTree
from underpaint.models.neo_unify import NeoUnify
from underpaint.models.qwen_image21 import QwenImage21
from underpaint.turnstile import Turnstile
from underpaint.understanding.engine import UnderstandingEngine
from underpaint.understanding.reply import Finish, Reply

STALL_SECONDS = 60.0
"""How long a request waits without any pass of any engine before it is told that its pages are held by others."""
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.0005, 0.005
"""Between looks at engines in which nothing moves, growing by half each time."""

Model = QwenImage21 | NeoUnify


class Claim(Protocol):
    """Whoever answers for what is submitted, see ``Service.view``."""

    def take(self, work: Order | Reply) -> None:
        """Before ``work`` is submitted. May raise, and then it is not."""
        ...

    def check(self) -> None:
        """Before work goes on. May raise, and then it does not."""
        ...


class Unclaimed:
    """The claim of a caller who needs none."""

    def take(self, work: Order | Reply) -> None:
        pass

    def check(self) -> None:
        pass


class Generation(Protocol):
    """Where orders are painted: in this process, or by way of it in another."""

    @property
    def passes(self) -> int:
        """Grows as long as anything moves."""
        ...

    def submit(self, order: Order) -> None: ...

    def turn(self) -> None: ...

    def drop(self, order: Order) -> None: ...


class Easel:
    """What paints in this process: the engine, over weights that generate and a page pool with its prefixes."""

    def __init__(self, model: Model, config: EngineConfig, tree: PrefixTree) -> None:
        painter: Any = model  # each family's painter takes conditions of its own type
        config = settle(config, tree.pool.shape.head_dim, model.shared_heads, tree.pool.page_rows)
        backend = choose(config)
        graphs = make_graphs(painter, tree.pool, backend, config)
        reads = make_reads(painter.prefill, tree.pool, painter.capturable, backend, config)
        self.runner = Runner(painter, tree.pool, backend, config.device, graphs, reads)
        self.prefixes = PrefixCache(tree, self.runner)
        self.engine = GenerationEngine(self.prefixes, self.runner, config.max_batch_rows)


def make_pool(model: Model, config: EngineConfig, alone: bool = True) -> PagePool:
    """See ``pool_bytes``."""
    budget, page_rows = pool_bytes(model, config, alone), model.checkpoint.defaults.page_rows
    return PagePool(model.cache_shape, find_codec(config.kv_codec), budget, config.device, page_rows)


def pool_bytes(model: Model, config: EngineConfig, alone: bool = True) -> int:
    """The budget of a page pool, the weights being loaded. ``alone``: no other process uses the device; else what it
    needs is not known. Raises BadConfig for a budget that the device does not have."""
    return cache_bytes(config, model.pass_bytes(config) if alone else None)


class Service:
    """Engines over one page pool. ``understanding`` is None for a family that does not talk.

    Where another process generates, there is neither ``runner`` nor ``prefixes``, and pages only for a family that
    talks.
    """

    def __init__(
        self, model: Model, config: EngineConfig, generation: Generation | None = None, pool: PagePool | None = None
    ) -> None:
        """``config`` is resolved. ``generation``: who paints, by default an engine of this service's own, for which
        the model was loaded with both roles. ``pool``: by default its own, too."""
        self.model = model
        self.config = config
        self._tree: PrefixTree | None = None
        if generation is None or isinstance(model, NeoUnify):
            self._tree = PrefixTree(pool or make_pool(model, config))
        self._easel = Easel(model, config, self.tree) if generation is None else None
        self._painter: Generation = self.easel.engine if generation is None else generation
        self.understanding: UnderstandingEngine | None = None
        if isinstance(model, NeoUnify):
            settled = settle(config, self.pool.shape.head_dim, model.shared_heads, self.pool.page_rows)
            backend = choose(settled)
            reads = make_reads(model.network.understand, self.pool, model.capturable, backend, settled)
            self.understanding = UnderstandingEngine(model, self.tree, backend, config.max_batch_rows, reads)
        self._turnstile = Turnstile()
        self._claim: Claim = Unclaimed()

    @property
    def tree(self) -> PrefixTree:
        assert self._tree is not None, "pages are with the process that generates"
        return self._tree

    @property
    def pool(self) -> PagePool:
        return self.tree.pool

    @property
    def easel(self) -> Easel:
        assert self._easel is not None, "another process generates"
        return self._easel

    @property
    def generation(self) -> GenerationEngine:
        return self.easel.engine

    @property
    def runner(self) -> Runner:
        return self.easel.runner

    @property
    def prefixes(self) -> PrefixCache:
        return self.easel.prefixes

    @property
    def has_pages(self) -> bool:
        return self._tree is not None

    @property
    def generates(self) -> bool:
        """Whether orders are painted in this process."""
        return self._easel is not None

    def view(self, claim: Claim) -> "Service":
        """The same engines as one request sees them: ``claim`` hears of all that is submitted through the view."""
        view = copy(self)
        view._claim = claim
        return view

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
        """Queue an order. Raises BudgetTooSmall, and what the claim raises; then nothing of the order stays taken."""
        try:
            self._claim.take(order)
            with self._turnstile:
                self._painter.submit(order)
        except UnderpaintError:
            self.drop_order(order)
            raise

    def finish_order(self, order: Order) -> Generator[None, None, None]:
        """Turn the engines until an order ends, yielding after each turn, and raise its error if it has one.

        The caller may cancel the order between turns. However this ends, the order has ended and nothing of it stays
        taken.
        """
        try:
            yield from self._turns(lambda: order.ended)
        finally:
            self.drop_order(order)
        if order.error is not None:
            raise order.error

    def drop_order(self, order: Order) -> None:
        """End an order now, whatever its state; nothing of it stays taken. One that has ended is left as it is."""
        with self._turnstile:
            self._painter.drop(order)

    def submit_reply(self, reply: Reply) -> None:
        """Queue a reply. Raises BudgetTooSmall, and what the claim raises."""
        self._claim.take(reply)
        with self._turnstile:
            self._talking.submit(reply)

    def resume_reply(self, reply: Reply, *more: Any) -> None:
        """Let a reply that rests with its pages go on, with tokens and pictures behind it. Raises what the claim
        raises."""
        self._claim.check()
        with self._turnstile:
            self._talking.resume(reply, *more)

    def rest_reply(self, reply: Reply) -> Generator[None, None, None]:
        """Turn the engines until a reply rests, yielding after each turn, and raise its error if it has one.

        A reply that paused keeps its pages until ``drop_reply``.
        """
        yield from self._turns(lambda: reply.resting)
        if reply.error is not None:
            raise reply.error

    def rested_as(self, reply: Reply) -> Finish | None:
        """Why a reply came to rest. Whether its pages were taken since, and it rests no more, is no matter."""
        with self._turnstile:
            return reply.finish or reply.rests_as

    def borrow(self, replies: Sequence[Reply]) -> Generator[None, None, Borrowed]:
        """Turn the engines until these replies rest with all their rows in pages at once, yielding after each turn;
        then hold those pages for a painting. Raises the error of one that fails, and BudgetTooSmall."""
        self._check_together(replies)
        turns = self._turns(lambda: False)
        while True:
            with self._turnstile:
                if all(reply.held for reply in replies):
                    readings = [reply.reading for reply in replies if reply.reading is not None]
                    rows_read = sum(reading.num_rows - reading.rows_found for reading in readings)
                    return Borrowed(self.pool, [reading.view() for reading in readings], rows_read)
            for reply in replies:
                if reply.error is not None:
                    raise reply.error
            next(turns)
            yield

    def _check_together(self, replies: Sequence[Reply]) -> None:
        """Raises BudgetTooSmall if an empty pool could not hold all of them at once: they would wait for each other's
        pages for ever."""
        page_rows, units = self.pool.page_rows, {unit for reply in replies for unit in reply.units}
        rows = [unit.num_rows for unit in units]
        rows += [reply.passage.num_rows - (reply.units[-1].stop if reply.units else 0) for reply in replies]
        needed = sum(pages_for(num_rows, page_rows) for num_rows in rows)
        if needed > self.pool.num_pages:
            raise BudgetTooSmall(needed * self.pool.page_bytes, self.pool.num_pages * self.pool.page_bytes)

    def drop_reply(self, reply: Reply) -> None:
        """Give back what a reply holds, whatever its state."""
        with self._turnstile:
            self._talking.drop(reply)

    def tend(self) -> None:
        """Turn the generation side once, although nobody waits: one in another process may have something to say."""
        if not self._turnstile.turning:
            self._turnstile.turn(self._painter.turn)

    @property
    def _talking(self) -> UnderstandingEngine:
        assert self.understanding is not None, "this family does not talk"
        return self.understanding

    def _passes(self) -> int:
        return self._painter.passes + (self.understanding.passes if self.understanding else 0)

    def _turns(self, done: Callable[[], bool]) -> Generator[None, None, None]:
        """Yield after every turn until ``done``, whoever made it. Raises OutOfPages when nothing moves."""
        passes, since, pause = self._passes(), time.monotonic(), MIN_PAUSE_SECONDS
        while not done():
            self._turnstile.turn(self._turn)
            yield
            if self._passes() != passes:
                passes, since, pause = self._passes(), time.monotonic(), MIN_PAUSE_SECONDS
            elif time.monotonic() - since > STALL_SECONDS:
                raise OutOfPages(f"no page became free in {STALL_SECONDS:.0f} s; others hold them, try again later")
            elif not done():
                time.sleep(pause)
                pause = min(1.5 * pause, MAX_PAUSE_SECONDS)

    def _turn(self) -> None:
        self._painter.turn()
        if self.understanding is not None:
            self.understanding.turn()


T = TypeVar("T")


def finish(turns: Generator[None, None, T]) -> T:
    """Run turns to their end, for what they return."""
    while True:
        try:
            next(turns)
        except StopIteration as ended:
            return ended.value
