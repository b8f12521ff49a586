"""How NEO-Unify goes from noise to pixels: scales, times, and the heads that embed them and predict pixels.

Time t runs from 0 (noise) to 1 (picture). The state is the picture itself, in cells of pixels in about [-1, 1].
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from underpaint.errors import BadParameter
from underpaint.layout import Grid
from underpaint.models.neo_unify.config import CELL, CELL_VALUES, FlowConfig
from underpaint.models.neo_unify.vision import to_cells
from underpaint.sampling.guidance import Branch, Guidance, Velocities

TIMESTEP_CHANNELS = 256
MAX_PERIOD = 10000.0
CONV_CHANNELS = 1024
DEFAULT_TIMESTEP_SHIFT = 3.0
LATEST_START = 0.01
"""Where a first step may be because of rounding; a ``timestep_shift`` of 0.1 begins at 2e-7."""
MIN_REMAINING_TIME = 0.02
"""Floor of 1 - t in the velocity. The config's t_eps is training's; the reference replaces it by this value."""


def noise_scale(config: FlowConfig, grid: Grid) -> float:
    """Standard deviation of the noise that a picture starts from: grows with the side of the picture, up to a cap."""
    cells = grid[0] * grid[1]
    scale = math.sqrt(cells / config.noise_scale_base_image_seq_len) * config.noise_scale
    return min(scale, config.noise_scale_max_value)


def flow_times(num_steps: int, shift: float) -> Tensor:
    """(num_steps + 1,) fp32 times from 0 to 1. A ``shift`` above 1 spends more steps near the noise.

    Raises BadParameter where fp32 cannot tell the times apart, or the first of them from 0.
    """
    sigma = 1 - torch.linspace(0.0, 1.0, num_steps + 1)
    times = 1 - shift * sigma / (1 + (shift - 1) * sigma)
    if not (times.diff() > 0).all() or not times[0].abs() < LATEST_START:
        message = f"timestep_shift {shift} is too far from 1 to have {num_steps} steps between noise and picture"
        raise BadParameter(message, param="timestep_shift")
    return times


def draw_noise(generator: torch.Generator, grid: Grid, scale: float, dtype: torch.dtype) -> Tensor:
    """(cells, 3072) of Gaussian noise. Drawn as pixels in ``dtype`` from a CPU generator, so that neither device nor
    batch change it; an answer with several pictures draws them all from one generator."""
    pixels = torch.randn((1, 3, grid[0] * CELL, grid[1] * CELL), generator=generator, dtype=dtype)
    return to_cells(scale * pixels[0])


def velocity(pixels: Tensor, state: Tensor, times: Tensor) -> Tensor:
    """The direction from ``state`` to the predicted ``pixels``, (cells, 3072) each; ``times`` (cells, 1) or (1, 1)."""
    remaining = (1 - times).clamp_min(MIN_REMAINING_TIME).to(state.dtype)
    return (pixels.to(state.dtype) - state) / remaining


def flow_step(state: Tensor, direction: Tensor, time: Tensor, next_time: Tensor) -> Tensor:
    """One Euler step. The 0-dim fp32 times do not change the dtype of the state."""
    return state + (next_time - time) * direction


@dataclass(frozen=True, eq=False)
class FlowSampler:
    """The course of one picture: ``times`` (num_steps + 1,) fp32 from 0 to 1, guidance, and Euler's step."""

    times: Tensor
    guidance: Guidance

    @property
    def num_steps(self) -> int:
        return len(self.times) - 1

    @property
    def every_branch(self) -> tuple[Branch, ...]:
        """The branches that some step needs: those to prefill, and no others."""
        needed = {branch for step in range(self.num_steps) for branch in self.branches(step)}
        return tuple(branch for branch in Branch if branch in needed)

    def branches(self, step: int) -> tuple[Branch, ...]:
        return self.guidance.branches(float(self.times[step]))

    def level(self, step: int) -> Tensor:
        """What the model reads: t, 0-dim fp32."""
        return self.times[step]

    def advance(self, state: Tensor, velocities: Velocities, step: int) -> Tensor:
        """(cells, 3072) after ``step``. Raises MissingBranch."""
        direction = self.guidance.combine(velocities, float(self.times[step]), step)
        return flow_step(state, direction, self.times[step], self.times[step + 1])


class NumberEmbedding(nn.Module):
    """Sinusoids of a number (cosines first), then two linear layers."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(TIMESTEP_CHANNELS, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size)
        )

    def forward(self, numbers: Tensor) -> Tensor:
        """(numbers,) fp32 -> (numbers, hidden_size) in the weights' dtype."""
        half = TIMESTEP_CHANNELS // 2
        exponent = torch.arange(half, dtype=torch.float32, device=numbers.device) / half
        angle = numbers.float()[:, None] * torch.exp(-math.log(MAX_PERIOD) * exponent)
        return self.mlp(torch.cat([angle.cos(), angle.sin()], dim=-1).to(next(self.parameters()).dtype))


class MlpHead(nn.ModuleDict):
    """The head of U1: each hidden row becomes the pixels of its cell. Named as the sequence it is in the checkpoint."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__({"0": nn.Linear(hidden_size, width), "2": nn.Linear(width, CELL_VALUES)})

    def forward(self, rows: Tensor, grids: tuple[Grid, ...]) -> Tensor:
        """(cells, hidden_size) -> (cells, 3072), whatever the ``grids``."""
        return self["2"](F.gelu(self["0"](rows)))


class ConvHead(nn.Module):
    """The head of U1.5: the hidden rows of a picture are an image that is unfolded to 32 times its size through two
    convolutions, so that cells join without seams. It needs all rows of a picture together."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(hidden_size // 4, CONV_CHANNELS, 3, padding=1)
        self.conv2 = nn.Conv2d(CONV_CHANNELS // 4, 3 * 8 * 8, 3, padding=1)

    def forward(self, rows: Tensor, grids: tuple[Grid, ...]) -> Tensor:
        """(cells, hidden_size) of the pictures on ``grids``, one after another -> (cells, 3072)."""
        pictures = rows.split([height * width for height, width in grids])
        return torch.cat([self._one(picture, grid) for picture, grid in zip(pictures, grids, strict=True)])

    def _one(self, rows: Tensor, grid: Grid) -> Tensor:
        image = rows.T.reshape(1, -1, *grid)
        image = F.gelu(self.conv1(F.pixel_shuffle(image, 2)))
        return to_cells(F.pixel_shuffle(self.conv2(F.pixel_shuffle(image, 2)), 8)[0])
