"""What generation needs of a model family, and what it is handed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from underpaint.config import EngineConfig
from underpaint.kernels.kept import Kept
from underpaint.kv.tree import Unit
from underpaint.layout import Grid, Layout


class Condition(Protocol):
    """What understanding hands over for one branch: a prefix, and the units at its beginning that can be shared."""

    @property
    def layout(self) -> Layout: ...

    @property
    def units(self) -> tuple[Unit, ...]: ...


def rows_bytes(num_rows: int, hidden_size: int, inner_size: int, config: EngineConfig) -> int:
    """What a pass over so many rows takes beside weights and pages, at its peak, which is in a feed-forward layer: the
    rows, their norm, what attention added and will be added, and gate, what it gates, and both multiplied.

    Where steps are captured, graphs have as much again for themselves.
    """
    captured = config.device.startswith("cuda") and config.step_graphs != "off" and "dit" not in config.offloaded
    of_a_row = 4 * hidden_size + 4 * inner_size
    return num_rows * of_a_row * config.torch_dtype.itemsize * (2 if captured else 1)


class Attend(Protocol):
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the whole pass in one layer, see ``attention.Backend``."""
        ...


@runtime_checkable
class PackedAttend(Protocol):
    """What a fused transformer asks for instead: it writes keys and values where they are kept itself."""

    def kept(self, layer: int) -> Kept | None:
        """Where the first rows of the pass go in one layer."""
        ...

    def packed(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the whole pass in one layer; rows of ``q``, ``k`` and ``v`` may be apart."""
        ...


@dataclass(frozen=True, eq=False)
class Target:
    """What the model paints on in one branch: ``state`` (tokens, channels) on ``grid`` at noise ``level`` (0-dim)."""

    state: Tensor
    grid: Grid
    level: Tensor


@dataclass(frozen=True, eq=False)
class Targets:
    """The targets of a pass, one after another, on the model's device. All that differs between steps, requests and
    prefixes is a tensor, so a pass over as many rows and targets can be captured once and replayed.

    ``state``: (rows, channels). ``target``: (rows,) int64, the number of the target that a row belongs to. ``cells``:
    (rows, 2) int64, see ``cell_places``. ``levels``: (targets, 2) fp32, the noise level, and what ``grid_level`` says.
    ``grids``: one a target, for what happens after the last layer.
    """

    state: Tensor
    target: Tensor
    cells: Tensor
    levels: Tensor
    grids: tuple[Grid, ...]

    @classmethod
    def of(
        cls, targets: Sequence[Target], cells: Sequence[Tensor], grid_levels: Sequence[float], device: str
    ) -> "Targets":
        """``cells`` and ``grid_levels``: of each target's grid. Nothing here waits for the device."""
        grids = tuple(target.grid for target in targets)
        return cls(
            torch.cat([target.state for target in targets]),
            target_numbers(grids).to(device, non_blocking=True),
            torch.cat(list(cells)),
            pack_levels(targets, grid_levels).to(device, non_blocking=True),
            grids,
        )

    @property
    def sizes(self) -> list[int]:
        """Rows of each target."""
        return [height * width for height, width in self.grids]

    def per_row(self, values: Tensor) -> Tensor:
        """(targets, ...) -> (rows, ...): every row has its target's value."""
        return values[self.target]


def target_numbers(grids: Sequence[Grid]) -> Tensor:
    """(rows,) int64 on the CPU: the number of the target that a row belongs to."""
    sizes = torch.tensor([height * width for height, width in grids])
    return torch.arange(len(grids)).repeat_interleave(sizes)


def pack_levels(targets: Sequence[Target], grid_levels: Sequence[float]) -> Tensor:
    """(targets, 2) fp32 on the CPU, see ``Targets``."""
    noise = torch.stack([target.level for target in targets])
    return torch.stack([noise, torch.tensor(grid_levels)], dim=1)


def cell_places(grid: Grid) -> Tensor:
    """(cells, 2) int64: row and column of every cell of a grid."""
    return torch.cartesian_prod(torch.arange(grid[0]), torch.arange(grid[1])).reshape(-1, 2)


C_contra = TypeVar("C_contra", bound=Condition, contravariant=True)


class Painter(Protocol[C_contra]):
    """What generation needs of a model family, whose conditions are of type C."""

    @property
    def num_channels(self) -> int:
        """Of a target's state."""
        ...

    @property
    def num_hidden(self) -> int:
        """Channels of a row on its way through the blocks."""
        ...

    @property
    def capturable(self) -> bool:
        """Whether a pass reads nothing from the device, so that a CUDA graph can hold it."""
        ...

    def embed_prefix(self, condition: C_contra, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a prefix, (rows, hidden_size). The range never cuts an image."""
        ...

    def rotary(self, layout: Layout, start: int, stop: int) -> Tensor:
        """(rows, head_dim / 2) complex64 of rows [start, stop), on the model's device."""
        ...

    def grid_level(self, grid: Grid) -> float:
        """What the model reads of a target's size; 0 where it reads nothing."""
        ...

    def prefill(self, prefix_rows: Tensor, rotary: Tensor, attend: Attend) -> None:
        """A pass over rows of prefixes alone, (rows, hidden_size); keys and values go through ``attend``."""
        ...

    def paint(self, prefix_rows: Tensor, targets: Targets, rotary: Tensor, attend: Attend) -> Tensor:
        """A pass over rows of prefixes, of which there may be none, and then the targets' rows: what ``predict`` needs
        of each of the latter, (rows, any)."""
        ...

    def predict(self, hidden: Tensor, targets: Targets) -> Tensor:
        """(rows, channels) velocities from what ``paint`` returned for ``targets``."""
        ...


def run_pass(
    painter: Painter[C_contra],
    prefix_rows: Tensor,
    targets: Sequence[Target],
    rotary: Tensor,
    attend: Attend,
    device: str,
) -> list[Tensor]:
    """One pass over ``prefix_rows`` (rows, hidden_size) and then the targets' rows; either may be missing. Returns the
    velocity of each target."""
    if not targets:
        painter.prefill(prefix_rows, rotary, attend)
        return []
    cells = [cell_places(target.grid).to(device) for target in targets]
    packed = Targets.of(targets, cells, [painter.grid_level(target.grid) for target in targets], device)
    hidden = painter.paint(prefix_rows, packed, rotary, attend)
    return list(painter.predict(hidden, packed).split(packed.sizes))
