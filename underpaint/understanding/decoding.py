"""One token further for many replies at once: the step of text decode, on buffers that do not move.

The number of replies is rounded up to one of a few sizes. For each there is one set of input buffers, filled on the
host and brought over in one copy, and on a GPU one CUDA graph that reads them: embedding, all layers, logits and the
likeliest tokens. Everything that differs between steps is in the buffers, the length of the prefixes too. On a CPU the
same step runs without a graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from underpaint.capture.recorder import CudaRecorder
from underpaint.kernels.decode_plan import DecodePlan, decode_attention_reference, num_pieces, plan_decode, tile_keys
from underpaint.kernels.kept import Kept
from underpaint.kernels.tiles import Ints
from underpaint.kv.pool import PagePool
from underpaint.models.neo_unify import NeoUnify
from underpaint.understanding.sampler import likeliest_tokens

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
USUAL_SIZES = SIZES[:7]
"""Those whose graphs are captured at start; the others when they are first needed."""


@dataclass(frozen=True, eq=False)
class DecodeRow:
    """The newest token of a reply: its id, where it stands on the t axis, and the (slot, rows) of the pages that hold
    the reply, (pages, 2): full ones first, and the newest row is the last of the last page."""

    token: int
    position: int
    pages: Ints


class StepBuffers:
    """The inputs of a step of ``size`` rows: one allocation on the host, one on the device, in the same order."""

    def __init__(self, size: int, max_pages: int, head_dim: int, kv_heads: int, device: str) -> None:
        self.size = size
        self.max_pages = max_pages
        pieces = num_pieces(size, kv_heads)
        # (name, dtype, shape); complex first for its alignment, the table of pages last, for only a part of it is used.
        fields = [
            ("rotary", torch.complex64, (size, head_dim // 2)),
            ("ids", torch.int64, (size,)),
            ("pieces", torch.int32, (pieces, 5)),
            ("merges", torch.int32, (size, 2)),
            ("slots", torch.int32, (size,)),
        ]
        sizes = [dtype.itemsize * int(np.prod(shape)) for _, dtype, shape in fields]
        starts = np.cumsum([0, *(-(-n // 16) * 16 for n in sizes)]).tolist()
        self._fixed_bytes = starts.pop()
        num_bytes = self._fixed_bytes + 8 * max_pages
        on_gpu = device.startswith("cuda")
        self._host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device) if on_gpu else self._host
        views = [
            {
                name: buffer[start : start + n].view(dtype).view(shape)
                for (name, dtype, shape), start, n in zip(fields, starts, sizes, strict=True)
            }
            | {"pages": buffer[self._fixed_bytes :].view(torch.int32).view(max_pages, 2)}
            for buffer in (self._host, self._device)
        ]
        self._there: dict[str, npt.NDArray[np.generic]] = {name: view.numpy() for name, view in views[0].items()}
        self.ids, self.rotary, self.slots = (views[1][name] for name in ("ids", "rotary", "slots"))
        self.plan = DecodePlan(views[1]["pages"], views[1]["pieces"], views[1]["merges"])
        self._there["slots"][:] = -1  # nobody's row is kept nowhere
        self._planned: Ints = np.zeros((2, size), np.int32)
        self._brought: torch.cuda.Event | None = None  # on a GPU: that the last copy from the host is over
        if self._device is not self._host:
            self._device.copy_(self._host)  # capturing runs the step before it is filled

    def fill(self, rows: Sequence[DecodeRow], rotary: npt.NDArray[np.complex64], page_rows: int, kv_heads: int) -> None:
        """Bring over the inputs of a step. The places behind ``rows`` are nobody's: without pages, kept nowhere."""
        there, count = self._there, len(rows)
        if self._brought is not None:
            # A step that asked for no token was not waited for: it may still stand behind a denoising step.
            self._brought.synchronize()
        pages = np.concatenate([row.pages for row in rows])
        there["pages"][: len(pages)] = pages
        lengths = np.zeros((2, self.size), np.int32)  # of all pages, and of full ones, the newest never being one
        lengths[0, :count] = [len(row.pages) for row in rows]
        last = np.cumsum(lengths[0, :count]) - 1
        full = pages[:, 1] == page_rows
        full[last] = False
        lengths[1, :count] = np.add.reduceat(full, last + 1 - lengths[0, :count], dtype=np.int32)
        if not np.array_equal(lengths, self._planned):  # most steps add no page
            there["pieces"][:], there["merges"][:] = plan_decode(lengths[0], page_rows, kv_heads, lengths[1])
            self._planned = lengths
        there["slots"][:count], there["slots"][count:] = pages[last].sum(axis=1) - 1, -1
        there["ids"][:count] = [row.token for row in rows]
        there["rotary"][:count] = rotary
        if self._device is not self._host:
            used = self._fixed_bytes + 8 * len(pages)
            self._device[:used].copy_(self._host[:used], non_blocking=True)
            self._brought = torch.cuda.current_stream(self._device.device).record_event()


class DecodeAttention:
    """``attend`` of a decoding step: the newest rows go into pages, and everything is read from there."""

    def __init__(self, pool: PagePool, buffers: StepBuffers) -> None:
        self._pool = pool
        self._buffers = buffers

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Of a plain transformer, on the CPU."""
        kept = self._buffers.slots >= 0
        self._pool.write(layer, self._buffers.slots[kept].long(), k[kept], v[kept])
        return decode_attention_reference(q, self._pool.rows(layer), self._buffers.plan, self._pool.page_rows)

    def kept(self, layer: int) -> Kept:
        return Kept(self._pool.rows(layer), self._buffers.slots)

    def packed(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from underpaint.kernels.decode_attention import decode_attention  # needs Triton, as a fused network does

        return decode_attention(q, self._pool.rows(layer), self._buffers.plan, self._pool.page_rows)


@dataclass(frozen=True, eq=False)
class Step:
    """A size, captured or (``replay`` None) to be run as it is. Outputs are overwritten by the next step of any size:
    ``logits`` (size, vocab_size), ``likeliest`` (size,) int64."""

    buffers: StepBuffers
    replay: Callable[[], None] | None
    logits: Tensor
    likeliest: Tensor


class Decoder:
    """Steps of every size for one model and one pool. ``graph_steps`` and ``plain_steps`` count what ran how,
    ``captures`` the graphs."""

    def __init__(self, model: NeoUnify, pool: PagePool) -> None:
        self.graph_steps = 0
        self.plain_steps = 0
        self.captures = 0
        self._model = model
        self._pool = pool
        self._buffers: dict[int, StepBuffers] = {}
        self._steps: dict[int, Step] = {}
        self._record = CudaRecorder(model.device) if self._captures else None
        # Replies may share pages, so their tables may be longer together than the pool; not by much.
        self._max_pages = 2 * pool.num_pages + SIZES[-1]
        if self._captures:
            for size in reversed(USUAL_SIZES):
                self._capture(size)

    @classmethod
    def can_serve(cls, model: NeoUnify, pool: PagePool) -> bool:
        """Whether decode runs by steps: pages must be whole tiles, and on a GPU the network fused."""
        on_cpu = not model.device.startswith("cuda")
        return tile_keys(pool.page_rows) > 0 and (on_cpu or (model.network.fused and model.network.capturable))

    @property
    def _captures(self) -> bool:
        return self._model.device.startswith("cuda")

    def takes(self, rows: Sequence[DecodeRow]) -> bool:
        """Whether so many rows with so many pages fit the buffers."""
        return len(rows) <= SIZES[-1] and sum(len(row.pages) for row in rows) <= self._max_pages

    @torch.inference_mode()
    def step(self, rows: Sequence[DecodeRow]) -> tuple[Tensor, Tensor]:
        """Write the rows to their pages and look behind them: logits (rows, vocab_size), and ``likeliest_tokens`` of
        them. Valid until the next step."""
        size = next(size for size in SIZES if size >= len(rows))
        if self._captures and size not in self._steps:
            self._capture(size)
        buffers = self._buffers_of(size)
        rotary = self._model.text_rotary([row.position for row in rows])
        buffers.fill(rows, rotary, self._pool.page_rows, self._pool.shape.num_heads)
        if self._captures:
            step = self._steps[size]
            assert step.replay is not None
            step.replay()
            self.graph_steps += 1
        else:
            step = self._run(buffers)
            self.plain_steps += 1
        return step.logits[: len(rows)], step.likeliest[: len(rows)]

    def _buffers_of(self, size: int) -> StepBuffers:
        if size not in self._buffers:
            shape = self._pool.shape
            self._buffers[size] = StepBuffers(
                size, self._max_pages, shape.head_dim, shape.num_heads, self._model.device
            )
        return self._buffers[size]

    def _run(self, buffers: StepBuffers) -> Step:
        network = self._model.network
        attend = DecodeAttention(self._pool, buffers)
        hidden = network.understand(network.embed_tokens(buffers.ids), buffers.rotary, attend)
        logits = network.logits(hidden)
        return Step(buffers, None, logits, likeliest_tokens(logits))

    @torch.inference_mode()
    def _capture(self, size: int) -> None:
        """The buffers say that no row is anybody's, so running the step changes no page."""
        assert self._record is not None
        buffers, ran = self._buffers_of(size), list[Step]()
        replay = self._record(lambda: ran.append(self._run(buffers)))
        self._steps[size] = replace(ran[-1], replay=replay)
        self.captures += 1
