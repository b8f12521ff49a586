"""Attention that a graph can hold: captured for a number of rows and groups, and turned to other groups later."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from underpaint.attention import AttendPass, Prepare, RowGroup
from underpaint.kernels.tiles import OutOfRoom, Room, prefix_units


@dataclass(frozen=True, order=True)
class PassKey:
    """What a graph is captured for: rows, and the groups they are in. ``prefix_units``: how much its attention has room
    for, in all prefixes together, 0 where it needs none; a coarse class, not a length."""

    num_rows: int
    num_groups: int
    prefix_units: int = 0


class Refillable(Protocol):
    """An ``AttendPass`` that can be turned to other groups."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor: ...

    def refill(self, groups: tuple[RowGroup, ...]) -> None:
        """Raises OutOfRoom, and then still attends to those before."""
        ...


class GraphAttention(Protocol):
    """How a kind of attention serves graphs."""

    def prefix_units(self, groups: tuple[RowGroup, ...]) -> int:
        """See ``PassKey``. Raises OutOfRoom where no graph can serve."""
        ...

    def prepare(self, groups: tuple[RowGroup, ...], key: PassKey) -> Refillable: ...


class Replanned:
    """For attention that plans anew for whatever groups it is turned to: no graph can be captured with it, so it serves
    on a CPU."""

    def __init__(self, prepare: Prepare) -> None:
        self._prepare = prepare

    def prefix_units(self, groups: tuple[RowGroup, ...]) -> int:
        return 0

    def prepare(self, groups: tuple[RowGroup, ...], key: PassKey) -> Refillable:
        return _Replanned(self._prepare, groups)


class _Replanned:
    def __init__(self, prepare: Prepare, groups: tuple[RowGroup, ...]) -> None:
        self._prepare = prepare
        self._attend: AttendPass = prepare(groups)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        return self._attend(q, k, v, layer)

    def refill(self, groups: tuple[RowGroup, ...]) -> None:
        self._attend = self._prepare(groups)


class Planned:
    """For attention whose plan lies in buffers, see ``attention.planned``."""

    FEWEST_UNITS, MOST_UNITS = 256, 16384

    def __init__(self, prepare: Callable[[tuple[RowGroup, ...], Room], Refillable]) -> None:
        self._prepare = prepare

    def prefix_units(self, groups: tuple[RowGroup, ...]) -> int:
        """A power of four: with quantised prefixes room costs memory. Prefixes that groups share count once."""
        shared = dict.fromkeys(group.prefix.extents for group in groups)
        needed, units = sum(map(prefix_units, shared)), self.FEWEST_UNITS
        while units < needed:
            units *= 4
        if units > self.MOST_UNITS:
            raise OutOfRoom(f"prefixes of {needed} units are more than a graph serves")
        return units

    def prepare(self, groups: tuple[RowGroup, ...], key: PassKey) -> Refillable:
        return self._prepare(groups, Room(key.num_rows, key.num_groups, key.prefix_units))
