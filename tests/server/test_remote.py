"""Orders that another process paints, both ends in this one: what is handed over, waited for, given back."""

import io
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from neo_unify.cases import TOLERANCE, difference
from PIL import Image
from timing import wait_until
from torch import Tensor

from server.conftest import TALKING
from server.tools import ENGINE, in_threads
from underpaint.chat import Chat, PaintingOptions, PicturePart
from underpaint.errors import BudgetTooSmall, Cancelled, DeadlinePassed, OutOfMemory
from underpaint.generation.job import Order
from underpaint.handover.arena import BLOCK_BYTES, Arena
from underpaint.handover.channel import Channel, pair
from underpaint.handover.faults import ArenaFull
from underpaint.handover.messages import PaintOrder, ToGeneration, ToUnderstanding
from underpaint.handover.pools import share_pool
from underpaint.kv.codec import CODECS
from underpaint.models import registry
from underpaint.models.roles import Role
from underpaint.request import PaintRequest
from underpaint.server.crew import Crew
from underpaint.server.generator import Generator
from underpaint.server.logs import make_log
from underpaint.server.media import Output
from underpaint.server.news import Failed, News
from underpaint.server.paint import Painting, Setting
from underpaint.server.remote import RemoteGeneration
from underpaint.server.wire import Handover, WorkerLost
from underpaint.service import Service, finish, make_pool
from underpaint.studio import NeoStudio, make_studio

MODELS = {role: registry.load(TALKING, ENGINE, frozenset({role})) for role in Role}
PROMPT = "a red circle"


def make_order(service: Service, num_steps: int = 3, images: tuple[Image.Image, ...] = ()) -> Order:
    request = PaintRequest(
        prompts=(PROMPT,), images=images, negative_prompt=None, true_cfg_scale=None, width=64, height=64,
        num_steps=num_steps, sigmas=None, seed=1, num_images=1, latents=None, output_type="latent",
        reference_resolution=None, guidance_scale=3.0,
    )  # fmt: skip
    studio = make_studio(service)
    return studio.order(request, studio.plan(request))


def paint(service: Service, **how: Any) -> Tensor:
    """The state of the finished picture, (cells, 3072)."""
    order = make_order(service, **how)
    service.submit_order(order)
    finish(service.finish_order(order))
    return order.jobs[0].state


class Painter:
    """A generator in a thread. ``next``: the line that it shall paint for. ``seconds``: how long it rests after a
    turn."""

    def __init__(
        self, handover: Handover, arena_bytes: int = 64 << 20, kv_cache_bytes: int = ENGINE.kv_cache_bytes
    ) -> None:
        self.arena = Arena(arena_bytes)
        config = replace(ENGINE, kv_cache_bytes=kv_cache_bytes)
        self.generator = Generator(MODELS[Role.GENERATE], config, handover, self.arena)
        self.seconds = 0.0
        self.next: Channel | None = None
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._paint)
        self._thread.start()

    def _paint(self) -> None:
        while not self._ends.is_set():
            line, self.next = self.next, None
            if line is not None:
                self.generator.meet(line)
            self.generator.turn()
            self.generator.wait(0.002)
            time.sleep(self.seconds)
        self.generator.part()

    def close(self) -> None:
        self._ends.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


class Pair:
    """A service, and a painter, with everything between them."""

    def __init__(
        self, handover: Handover = "copy", arena_bytes: int = 64 << 20, generate_bytes: int = 64 << 20
    ) -> None:
        model = MODELS[Role.UNDERSTAND]
        codec, page_rows = CODECS[ENGINE.kv_codec], model.checkpoint.defaults.page_rows
        shared = copied = None
        if handover == "copy":
            copied = make_pool(model, ENGINE)
        else:
            shared = share_pool(model.cache_shape, codec, ENGINE.kv_cache_bytes, "cpu", page_rows)
        self.parted: list[int] = []
        self.painter = Painter(handover, arena_bytes, generate_bytes)
        self.generator = self.painter.generator
        self.arenas = Arena(arena_bytes), self.painter.arena
        self.remote = RemoteGeneration(self.arenas[0], "cpu", shared, copied, self.parted.append)
        self.service = Service(model, ENGINE, self.remote, copied or (shared.pool if shared else None))
        self.connect()

    def connect(self) -> None:
        """A new line, as after a restart of either."""
        ours, theirs = pair()
        self.painter.next = Channel(theirs, ToGeneration)
        self.remote.meet(len(self.parted) + 1, 0, Channel(ours, ToUnderstanding))

    def order(self, **how: Any) -> Order:
        return make_order(self.service, **how)

    def paint(self, **how: Any) -> Tensor:
        return paint(self.service, **how)

    def assert_nothing_held(self) -> None:
        def given_back() -> bool:
            self.service.tend()
            pages = [self.service.tree, *([self.generator._tree] if self.generator._tree else [])]
            return not any(arena.num_leases for arena in self.arenas) and all(
                tree.pool.used_bytes == tree.used_bytes for tree in pages
            )

        wait_until(given_back)

    def close(self) -> None:
        self.painter.close()


@pytest.fixture
def begin() -> Iterator[Callable[..., Pair]]:
    """Makes pairs, and at the end looks whether anything is held."""
    pairs: list[Pair] = []

    def make(**how: Any) -> Pair:
        pairs.append(Pair(**how))
        return pairs[-1]

    yield make
    try:
        for one in pairs:
            one.assert_nothing_held()
    finally:
        for one in pairs:
            one.close()


@pytest.fixture(scope="module")
def alone() -> Tensor:
    """What one process paints."""
    return paint(Service(registry.load(TALKING, ENGINE), ENGINE))


@pytest.mark.parametrize("handover", ["copy", "in_place"])
def test_it_paints_what_one_process_paints(begin: Callable[..., Pair], alone: Tensor, handover: Handover) -> None:
    both = begin(handover=handover)
    assert torch.equal(both.paint(), alone)
    assert bool(both.remote.vitals.handover_bytes) == (handover == "copy")  # in place, no bytes move
    assert torch.equal(both.paint(), alone)


def test_a_unit_is_brought_once(begin: Callable[..., Pair]) -> None:
    """Counted in bytes: of what is in common, only the first order's is copied, also while it is on its way."""
    picture = Image.effect_noise((64, 64), 90)
    edit = {"images": (picture,), "num_steps": 1}
    alone = begin()
    alone.paint(**edit)
    first = alone.remote.vitals
    alone.paint(**edit)
    again = alone.remote.vitals.handover_bytes - first.handover_bytes
    assert 0 < again < first.handover_bytes / 2  # tails alone
    together = begin()
    in_threads([partial(together.paint, **edit)] * 4)
    assert together.remote.vitals.handovers == 4
    assert together.remote.vitals.handover_bytes == first.handover_bytes + 3 * again


def test_orders_wait_for_room_in_the_arena(begin: Callable[..., Pair], alone: Tensor) -> None:
    """There is room for little more than one order at a time."""
    probe = begin()
    probe.paint()
    both = begin(arena_bytes=int(1.5 * probe.remote.vitals.handover_bytes))
    states = in_threads([both.paint] * 8)
    assert max(difference(state, alone) for state in states) < TOLERANCE


def test_an_order_larger_than_the_arena_is_told_so_twenty_times(begin: Callable[..., Pair]) -> None:
    both = begin(arena_bytes=64 << 10)
    for _ in range(20):
        with pytest.raises(ArenaFull, match="make it larger"):
            both.paint()
        both.assert_nothing_held()


def test_orders_wait_for_pages_of_generation(begin: Callable[..., Pair], alone: Tensor) -> None:
    both = begin()
    page_bytes = both.service.pool.page_bytes
    few = begin(generate_bytes=5 * page_bytes)
    states = in_threads([few.paint] * 6)
    assert max(difference(state, alone) for state in states) < TOLERANCE
    none = begin(generate_bytes=page_bytes)
    with pytest.raises(BudgetTooSmall):
        none.paint()


@pytest.mark.parametrize("handover", ["copy", "in_place"])
def test_s36_a_line_that_is_cut_costs_what_was_on_it_and_no_more(
    begin: Callable[..., Pair], alone: Tensor, handover: Handover
) -> None:
    """Twenty times, a moment later each."""
    both = begin(handover=handover)
    both.painter.seconds = 0.01
    for i in range(20):
        order = both.order(num_steps=10_000)
        both.service.submit_order(order)
        turns = both.service.finish_order(order)
        until = time.monotonic() + 0.005 * i
        while time.monotonic() < until:
            next(turns)
        assert both.remote._lines
        both.remote._lines[0].channel.close()
        with pytest.raises(WorkerLost):
            finish(turns)
        both.assert_nothing_held()
        assert len(both.parted) == i + 1
        both.connect()
    both.painter.seconds = 0.0
    assert torch.equal(both.paint(), alone)


def test_s36_a_line_that_ends_while_an_order_waits_for_room_leaves_no_slab(begin: Callable[..., Pair]) -> None:
    """Its sender finds room when there is nobody any more to read what it writes."""
    both = begin()
    arena = both.arenas[0]
    others = arena.lease(arena.reader.num_blocks * BLOCK_BYTES, "others", time.monotonic() + 600)
    order = both.order()
    order.deadline = time.monotonic() + 600
    both.service.submit_order(order)
    (line,) = both.remote._lines.values()
    wait_until(lambda: bool(arena._line))
    line.channel.close()
    with pytest.raises(WorkerLost):
        finish(both.service.finish_order(order))
    arena.release(others)
    both.remote._sending.submit(lambda: None).result(60)  # it is behind the order in that thread
    assert not arena.num_leases


def test_a_line_may_come_while_others_look_whether_anything_moves(begin: Callable[..., Pair]) -> None:
    """Who waits for an order looks without holding the engines, and another thread takes up the line meanwhile."""
    both = begin()

    class Looked:
        @property
        def dispatches(self) -> dict[str, Any]:
            lines[len(lines)] = self
            return {}

    lines: dict[int, Any] = {0: Looked()}
    both.remote._lines, real = lines, both.remote._lines
    assert both.remote.passes == both.remote._num_heard
    both.remote._lines = real


def test_without_anybody_to_paint_an_order_ends_at_once(begin: Callable[..., Pair]) -> None:
    both = begin()
    both.service.tend()
    assert both.remote._lines
    both.remote._lines[0].channel.close()
    both.service.tend()
    with pytest.raises(WorkerLost):
        both.paint()


def test_cancelled_at_any_time(begin: Callable[..., Pair], alone: Tensor) -> None:
    """Twenty times, a moment later each: in the queue, on its way, and while it is painted."""
    both = begin()
    both.painter.seconds = 0.005
    for i in range(20):
        order = both.order(num_steps=10_000)
        both.service.submit_order(order)
        turns = both.service.finish_order(order)
        until = time.monotonic() + 0.004 * i
        while time.monotonic() < until:
            next(turns)
        order.cancel()
        with pytest.raises(Cancelled):
            finish(turns)
        both.assert_nothing_held()
    both.painter.seconds = 0.0
    assert torch.equal(both.paint(), alone)


def test_cancelled_while_an_earlier_order_waits_for_pages_of_generation(begin: Callable[..., Pair]) -> None:
    """There are pages for one. The second waits for them, and the third, which is cancelled, does not wait for it."""
    both = begin(generate_bytes=5 * begin().service.pool.page_bytes)
    orders = [both.order(num_steps=10_000) for _ in range(3)]
    for order in orders:
        both.service.submit_order(order)
    turns = both.service.finish_order(orders[2])

    def waits() -> bool:
        next(turns)
        return len(both.generator._queue) == 2

    wait_until(waits)
    orders[2].cancel()
    with pytest.raises(Cancelled):
        finish(turns)
    assert [order.ended for order in orders] == [False, False, True]
    for order in orders:
        both.service.drop_order(order)


def test_an_order_that_is_dropped_at_once_is_not_painted(begin: Callable[..., Pair]) -> None:
    both = begin()
    for _ in range(20):
        order = both.order(num_steps=10_000)
        both.service.submit_order(order)
        both.service.drop_order(order)
        assert order.ended
        both.assert_nothing_held()


def test_a_deadline_holds_in_the_other_process(begin: Callable[..., Pair]) -> None:
    both = begin()
    both.painter.seconds = 0.01
    order = both.order(num_steps=10_000)
    order.deadline = time.monotonic() + 0.3
    both.service.submit_order(order)
    with pytest.raises(DeadlinePassed):
        finish(both.service.finish_order(order))


@pytest.mark.parametrize("where", ["generator.read_order", "remote.read_tensors", "remote.write_order"])
def test_s13_out_of_memory_at_the_border_of_processes_costs_one_order(
    begin: Callable[..., Pair], alone: Tensor, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Of two at once, one is told so, and the other is painted by the same two processes; nothing stays taken."""
    both = begin()
    module, name = where.split(".")
    whole = getattr(sys.modules[f"underpaint.server.{module}"], name)
    left = [torch.OutOfMemoryError("CUDA out of memory")]

    def once(*arguments: Any) -> Any:
        if left:
            raise left.pop()
        return whole(*arguments)

    monkeypatch.setattr(f"underpaint.server.{where}", once)

    def outcome() -> Tensor | OutOfMemory:
        try:
            return both.paint()
        except OutOfMemory as error:
            return error

    outcomes = in_threads([outcome] * 2)
    states = [state for state in outcomes if isinstance(state, Tensor)]
    assert len(states) == 1
    assert difference(states[0], alone) < TOLERANCE
    both.assert_nothing_held()
    assert not both.parted


def test_a_dialogue_with_pictures(begin: Callable[..., Pair]) -> None:
    """Both ways of handing over, against one process."""
    services = [Service(registry.load(TALKING, ENGINE), ENGINE)]
    services += [begin(handover=handover).service for handover in ("copy", "in_place")]
    answers = []
    for service in services:
        chat = Chat(service)
        forced = [service.neo.tokenizer.image_start]
        painting = PaintingOptions(num_inference_steps=2, sizes=((64, 64),), image_guidance_scale=2.0)
        parts = list(chat.send("paint", painting=painting, seed=5, forced_ids=forced, max_tokens=8, max_pictures=1))
        answers.append((chat.ids, [part.pixels for part in parts if isinstance(part, PicturePart)]))
    for ids, pixels in answers[1:]:
        assert ids == answers[0][0]
        assert len(pixels) == 1
        assert torch.equal(pixels[0], answers[0][1][0])


@pytest.mark.parametrize("handover", [None, "copy"])
def test_a_painting_that_is_cancelled_before_it_is_submitted_holds_nothing(
    begin: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, handover: Handover | None
) -> None:
    """Its branches are in pages by then, in whatever process it is painted."""
    service = begin(handover=handover).service if handover else Service(registry.load(TALKING, ENGINE), ENGINE)
    crew = Crew(service, 1, make_log(io.StringIO()))
    settings: dict[str, Setting] = {
        "negative_prompt": None, "true_cfg_scale": None, "width": 64, "height": 64, "num_steps": 2, "seed": 1,
        "num_images": 1, "reference_resolution": None,
    }  # fmt: skip
    whole = NeoStudio.order

    def order(*arguments: Any) -> Order:
        made = whole(*arguments)
        assert service.pool.used_bytes > service.tree.used_bytes
        crew.cancel("task")
        return made

    monkeypatch.setattr(NeoStudio, "order", order)
    told: list[News] = []
    crew.begin("task", Painting(PROMPT, (), settings, Output(), 0), time.monotonic() + 300, told.append)
    wait_until(lambda: bool(told) and isinstance(told[-1], Failed))
    assert isinstance(told[-1], Failed)
    assert isinstance(told[-1].error.error(), Cancelled)
    assert service.pool.used_bytes == service.tree.used_bytes
    crew.close()


def test_an_answer_that_overtakes_the_thread_that_sends_leaves_nothing(
    begin: Callable[..., Pair], alone: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order has ended before its sender knows that it was sent."""
    both = begin(handover="in_place")
    both.service.tend()
    line, ended = both.remote._lines[0], threading.Event()
    assert line is not None
    send = line.channel.send

    def send_slowly(message: Any, *more: Any) -> None:
        send(message, *more)
        if isinstance(message, PaintOrder):
            assert ended.wait(60)

    monkeypatch.setattr(line.channel, "send", send_slowly)
    assert torch.equal(both.paint(), alone)
    ended.set()
    both.remote._sending.submit(lambda: None).result(60)  # it is behind the order in that thread
    assert not line.dispatches
