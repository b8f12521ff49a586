"""Pictures as rows: between pixels and *cells*, and from cells to embeddings.

A cell is the square of 32 x 32 pixels that is one token of an image; its 3072 values are in (row, column, channel)
order. A picture is (cells, 3072), row-major over its grid, whether it is read or painted, so its rows pack like any
others. There is no vision tower: two convolutions without overlap, which are products of a cell with a matrix.
"""

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from underpaint.images import on_white
from underpaint.layout import Grid
from underpaint.models.neo_unify.config import CELL, CELL_VALUES, PATCH, VisionConfig

MERGE = CELL // PATCH
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class PixelBounds:
    """The number of pixels that a picture may have when it is read; it is resized to within."""

    least: int
    most: int


def reference_bounds(num_pictures: int) -> PixelBounds:
    """What a reference of an edit or of an interleaved answer is resized to; many share a budget of 4096 x 4096."""
    return PixelBounds(512 * 512, min(2048 * 2048, 4096 * 4096 // max(num_pictures, 1)))


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture as understanding reads it. ``cells``: (cells, 3072) with ImageNet's mean and deviation taken out, in
    fp32 or as it was painted. ``content`` identifies the pixels and the size."""

    grid: Grid
    cells: Tensor
    content: bytes


def smart_resize(width: int, height: int, bounds: PixelBounds) -> tuple[int, int]:
    """Width and height in multiples of a cell, within ``bounds``, as near to the ratio as they allow.

    The rule of Qwen2-VL's processor: round each side; if that leaves the bounds, scale first, and round so as to stay
    within. A side is at least one cell, however long the other one is.
    """
    rounded = tuple(max(CELL, round(side / CELL) * CELL) for side in (width, height))
    area = rounded[0] * rounded[1]
    if area > bounds.most:
        scale = math.sqrt(width * height / bounds.most)
        rounded = tuple(max(CELL, math.floor(side / scale / CELL) * CELL) for side in (width, height))
    elif area < bounds.least:
        scale = math.sqrt(bounds.least / (width * height))
        rounded = tuple(math.ceil(side * scale / CELL) * CELL for side in (width, height))
    return rounded[0], rounded[1]


def read_picture(image: Image.Image, bounds: PixelBounds) -> Picture:
    """An upright RGBA picture, over white, resized to within ``bounds``."""
    rgb = on_white(image.convert("RGBA"))
    rgb = rgb.resize(smart_resize(*rgb.size, bounds), Image.Resampling.BICUBIC)
    content = hashlib.sha256(repr(rgb.size).encode() + rgb.tobytes()).digest()
    pixels = torch.from_numpy(np.asarray(rgb, dtype=np.float32) / 255.0).permute(2, 0, 1)
    return Picture((rgb.height // CELL, rgb.width // CELL), normalise(to_cells(pixels)), content)


def painted_picture(cells: Tensor, grid: Grid) -> Picture:
    """A finished painting, (cells, 3072) in about [-1, 1], as a picture to read back: from the tensor, unclamped and
    unrounded, as the reference implementation reads it."""
    content = hashlib.sha256(repr(grid).encode() + cells.float().cpu().numpy().tobytes()).digest()
    return Picture(grid, normalise(cells * 0.5 + 0.5), content)


def normalise(cells: Tensor) -> Tensor:
    """Cells with values in [0, 1] -> ImageNet's mean and standard deviation taken out, channel by channel."""
    mean, std = (torch.tensor(x, dtype=cells.dtype, device=cells.device) for x in (IMAGENET_MEAN, IMAGENET_STD))
    return ((cells.unflatten(-1, (-1, 3)) - mean) / std).flatten(-2)


def to_cells(pixels: Tensor) -> Tensor:
    """(3, height, width) -> (cells, 3072)."""
    channels, height, width = pixels.shape
    cells = pixels.reshape(channels, height // CELL, CELL, width // CELL, CELL)
    return cells.permute(1, 3, 2, 4, 0).reshape(-1, CELL_VALUES)


def to_pixels(cells: Tensor, grid: Grid) -> Tensor:
    """(cells, 3072) -> (3, height, width)."""
    pixels = cells.reshape(*grid, CELL, CELL, 3).permute(4, 0, 2, 1, 3)
    return pixels.reshape(3, grid[0] * CELL, grid[1] * CELL)


def to_patches(cells: Tensor) -> Tensor:
    """(cells, 3072) -> (cells, 4, 768): the patches of each cell, row-major, each channel by channel."""
    patches = cells.reshape(-1, MERGE, PATCH, MERGE, PATCH, 3).permute(0, 1, 3, 5, 2, 4)
    return patches.reshape(-1, MERGE * MERGE, PATCH * PATCH * 3)


class CellEmbedding(nn.Module):
    """Cells -> rows of the transformer: embed patches, turn them by where they are, merge 2 x 2 of them.

    Understanding and generation have one each. The convolutions of the checkpoint have stride equal to their size, so
    they are applied as matrices, and cells of many pictures go together.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.theta = config.rope_theta_vision
        self.embeddings = nn.ModuleDict(
            {
                "patch_embedding": nn.Conv2d(3, config.hidden_size, PATCH, PATCH),
                "dense_embedding": nn.Conv2d(config.hidden_size, config.llm_hidden_size, MERGE, MERGE),
            }
        )

    def forward(self, cells: Tensor, places: Tensor) -> Tensor:
        """``cells``: (cells, 3072), ``places``: (cells, 2), see ``painter.cell_places`` -> (cells, llm_hidden_size)."""
        patches = F.gelu(_multiply(self.embeddings["patch_embedding"], to_patches(cells)))
        patches = self._turn(patches, places)
        return _multiply(self.embeddings["dense_embedding"], patches.transpose(1, 2).flatten(1))

    def _turn(self, patches: Tensor, places: Tensor) -> Tensor:
        """Rotate adjacent pairs of (cells, 4, channels) in fp32: the first half of the channels by the patch's
        column, the second by its row."""
        dim = patches.shape[-1] // 2
        number = torch.arange(MERGE * MERGE, device=places.device)
        inner = torch.stack([number // MERGE, number % MERGE], dim=-1)
        at = (places[:, None] * MERGE + inner).flip(-1).to(torch.float32)  # (cells, 4, 2): column, row
        exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=places.device) / dim
        angle = (at[..., None] / torch.pow(self.theta, exponent)).flatten(-2)
        pairs = torch.view_as_complex(patches.float().unflatten(-1, (-1, 2)))
        turned = pairs * torch.polar(torch.ones_like(angle), angle)
        return torch.view_as_real(turned).flatten(-2).type_as(patches)


def _multiply(convolution: nn.Module, x: Tensor) -> Tensor:
    """A convolution without overlap on inputs that are already cut and flattened, (..., in * size * size)."""
    assert isinstance(convolution, nn.Conv2d)
    return F.linear(x, convolution.weight.flatten(1), convolution.bias)
