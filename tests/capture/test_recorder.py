"""Captures where there are several cards and threads: torch's own ``graph`` over two emulated cards."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from underpaint.capture import recorder
from underpaint.capture.recorder import CudaRecorder
from underpaint.devices import wait_for
from underpaint.handover.device_memory import _make_current
from underpaint.kv.pool import CacheShape
from underpaint.pipeline import Clock
from underpaint.understanding import decoding
from underpaint.understanding.decoding import Decoder, Step, StepBuffers

waited = list[Any]()


class Stream:
    def __init__(self, device: Any = None) -> None:
        index = CARDS.current if device is None else device
        self.device, self.graph = torch.device("cuda", index), None

    graph: "Graph | None"

    def synchronize(self) -> None:
        assert not self.graph
        waited.append(self)


class Graph:
    """``launch`` on a stream that it captures goes into it."""

    def __init__(self) -> None:
        self._kernels: list[Callable[[], None]] = []
        self._stream: Stream | None = None

    def capture_begin(self, *_: Any, **__: Any) -> None:
        self._stream = CARDS.stream_of(CARDS.current)
        self._stream.graph = self

    def capture_end(self) -> None:
        assert self._stream is not None
        self._stream.graph = None
        if CARDS.breaks:
            raise RuntimeError("operation failed due to a previous error during capture")

    def add(self, kernel: Callable[[], None]) -> None:
        self._kernels.append(kernel)

    def replay(self) -> None:
        for kernel in self._kernels:
            kernel()


defaults = [Stream(index) for index in range(2)]


class Cards(threading.local):
    """The current device and the current stream of each, by thread, as CUDA and torch have them."""

    breaks = False

    def __init__(self) -> None:
        self.current = 0
        self.streams: list[Any] = list(defaults)

    def stream_of(self, index: int) -> Any:
        return self.streams[index]

    def launch(self, index: int, kernel: Callable[[], None]) -> None:
        graph = self.stream_of(index).graph
        graph.add(kernel) if graph else kernel()

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, self.current = self.current, torch.device(device).index
        try:
            yield
        finally:
            self.current = before


class Current:
    """``torch.cuda.stream``. No generator, which would set the stream back as soon as nobody holds it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        index = self._stream.device.index
        self._before = CARDS.current, CARDS.stream_of(index)
        CARDS.current, CARDS.streams[index] = index, self._stream

    def __exit__(self, *_: object) -> None:
        CARDS.current, CARDS.streams[self._stream.device.index] = self._before


CARDS = Cards()


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cards]:
    made: list[Stream] = []

    def make(device: Any = None) -> Stream:
        made.append(Stream(device))
        return made[-1]

    def synchronize() -> None:
        if any(stream.graph for stream in made if stream.device.index == CARDS.current):
            raise RuntimeError("operation not permitted when stream is capturing")

    patches = {
        "device": CARDS.device, "stream": Current, "Stream": make, "CUDAGraph": Graph, "synchronize": synchronize,
        "current_device": lambda: CARDS.current, "graph_pool_handle": lambda: (0, 1), "empty_cache": lambda: None,
        "current_stream": lambda device=None: CARDS.stream_of(CARDS.current if device is None else device.index),
        "set_device": lambda index: setattr(CARDS, "current", index),
    }  # fmt: skip
    for name, patch in patches.items():
        monkeypatch.setattr(torch.cuda, name, patch)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", None)
    recorder._capture_stream.cache_clear()
    waited.clear()
    yield CARDS
    CARDS.breaks = False
    recorder._capture_stream.cache_clear()


def test_two_models_on_two_cards_capture_each_on_its_own(cards: Cards) -> None:
    """Whichever captured first, and whatever card is current: what a graph replays is what was to be recorded."""
    ran: list[int] = []
    for index in (0, 1, 0):
        replay = CudaRecorder(f"cuda:{index}")(partial(cards.launch, index, partial(ran.append, index)))
        ran.clear()
        replay()
        assert ran == [index]
        assert cards.current == 0


def test_a_model_on_another_card_than_the_current_one_decodes(cards: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text, too, also where no pass was captured before the first step."""
    zeros, ran = torch.zeros, list[int]()

    def run(_: Decoder, buffers: StepBuffers) -> Step:
        cards.launch(1, lambda: ran.append(buffers.size))
        return Step(buffers, None, zeros(buffers.size, 4), zeros(buffers.size, dtype=torch.int64))

    monkeypatch.setattr(decoding.torch, "zeros", lambda *size, dtype, **_: zeros(*size, dtype=dtype))
    monkeypatch.setattr(Decoder, "_run", run)
    pool: Any = SimpleNamespace(num_pages=4, shape=CacheShape(1, 1, 16, torch.float32))
    model: Any = SimpleNamespace(device="cuda:1")
    decoder = Decoder(model, pool)
    ran.clear()
    replay = decoder._steps[4].replay
    assert replay is not None
    replay()
    assert ran == [4]


def test_after_a_capture_that_broke_the_thread_is_back_on_the_stream_of_all_others(cards: Cards) -> None:
    """Else it would work beside them from then on, and read what they have not written yet."""
    before = cards.stream_of(1)
    cards.breaks = True
    with pytest.raises(RuntimeError, match="during capture"):
        CudaRecorder("cuda:1")(lambda: None)
    assert cards.stream_of(1) is before


def test_two_threads_capture_one_after_the_other(cards: Cards) -> None:
    """Of two models on one card: the wait with which a capture begins would break the other's."""
    in_capture, errors = threading.Event(), list[BaseException]()

    def body() -> None:
        if cards.stream_of(0).graph:
            in_capture.set()
            second.join(0.2)

    def capture() -> None:
        in_capture.wait(5)
        try:
            CudaRecorder("cuda:0")(lambda: None)
        except RuntimeError as error:
            errors.append(error)

    second = threading.Thread(target=capture)
    second.start()
    CudaRecorder("cuda:0")(body)
    second.join(5)
    assert not errors


def wait_in_pipeline() -> None:
    with Clock("cuda:0").stage("encode"):
        pass


def wait_in_device_memory() -> None:
    assert _make_current("cuda:0") == "cuda:0"


@pytest.mark.parametrize("wait", [partial(wait_for, "cuda:0"), wait_in_pipeline, wait_in_device_memory])
def test_while_a_graph_is_captured_other_threads_wait_for_their_own_work(
    cards: Cards, wait: Callable[[], None]
) -> None:
    """A call that has encoded its prompt, say, beside the turn of another that captures: to wait for the whole device
    would fail, and break the capture."""
    broken = list[BaseException]()

    def beside() -> None:
        try:
            wait()
        except RuntimeError as error:
            broken.append(error)

    def body() -> None:
        if cards.stream_of(0).graph:
            thread = threading.Thread(target=beside)
            thread.start()
            thread.join(5)

    CudaRecorder("cuda:0")(body)
    assert not broken
    assert waited == defaults[:1]
