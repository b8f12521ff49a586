"""Attention of other projects on the passes that ours is measured on. Each peer gets inputs laid out as it likes.

A peer is a function of a pass that returns a call, or None where it cannot do the same work. Peers that only know a
causal mask, or none, see other keys than ours and are named so.
"""

import importlib.util
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from underpaint.attention.batch import RowGroup
from underpaint.kernels.hybrid_attention_problems import Part, Problem
from underpaint.kernels.tiles import Extent, StoredKV
from underpaint.layout import AttentionCall

Call = Callable[[], Tensor]


@dataclass(frozen=True, eq=False)
class Pass:
    """A problem, and the sequences that it was made of."""

    problem: Problem
    sequences: list[Part]
    make_in_order: Callable[[], Problem]

    @cached_property
    def in_order(self) -> Problem:
        """Such a problem with prefixes whose pages follow one another."""
        return self.make_in_order()

    @property
    def is_dense(self) -> bool:
        """Equally long sequences whose rows all see everything: steps, and text decode."""
        layout, before = self.sequences[0]
        calls = layout.plan(before, layout.num_rows)
        return len(set(self.sequences)) == 1 and [call.stop for call in calls] == [layout.num_rows]

    @property
    def num_keys(self) -> list[int]:
        return [layout.num_rows for layout, _ in self.sequences]

    @cached_property
    def keys(self) -> Tensor:
        """K of every sequence, prefix included, one after the other: (keys, kv_heads, head_dim)."""
        k = self.problem.k
        return torch.randn(sum(self.num_keys), *k.shape[1:], device=k.device, dtype=k.dtype)

    @cached_property
    def values(self) -> Tensor:
        """V in the same form; memory of its own, or kernels would read half as much."""
        return torch.randn_like(self.keys)

    def cumulative(self, lengths: list[int]) -> Tensor:
        return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=self.keys.device)

    @cached_property
    def num_rows(self) -> list[int]:
        return [layout.num_rows - before for layout, before in self.sequences]


def cudnn(given: Pass) -> Call | None:
    return _dense(given, SDPBackend.CUDNN_ATTENTION)


def flash(given: Pass) -> Call | None:
    """FlashAttention 2, as it is in PyTorch."""
    return _dense(given, SDPBackend.FLASH_ATTENTION)


def _dense(given: Pass, backend: SDPBackend) -> Call | None:
    if not given.is_dense:
        return None
    batch, heads = len(given.sequences), given.problem.q.shape[1]
    q, k, v = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in (given.problem.q, given.keys, given.values))

    def call() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=k.shape[1] != heads)

    return call


def fa3_causal(given: Pass) -> Call | None:
    """The FlashAttention 3 wheel on contiguous keys with a causal mask: without the images, so less work than ours."""
    return None if given.is_dense else _fa3(given, causal=True)


def fa3_dense(given: Pass) -> Call | None:
    return _fa3(given, causal=False) if given.is_dense else None


def fa3_hybrid(given: Pass) -> Call:
    """The wheel on our mask: text and images in a call each. Prefixes are read from pages and copied first."""
    from underpaint.attention.fa3 import prepare

    problem = given.problem
    groups, done = [], 0
    for (layout, before), group in zip(given.sequences, problem.groups, strict=True):
        prefix = _Stored(problem, group.extents, before)
        groups.append(RowGroup.of(layout, layout.num_rows, done, prefix, str(problem.q.device)))
        done += group.num_rows
    attend = prepare(tuple(groups))
    return lambda: attend(problem.q, problem.k, problem.v, 0)


@dataclass(frozen=True, eq=False)
class _Stored:
    """The prefix of one group of a problem."""

    problem: Problem
    extents: tuple[Extent, ...]
    num_rows: int

    @cached_property
    def _slots(self) -> Tensor:
        return torch.cat([torch.arange(slot, slot + count) for slot, count in self.extents]).to(self.problem.q.device)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        stored = self.problem.stored
        if stored is None or not self.num_rows:
            return self.problem.k[:0], self.problem.v[:0]
        return stored.k[self._slots], stored.v[self._slots]

    def stored(self, layer: int) -> StoredKV:
        assert self.problem.stored is not None
        return self.problem.stored


def _fa3(given: Pass, causal: bool) -> Call:
    from underpaint.attention.fa3 import fa3_forward

    q, out = given.problem.q, torch.empty_like(given.problem.q)
    cu_rows, cu_keys = given.cumulative(given.num_rows), given.cumulative(given.num_keys)
    longest = max(given.num_rows), max(given.num_keys)
    return lambda: fa3_forward(q, given.keys, given.values, out, cu_rows, cu_keys, None, None, *longest, causal=causal)


def flex(given: Pass) -> Call:
    """PyTorch's FlexAttention with blocks of 128, compiled for this shape: the same mask over keys in one place."""
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (x.transpose(0, 1)[None] for x in (given.problem.q, given.keys, given.values))
    mask = _block_mask(given)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


def _block_mask(given: Pass, block: int = 128) -> Any:
    """Row ``r`` sees the keys [first[r], stop[r]) of all sequences' keys; worked out per block, never per pair."""
    from torch.nn.attention.flex_attention import BlockMask

    key_start = torch.tensor([0, *given.num_keys]).cumsum(0)[:-1]
    visible = torch.cat([layout.visible_stop()[before:] for layout, before in given.sequences])
    first = key_start.repeat_interleave(torch.tensor(given.num_rows)).to(given.keys.device)
    stop = first + visible.to(first.device)
    num_rows, num_keys = len(first), sum(given.num_keys)
    pad = -num_rows % block
    firsts, stops = (torch.cat([x, x[-1:].expand(pad)]).view(-1, block) for x in (first, stop))
    key = torch.arange(0, num_keys, block, device=first.device)
    met = (key + block > firsts.amin(1, keepdim=True)) & (key < stops.amax(1, keepdim=True))
    full = (key >= firsts.amax(1, keepdim=True)) & (key + block <= stops.amin(1, keepdim=True))

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        order = blocks.to(torch.int8).argsort(dim=1, descending=True, stable=True)
        return blocks.sum(1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]

    def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key >= first[row]) & (key < stop[row])

    return BlockMask.from_kv_blocks(
        *listed(met & ~full), *listed(full), BLOCK_SIZE=block, mask_mod=sees, seq_lengths=(num_rows, num_keys)
    )


def lightllm(path: Path) -> Callable[[Pass], Call | None]:
    """LightLLM's Triton kernel for the same mask, from its file ``context_attention_fwd_neo.py``. Its page size is 1:
    keys lie in slots in random order."""
    for name in ("lightllm", "lightllm.utils", "lightllm.utils.device_utils"):
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules["lightllm.utils.device_utils"].is_tesla = lambda: False  # type: ignore[attr-defined]
    spec = importlib.util.spec_from_file_location("lightllm_neo", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return partial(_lightllm, module.context_attention_fwd_neo)


def _lightllm(kernel: Callable[..., Any], given: Pass) -> Call | None:
    problem, device = given.problem, given.problem.q.device
    ints = partial(torch.tensor, dtype=torch.int32, device=device)
    slots = torch.randperm(sum(given.num_keys), device=device).to(torch.int32)
    table = torch.zeros(len(given.sequences), max(given.num_keys), dtype=torch.int32, device=device)
    for i, part in enumerate(slots.split(given.num_keys)):
        table[i, : len(part)] = part
    ends = torch.cat([_image_ends(layout.plan(before, layout.num_rows)) for layout, before in given.sequences]).to(
        device
    )
    before = [keys - rows for keys, rows in zip(given.num_keys, given.num_rows, strict=True)]
    starts = given.cumulative(given.num_rows)[:-1].contiguous()
    requests, lengths, cached = ints(range(len(before))), ints(given.num_keys), ints(before)
    out = torch.empty_like(problem.q)

    def call() -> Tensor:
        k, v, longest = given.keys, given.values, max(given.num_rows)
        kernel(problem.q, k, v, out, requests, starts, lengths, cached, longest, table, ends)
        return out

    return call


def _image_ends(calls: tuple[AttentionCall, ...]) -> Tensor:
    """(rows,) where a row's image ends, 0 for text."""
    return torch.cat([torch.full((c.stop - c.start,), 0 if c.causal else c.stop, dtype=torch.int32) for c in calls])
