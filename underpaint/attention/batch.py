"""What a pass attends to: groups of packed rows, each with its own prefix."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from underpaint.kernels.head_form import HeadForm
from underpaint.kernels.packed_tiles import Stored
from underpaint.kernels.tiles import Extent
from underpaint.layout import AttentionCall, Layout


class Prefix(Protocol):
    """Keys and values of the rows that come before a group's own."""

    @property
    def num_rows(self) -> int: ...

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer, (num_rows, heads, head_dim) each."""
        ...

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Where the rows lie in ``stored``, in order: for backends that read them in place."""
        ...

    def stored(self, layer: int) -> Stored:
        """The slots of one layer as they are stored, of all prefixes of the pool."""
        ...


@dataclass(frozen=True, eq=False)
class RowGroup:
    """Consecutive rows of one sequence that go through a pass together.

    They stand at [first, first + num_rows) of the pass, and right after ``prefix`` in their sequence: their keys are
    the prefix and then themselves. ``calls`` and ``visible_stop`` count in rows of the sequence, so a group's row r is
    its sequence's row ``prefix.num_rows`` + r.
    """

    first: int
    num_rows: int
    prefix: Prefix
    calls: tuple[AttentionCall, ...]
    visible_stop: Tensor  # (num_rows,) int32, on the rows' device

    @classmethod
    def of(cls, layout: Layout, stop: int, first: int, prefix: Prefix, device: str) -> "RowGroup":
        """The rows of ``layout`` from the end of ``prefix`` up to ``stop``, placed at ``first`` of the pass."""
        start = prefix.num_rows
        visible_stop = layout.visible_stop()[start:stop].to(device)
        return cls(first, stop - start, prefix, layout.plan(start, stop), visible_stop)

    @property
    def rows(self) -> slice:
        """Where the group stands in the pass."""
        return slice(self.first, self.first + self.num_rows)


class Backend(Protocol):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, groups: tuple[RowGroup, ...], layer: int) -> Tensor:
        """Attention of a whole pass in one layer.

        ``q``: (rows, heads, head_dim); ``k``, ``v``: (rows, kv_heads, head_dim), the rows' own, not yet in pages or
        not to be kept. The groups cover the rows without overlap. Scores are scaled by head_dim ** -0.5. Returns the
        shape and dtype of ``q``.
        """
        ...


@runtime_checkable
class ProductAttend(Protocol):
    """What a fused transformer asks for that has one form of heads for all rows."""

    def finish(self, layer: int, qkv: Tensor, kv_heads: int, form: HeadForm, rotary: Tensor) -> Tensor:
        """Attention of the whole pass in one layer, of a product (rows, heads + 2 x kv_heads, head_dim) that is yet to
        be finished and kept, see ``kv_pack``; it is used up. ``rotary``: (rows, head_dim / 2) complex64."""
        ...


AttendPass = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""Attention of a prepared pass in one layer: ``q``, ``k``, ``v``, ``layer`` as in ``Backend``."""

Prepare = Callable[[tuple[RowGroup, ...]], AttendPass]
"""Called once a pass, before its first layer: what a backend plans for these groups lives as long as the result."""


def each_layer(backend: Backend) -> Prepare:
    """For a backend that plans nothing."""

    def prepare(groups: tuple[RowGroup, ...]) -> AttendPass:
        return lambda q, k, v, layer: backend(q, k, v, groups, layer)

    return prepare
