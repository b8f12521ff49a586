"""Rotary embedding looked up instead of computed for every pass: the same numbers, made on the CPU, because devices
round sine differently."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

FIRST_SIZE = 1024

MakeTable = Callable[[Tensor], Tensor]
"""(rows, axes) integer positions -> (rows, pairs) complex64 rotations, on the CPU; the pairs of an axis together."""


class Rotations:
    """A table of the rotations of every axis at positions -N to N - 1, on the CPU and on ``device``. N doubles when a
    position is beyond."""

    def __init__(self, make_table: MakeTable, pairs: Sequence[int], device: str) -> None:
        """``pairs``: of channels, of each axis."""
        self._make_table = make_table
        self._pairs = list(pairs)
        self._device = device
        self._grow(FIRST_SIZE)

    def rows(self, positions: Tensor) -> Tensor:
        """(rows, axes) positions on the CPU -> (rows, pairs of all axes) complex64 on the device."""
        if len(positions):
            self._reach(int(positions.max()), int(positions.min()))
        there = positions.to(self._device) + self._size
        return torch.cat([part[there[:, axis]] for axis, part in enumerate(self._on_device)], dim=-1)

    def _reach(self, *positions: int) -> None:
        farthest = max(position if position >= 0 else -position - 1 for position in positions)
        if farthest >= self._size:
            self._grow(1 << farthest.bit_length())

    def _grow(self, size: int) -> None:
        every = torch.arange(-size, size)[:, None].expand(-1, len(self._pairs))
        self._size = size
        self._on_host = self._make_table(every).split(self._pairs, dim=-1)
        self._on_device = tuple(part.to(self._device) for part in self._on_host)
