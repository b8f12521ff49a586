"""Passes of real models to check and to time attention with: lengths, masks, random inputs.

A *shape* is a list of sequences; ``make_problem`` draws inputs for one, its prefixes in shuffled pages or in order.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from underpaint.kernels.hybrid_attention_triton import hybrid_attention_reference
from underpaint.kernels.packed_tiles import PackedTiles, Stored
from underpaint.kernels.tiles import Extent, Group, Ints, Plan, RowShape, StoredKV, TileShape
from underpaint.layout import Grid, Layout

PAGE_ROWS = 128
E4M3_MAX = 448.0
QWEN_GRID = (64, 64)  # 1024 x 1024
QWEN_TEXT = 200

Part = tuple[Layout, int]
"""A sequence, and how many of its rows are the prefix."""


class Kernel(Protocol):
    """``hybrid_attention_triton``, ``hybrid_attention_gluon`` or ``hybrid_attention_fp8``."""

    def plan_pass(
        self, groups: Sequence[Group], row_stop: Ints, row_shape: RowShape, tile: TileShape | None
    ) -> Plan: ...

    def hybrid_attention(self, q: Tensor, k: Tensor, v: Tensor, stored: Stored | None, plan: Plan) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Problem:
    """A pass: inputs of ``hybrid_attention``, and the pairs of a row and a visible key, summed over rows."""

    q: Tensor
    k: Tensor
    v: Tensor
    stored: StoredKV | None
    groups: list[Group]
    row_stop: Ints
    area: int

    @property
    def flops(self) -> float:
        """Of the two matrix products, over the mask's true area."""
        return 4.0 * self.area * self.q.shape[1] * self.q.shape[2]

    def runner(self, kernel: Kernel, tile: TileShape | None = None) -> Callable[[], Tensor]:
        """The kernel on this pass, planned."""
        plan = kernel.plan_pass(self.groups, self.row_stop, RowShape.of(self.q, self.k), tile)
        return lambda: kernel.hybrid_attention(self.q, self.k, self.v, self.stored, plan)

    def plain(self) -> Tensor:
        """The plain computation, dense, in the dtype of ``q``."""
        return hybrid_attention_reference(self.q, self.k, self.v, self.stored, self.groups, self.row_stop)

    def error(self, ours: Tensor, every: int = 1) -> tuple[float, float]:
        """Largest error against fp32 of ``ours``, and of the plain computation in the dtype of ``q``: ours should be
        under twice that. ``every``: see ``hybrid_attention_reference``."""
        where = (self.stored, self.groups, self.row_stop, every)
        rows = torch.cat([torch.arange(g.first, g.first + g.num_rows, every) for g in self.groups])
        native = hybrid_attention_reference(self.q, self.k, self.v, *where)[rows]
        exact = hybrid_attention_reference(self.q.float(), self.k.float(), self.v.float(), *where)[rows]
        mine, plain = ((x.float() - exact).abs().max().item() for x in (ours[rows], native))
        return mine, plain

    def relative_error(self, ours: Tensor) -> float:
        """Root mean square of the error of ``ours`` against fp32, over that of the exact result."""
        exact = replace(self, q=self.q.float(), k=self.k.float(), v=self.v.float()).plain()
        return ((ours.float() - exact).square().mean() / exact.square().mean()).sqrt().item()


def make_problem(
    sequences: Sequence[Part],
    heads: int,
    kv_heads: int,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    codec: str = "plain",
    device: str = "cuda",
    shuffled: bool = True,
) -> Problem:
    """Random inputs. The prefixes lie in pages of 128, the last one of each partly filled; ``codec``: plain, fp8_v or
    fp8."""
    num_pages = sum(-(-before // PAGE_ROWS) for _, before in sequences)
    pages = iter((torch.randperm(num_pages) if shuffled else torch.arange(num_pages)).tolist())
    groups: list[Group] = []
    stops: list[Ints] = []
    first = area = 0
    for layout, before in sequences:
        groups.append(Group(first, layout.num_rows - before, tuple(_extents(before, pages))))
        stop = np.concatenate([call.visible_stop() for call in layout.plan(before, layout.num_rows)])
        area += int(stop.sum(dtype=np.int64))
        stops.append(stop + (first - before))
        first += len(stop)

    def draw(num_rows: int, num_heads: int) -> Tensor:
        return torch.randn(num_rows, num_heads, head_dim, device=device, dtype=dtype)

    stored = None
    if num_pages:
        slots = num_pages * PAGE_ROWS
        stored = quantise(StoredKV(draw(slots, kv_heads), draw(slots, kv_heads)), codec)
    q, k, v = (draw(first, n) for n in (heads, kv_heads, kv_heads))
    return Problem(q, k, v, stored, groups, np.concatenate(stops).astype(np.int32), area)


def raise_peaks(problem: Problem) -> Problem:
    """Makes keys louder from row to row, up to 60 times: from one key tile to the next the largest score of a row rises
    by little or by much, as it never does where all keys are alike."""
    for k in (problem.k, *([problem.stored.k] if problem.stored else [])):
        k *= torch.linspace(0.1, 6, len(k), device=k.device)[:, None, None].to(k.dtype)
    return problem


def _extents(num_rows: int, pages: Iterator[int]) -> Iterator[Extent]:
    for row in range(0, num_rows, PAGE_ROWS):
        yield next(pages) * PAGE_ROWS, min(PAGE_ROWS, num_rows - row)


def quantise(stored: StoredKV, codec: str) -> StoredKV:
    """Plain K and V as a codec stores them."""
    if codec == "plain":
        return stored
    v, v_scale = _e4m3(stored.v)
    if codec == "fp8_v":
        return StoredKV(stored.k, v, None, v_scale)
    assert codec == "fp8", codec
    k, k_scale = _e4m3(stored.k)
    return StoredKV(k, v, k_scale, v_scale)


def _e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(dim=-1) / E4M3_MAX
    return (x.float() / scale[..., None]).to(torch.float8_e4m3fn).view(torch.uint8), scale


def owned_slots(problem: Problem) -> Tensor:
    """(rows,) int64 slot of every row of every prefix, one prefix after the other."""
    extents = [extent for group in problem.groups for extent in group.extents]
    return torch.cat([torch.arange(slot, slot + count) for slot, count in extents]).to(problem.q.device)


def in_tiles(problem: Problem) -> PackedTiles:
    """The prefixes in pages of tiles, as ``PackedTiles.write`` makes them."""
    assert problem.stored is not None
    owned = owned_slots(problem)
    k, v = (torch.zeros_like(x).index_copy_(0, owned, x[owned]) for x in (problem.stored.k, problem.stored.v))
    k, v = (x.unflatten(0, (-1, PAGE_ROWS)) for x in (k, v))
    pages = PackedTiles.empty(len(k), k.shape[2], k.shape[3], PAGE_ROWS, k.device)
    pages.write(torch.arange(len(k), device=k.device), k, v)
    return pages


def qwen(num_references: int, decode: bool, grid: Grid = QWEN_GRID, text: int = QWEN_TEXT) -> Part:
    """Text and references in turn, then the target: all of it in one pass, or the target behind its prefix."""
    texts = [text // (num_references + 1)] * (num_references + 1)
    parts: list[int | Grid] = [part for length in texts for part in (length, grid)]
    layout = Layout.of(parts)
    return layout, layout.images[-1].start if decode else 0


def text_decode(batch: int, before: int) -> list[Part]:
    return [(Layout.of([before + 1]), before)] * batch


@dataclass(frozen=True)
class Lengths:
    """New and cached rows of each sequence, and image spans in rows of the sequence."""

    rows: list[int]
    before: list[int]
    spans: list[list[tuple[int, int]]]

    def sequences(self) -> list[Part]:
        return [
            (_with_spans(old + new, spans), old)
            for new, old, spans in zip(self.rows, self.before, self.spans, strict=True)
        ]

    def with_large_images(self, seed: int = 1) -> "Lengths":
        """The same lengths with one to three images of 256 to 4096 tokens each, as many as fit into 90 %."""
        generator = torch.Generator().manual_seed(seed)

        def draw(low: int, high: int) -> int:
            return int(torch.randint(low, high, (1,), generator=generator))

        images = []
        for new, old in zip(self.rows, self.before, strict=True):
            row, wanted, spans = draw(4, 32), draw(1, 4), []
            for _ in range(wanted):
                length = min((256, 1024, 1024, 4096)[draw(0, 4)], int(new * 0.9) - row)
                if length < 64:
                    break
                spans.append((old + row, old + row + length))
                row += length + draw(8, 64)
            images.append(spans)
        return Lengths(self.rows, self.before, images)


def lightllm(batch: int, max_rows: int, max_before: int = 0) -> Lengths:
    """The lengths and spans of LightLLM's public attention benchmark: its generator's draws with seed 0."""
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int, count: int = 1) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    rows, before = draw(1, max_rows + 1, batch), draw(0, max_before + 1, batch)
    for count in (batch, sum(rows) + sum(before) + 4096):  # its slots are drawn here
        torch.randperm(count, generator=generator)
    images = []
    for new, old in zip(rows, before, strict=True):
        spans: list[tuple[int, int]] = []
        if new >= 2 and torch.rand((), generator=generator).item() <= 0.7:
            for _ in range(draw(1, 4)[0]):
                length = min(draw(1, 25)[0], new)
                start = old + draw(0, new - length + 1)[0]
                spans.append((start, start + length))
        images.append(spans)
    return Lengths(rows, before, images)


def _with_spans(num_rows: int, spans: list[tuple[int, int]]) -> Layout:
    parts: list[int | Grid] = []
    done = 0
    for start, stop in sorted(spans):
        if parts and start <= done and stop > done:  # spans that meet are one block
            last = parts.pop()
            assert not isinstance(last, int)
            parts.append((1, last[1] + stop - done))
        elif stop > done:
            parts += [start - done, (1, stop - start)]
        done = max(done, stop)
    return Layout.of([*parts, num_rows - done])
