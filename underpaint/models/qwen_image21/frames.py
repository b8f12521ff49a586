"""The blocks of the VAE on one picture: the weights of diffusers' modules, run on (1, channels, height, width).

The modules carry a dimension for time, which a picture does not have: it costs a change of layout before and after
every convolution, and most of the time on a GPU. Here layouts stay what they are, channels last where kernels are
fused, and whatever is added to a convolution's output is added in one pass: see ``kernels/pixel_rows.py``.

In time a picture is the first frame: shortcuts that fold frames into channels find zeros before it, and those that
unfold them give the last one.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

log = logging.getLogger(__name__)

LEAST_OUTPUTS = 8
"""Channels that tensor cores need; cuDNN did without them for the four of a picture: 4.3 of 41 ms of a decode of
1024 x 1024 on an H200."""


@dataclass(frozen=True)
class Pointwise:
    """What happens between convolutions; shapes as in ``kernels/pixel_rows.py``."""

    norm_silu: Callable[[Tensor, Tensor | None, Tensor], Tensor]
    add_residual: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    memory_format: torch.memory_format
    fused: bool


def norm_silu(x: Tensor, bias: Tensor | None, gamma: Tensor) -> Tensor:
    """SiLU of (x + bias), normalised over its channels, times ``gamma``; in fp32, rounded once."""
    normal = normalise(x.float() if bias is None else x.float() + bias[:, None, None], gamma)
    return F.silu(normal, inplace=True).to(x.dtype)


def normalise(x: Tensor, gamma: Tensor) -> Tensor:
    return F.normalize(x, dim=1).mul_(x.shape[1] ** 0.5).mul_(gamma[:, None, None])


def add_residual(x: Tensor, bias: Tensor, residual: Tensor, out: Tensor) -> None:
    """x + bias + residual in fp32, written to ``out``, which may be ``x``."""
    out.copy_(x.float() + bias[:, None, None] + residual)


PLAIN = Pointwise(norm_silu, add_residual, torch.contiguous_format, fused=False)


def choose_pointwise(device: str) -> Pointwise:
    """Fused on a GPU that has Triton. On a CPU other layouts would only sum in another order than the reference."""
    if not device.startswith("cuda"):
        return PLAIN
    if not can_fuse(device):
        log.warning("vae: plain, since the fused kernels need the package triton, which is not installed")
        return replace(PLAIN, memory_format=torch.channels_last)
    from underpaint.kernels import pixel_rows

    return Pointwise(pixel_rows.norm_silu, pixel_rows.add_residual, torch.channels_last, fused=True)


def can_fuse(device: str) -> bool:
    return device.startswith("cuda") and find_spec("triton") is not None


class Frames:
    """Runs diffusers' modules, of residual VAEs whose ``dim_mult`` does not fall, on single frames."""

    def __init__(self, pointwise: Pointwise) -> None:
        self._pointwise = pointwise
        self.memory_format, self.fused = pointwise.memory_format, pointwise.fused

    def down(self, block: Any, x: Tensor) -> Tensor:
        """A QwenImage21ResidualDownBlock."""
        source = x
        for residual in block.resnets:
            x = self._residual(residual, x)
        if block.downsampler is not None:
            x = block.downsampler.resample(x)
        return _add_average(block.avg_shortcut, source, x)

    def middle(self, block: Any, x: Tensor) -> Tensor:
        """A QwenImage21MidBlock."""
        x = self._residual(block.resnets[0], x)
        for attention, residual in zip(block.attentions, block.resnets[1:], strict=True):
            x = self._residual(residual, self._attend(attention, x))
        return x

    def up(self, block: Any, x: Tensor) -> Tensor:
        """A QwenImage21ResidualUpBlock."""
        source = x
        for residual in block.resnets:
            x = self._residual(residual, x)
        if block.upsampler is None:
            return x
        return self._double(block.upsampler.resample[1], x, block.avg_shortcut, source)

    def last(self, norm: Any, conv: Any, x: Tensor) -> Tensor:
        """The end of the encoder and of the decoder."""
        return convolve(conv, self._pointwise.norm_silu(x, None, norm.gamma.flatten()))

    def _residual(self, block: Any, x: Tensor) -> Tensor:
        """A QwenImage21ResidualBlock."""
        y = self._pointwise.norm_silu(x, None, block.norm1.gamma.flatten())
        y = F.conv2d(y, block.conv1.weight, padding=1)
        y = self._pointwise.norm_silu(y, block.conv1.bias, block.norm2.gamma.flatten())
        y = F.conv2d(y, block.conv2.weight, padding=1)
        shortcut, bias = x, block.conv2.bias
        if not isinstance(block.conv_shortcut, nn.Identity):
            shortcut, bias = F.conv2d(x, block.conv_shortcut.weight), bias.float() + block.conv_shortcut.bias
        self._pointwise.add_residual(y, bias, shortcut, y)
        return y

    def _attend(self, block: Any, x: Tensor) -> Tensor:
        """A QwenImage21AttentionBlock: one head, all pixels attend to all."""
        qkv = convolve(block.to_qkv, normalise(x.float(), block.norm.gamma.flatten()).to(x.dtype))
        q, k, v = qkv.flatten(2).transpose(1, 2)[:, None].contiguous().chunk(3, dim=-1)
        attended = F.scaled_dot_product_attention(q, k, v)[:, 0].transpose(1, 2).unflatten(2, x.shape[2:])
        return convolve(block.proj, attended.contiguous(memory_format=self.memory_format)).add_(x)

    def _double(self, conv: Any, x: Tensor, shortcut: Any, source: Tensor) -> Tensor:
        """Twice the height and width: a 3 x 3 convolution of ``x`` with every pixel repeated, and the shortcut.

        Of the pixels that such a convolution looks at, only 2 x 2 differ, and which ones depends on whether a row and a
        column are even. So it is four 2 x 2 convolutions of ``x`` itself, in 16 products a pixel of it instead of 36.
        """
        height, width = x.shape[2:]
        shape = (1, conv.out_channels, 2 * height, 2 * width)
        out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=self.memory_format)
        folded = _fold(_fold(conv.weight.float(), 2), 3).to(x.dtype)
        for i, j in product(range(2), range(2)):
            weight = folded[:, :, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2]
            part = F.conv2d(x, weight, padding=1)[:, :, i : i + height, j : j + width]
            unfolded = _unfold(shortcut, source, 2 * i + j)
            self._pointwise.add_residual(part, conv.bias, unfolded, out[:, :, i::2, j::2])
        return out


def convolve(conv: Any, x: Tensor) -> Tensor:
    """A convolution that keeps the size: 3 x 3 or 1 x 1."""
    weight, bias = conv.weight, conv.bias
    if conv.out_channels < LEAST_OUTPUTS:
        missing = LEAST_OUTPUTS - conv.out_channels
        weight, bias = F.pad(weight, (0, 0, 0, 0, 0, 0, 0, missing)), F.pad(bias, (0, missing))
    return F.conv2d(x, weight, bias, padding=conv.kernel_size[0] // 2)[:, : conv.out_channels]


def _fold(weight: Tensor, dim: int) -> Tensor:
    """The three weights along ``dim`` on repeated pixels, as two on the pixels themselves, for even and then for odd
    places: of an even one the last two look at the same pixel, of an odd one the first two."""
    first, middle, last = weight.unbind(dim)
    return torch.stack([first, middle + last, first + middle, last], dim)


def _unfold(shortcut: Any, x: Tensor, place: int) -> Tensor:
    """What a QwenImage21DupUp3D gives to one place of 2 x 2 of the last frame: channels of ``x``, which it takes for
    (channel, frame, place) in order, each repeated."""
    return x[:, ((shortcut.factor_t - 1) * 4 + place) // shortcut.repeats :: shortcut.factor // shortcut.repeats]


def _add_average(shortcut: Any, x: Tensor, out: Tensor) -> Tensor:
    """Adds a QwenImage21AvgDown3D of ``x`` to ``out``: it takes (channel, frame, place in a square) in order for
    channels and averages groups of neighbours; only the last frame is not zero."""
    side, group = shortcut.factor_s, shortcut.group_size
    # Of a square, those places whose average goes to the same channel.
    rows, columns = min(max(group // side, 1), side), min(group, side)
    mean = x if rows == columns == 1 else F.avg_pool2d(x, (rows, columns))
    for i, j in product(range(side // rows), range(side // columns)):
        place = i * rows * side + j * columns
        first = ((shortcut.factor_t - 1) * side**2 + place) // group
        part = mean[:, :, i :: side // rows, j :: side // columns]
        out[:, first :: shortcut.factor // group].add_(part, alpha=rows * columns / group)
    return out
