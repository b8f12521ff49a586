"""Orders over several generation workers, all in this process: where each goes, and what one that is lost costs."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from neo_unify.cases import TOLERANCE, difference
from PIL import Image
from timing import wait_until
from torch import Tensor

from server.conftest import TALKING
from server.test_remote import MODELS, Painter, make_order, paint
from server.tools import ENGINE, in_threads
from underpaint.generation.job import Order
from underpaint.handover.arena import Arena
from underpaint.handover.channel import Channel, pair
from underpaint.handover.messages import ToGeneration, ToUnderstanding
from underpaint.handover.pools import share_pool
from underpaint.kv.codec import CODECS
from underpaint.models import registry
from underpaint.models.roles import Role
from underpaint.server.remote import RemoteGeneration
from underpaint.server.wire import Handover, WorkerLost
from underpaint.service import Service, finish, make_pool


class Studio:
    """A service, and two painters."""

    def __init__(self, handover: Handover, stack: ExitStack) -> None:
        model = MODELS[Role.UNDERSTAND]
        codec, page_rows = CODECS[ENGINE.kv_codec], model.checkpoint.defaults.page_rows
        copied = make_pool(model, ENGINE) if handover == "copy" else None
        shared = None
        if copied is None:
            shared = share_pool(model.cache_shape, codec, ENGINE.kv_cache_bytes, "cpu", page_rows)
        self.arena = Arena(64 << 20)
        self.parted: list[int] = []
        self.remote = RemoteGeneration(self.arena, "cpu", shared, copied, self.parted.append)
        self.service = Service(model, ENGINE, self.remote, copied or (shared.pool if shared else None))
        self.painters = [Painter(handover) for _ in range(2)]
        self._num_lines = 0
        for number, painter in enumerate(self.painters):
            stack.callback(painter.close)
            self.connect(number)
        stack.callback(self.assert_nothing_held)

    def connect(self, number: int) -> None:
        ours, theirs = pair()
        self._num_lines += 1
        self.painters[number].next = Channel(theirs, ToGeneration)
        self.remote.meet(self._num_lines, number, Channel(ours, ToUnderstanding))

    def cut(self, number: int) -> None:
        self.remote._lines[number].channel.close()

    @property
    def num_taken(self) -> list[int]:
        self.service.tend()
        return [self.remote._lines[number].num_taken for number in range(2)]

    def paint(self, **how: Any) -> Tensor:
        return paint(self.service, **how)

    @contextmanager
    def busy(self, **how: Any) -> Iterator[Order]:
        """While an order is painted that does not end by itself."""
        order = make_order(self.service, **{**how, "num_steps": 100_000})
        self.service.submit_order(order)
        try:
            yield order
        finally:
            self.service.drop_order(order)

    def assert_nothing_held(self) -> None:
        arenas = [self.arena, *(painter.arena for painter in self.painters)]
        trees = [self.service.tree, *(p.generator._tree for p in self.painters if p.generator._tree is not None)]

        def given_back() -> bool:
            self.service.tend()
            return not any(arena.num_leases for arena in arenas) and all(
                tree.pool.used_bytes == tree.used_bytes for tree in trees
            )

        wait_until(given_back)


@pytest.fixture
def begin() -> Iterator[Callable[..., Studio]]:
    with ExitStack() as stack:
        yield lambda handover="copy": Studio(handover, stack)


@pytest.fixture(scope="module")
def alone() -> Tensor:
    return paint(Service(registry.load(TALKING, ENGINE), ENGINE))


@pytest.mark.parametrize("handover", ["copy", "in_place"])
def test_both_paint_what_one_process_paints(begin: Callable[..., Studio], alone: Tensor, handover: Handover) -> None:
    studio = begin(handover)
    with studio.busy():  # one of them, so that the next order goes to the other
        assert torch.equal(studio.paint(), alone)
        with studio.busy():
            states = in_threads([studio.paint] * 6)
    assert max(difference(state, alone) for state in states) < TOLERANCE
    assert sum(studio.num_taken) == 9
    assert all(painter.generator.vitals.passes for painter in studio.painters)


def test_an_order_goes_where_its_prefixes_are_unless_others_wait_there(begin: Callable[..., Studio]) -> None:
    studio = begin()
    first, second = ({"images": (Image.effect_noise((64, 64), sigma),), "num_steps": 1} for sigma in (60, 90))
    studio.paint(**first)
    with studio.busy(**first):
        studio.paint(**second)
    assert studio.num_taken == [2, 1]
    for edit in (first, second, first, first, second, first):
        studio.paint(**edit)
    assert studio.num_taken == [6, 3]
    with studio.busy(**first):
        studio.paint(**first)
    assert studio.num_taken == [7, 4]
    copied = studio.remote.vitals.handover_bytes
    studio.paint(**first)
    tails = studio.remote.vitals.handover_bytes - copied
    assert 0 < tails < copied / 10


def test_one_that_is_lost_costs_its_own_orders(begin: Callable[..., Studio], alone: Tensor) -> None:
    studio = begin()
    with studio.busy() as lost:
        order = make_order(studio.service)
        studio.service.submit_order(order)
        assert studio.num_taken == [1, 1]
        studio.cut(0)
        finish(studio.service.finish_order(order))
        assert torch.equal(order.jobs[0].state, alone)
        with pytest.raises(WorkerLost):
            finish(studio.service.finish_order(lost))
    assert studio.parted == [1]
    for _ in range(2):
        assert torch.equal(studio.paint(), alone)
    studio.connect(0)
    with studio.busy():
        assert torch.equal(studio.paint(), alone)
    assert studio.num_taken == [1, 4]


def test_without_either_an_order_ends_at_once(begin: Callable[..., Studio]) -> None:
    studio = begin()
    studio.service.tend()
    for number in range(2):
        studio.cut(number)
    studio.service.tend()
    with pytest.raises(WorkerLost):
        studio.paint()
