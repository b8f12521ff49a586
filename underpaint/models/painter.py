"""What generation needs of a model family, and what it is handed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from underpaint.kv.tree import Unit
from underpaint.layout import Grid, Layout


class Condition(Protocol):
    """What understanding hands over for one branch: a prefix, and the units at its beginning that can be shared."""

    @property
    def layout(self) -> Layout: ...

    @property
    def units(self) -> tuple[Unit, ...]: ...


class Attend(Protocol):
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the whole pass in one layer, see ``attention.Backend``."""
        ...


@dataclass(frozen=True, eq=False)
class Target:
    """What the model paints on in one branch: ``state`` (tokens, channels) on ``grid`` at noise ``level`` (0-dim)."""

    state: Tensor
    grid: Grid
    level: Tensor


C_contra = TypeVar("C_contra", bound=Condition, contravariant=True)


class Painter(Protocol[C_contra]):
    """What generation needs of a model family, whose conditions are of type C."""

    def embed_prefix(self, condition: C_contra, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a prefix, (rows, hidden_size). The range never cuts an image."""
        ...

    def rotary(self, layout: Layout, start: int, stop: int) -> Tensor:
        """(rows, head_dim / 2) complex64 of rows [start, stop), on the model's device."""
        ...

    def run(self, prefix_rows: Tensor, targets: Sequence[Target], rotary: Tensor, attend: Attend) -> list[Tensor]:
        """One pass over ``prefix_rows`` (rows, hidden_size) and then the targets' rows; either may be missing.

        Returns the velocity of each target; keys and values of all rows go through ``attend``.
        """
        ...
