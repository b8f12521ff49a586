"""The RGBA VAE of Qwen-Image 2.1: diffusers' AutoencoderKLQwenImage21, between pictures and packed latents.

Packed latents are (tokens, channels), row-major over a grid of one token per 16 x 16 pixels, normalised by the
checkpoint's per-channel mean and standard deviation.

Its weights are run on single frames (``frames.py``). Large pictures go through the layers near the pixels in tiles.
Only attention, in the middle, looks further than a few pixels, and it always sees the whole; so a tile with as much
around it as its layers look at gives the pixels that the whole gives, and there are no seams to blend.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage21
from PIL import Image
from torch import Tensor

from underpaint.errors import CheckpointError
from underpaint.images import to_array
from underpaint.layout import Grid
from underpaint.models.loading import Weights, read_json
from underpaint.models.offload import Visiting
from underpaint.models.qwen_image21.frames import PLAIN, Frames, Pointwise, choose_pointwise, convolve

TILED_ABOVE = 1536
"""Pictures with a longer side go through in tiles."""
TILE_SIDE = 512
"""In pixels, without what a tile has around it."""
TILED_SCALE = 4
"""Layers that work at a higher resolution than a picture's divided by this are tiled; the others are small."""


class ImageCodec:
    """Encodes references and decodes targets. Deterministic: references are encoded to the mode."""

    def __init__(
        self,
        vae: AutoencoderKLQwenImage21,
        visiting: Visiting | None = None,
        device: str = "",
        pointwise: Pointwise = PLAIN,
    ) -> None:
        """``visiting``: of the VAE's weights, if they are on ``device`` only while it works."""
        self._frames = Frames(pointwise)
        self._device = torch.device(device) if visiting else vae.device
        self._weights = visiting.there if visiting else nullcontext
        self._weight_bytes = visiting.num_bytes if visiting else 0
        self.vae = vae
        self.num_channels: int = vae.config.z_dim
        # The config's scale_factor_spatial is not read: released checkpoints ship 8 there, the truth is 16.
        self.pixels_per_token: int = 2 ** len(vae.config.temperal_downsample)
        self.tiled_above, self.tile_side = TILED_ABOVE, TILE_SIDE
        shape = (1, self.num_channels, 1, 1)
        self._mean = torch.tensor(vae.config.latents_mean).view(shape).to(self._device, vae.dtype)
        self._std = torch.tensor(vae.config.latents_std).view(shape).to(self._device, vae.dtype)

        # A picture goes to the device in bytes: a quarter of the way, and no arithmetic on the host.
        every_byte = Image.frombytes("RGBA", (64, 1), bytes(range(256)))
        levels = torch.from_numpy(to_array(every_byte)).permute(1, 2, 0).flatten()
        self._levels = levels.to(self._device, vae.dtype)

    @property
    def peak_bytes(self) -> int:
        """What the largest picture takes that goes through whole; and the weights, if they come only for that."""
        config, fused = self.vae.config, self._frames.fused
        return self._weight_bytes + peak_bytes(config, self.vae.dtype, fused, self.tiled_above)

    def grid(self, width: int, height: int) -> Grid:
        """Tokens of a picture whose sides are multiples of ``pixels_per_token``."""
        return height // self.pixels_per_token, width // self.pixels_per_token

    @torch.inference_mode()
    def encode(self, image: Image.Image) -> Tensor:
        """An RGBA picture -> (tokens, channels)."""
        values = torch.from_numpy(np.array(image)).to(self._device)
        pixels = self._levels[values.int()].permute(2, 0, 1)[None]
        with self._weights():
            latents = (self._latents(self._laid_out(pixels)) - self._mean) / self._std
        return latents[0].flatten(1).T.contiguous()

    @torch.inference_mode()
    def decode(self, latents: Tensor, grid: Grid) -> Tensor:
        """(tokens, channels) -> (4, height, width) float32 in [0, 1]."""
        packed = latents.to(self.vae.dtype).T.reshape(1, self.num_channels, *grid)
        with self._weights():
            pixels = self._pixels(self._laid_out(packed * self._std + self._mean))
        return (pixels[0].float() / 2 + 0.5).clamp(0, 1).contiguous()

    def _laid_out(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=self._frames.memory_format)

    def _latents(self, pixels: Tensor) -> Tensor:
        """(1, 4, height, width) -> the mode of (1, channels, height / 16, width / 16)."""
        frames, encoder, blocks = self._frames, self.vae.encoder, list(self.vae.encoder.down_blocks)
        num_tiled = min(int(math.log2(TILED_SCALE)), len(blocks) - 1)
        tiled, whole = blocks[:num_tiled], blocks[num_tiled:]

        def near_pixels(x: Tensor) -> Tensor:
            x = convolve(encoder.conv_in, x)
            for block in tiled:
                x = frames.down(block, x)
            return x

        scale = 2**num_tiled
        x = self._apply(near_pixels, pixels, 1 / scale, _down_reach(tiled), 1)
        for block in whole:
            x = frames.down(block, x)
        x = frames.last(encoder.norm_out, encoder.conv_out, frames.middle(encoder.mid_block, x))
        return convolve(self.vae.quant_conv, x).chunk(2, dim=1)[0]

    def _pixels(self, latents: Tensor) -> Tensor:
        """(1, channels, height / 16, width / 16) -> (1, 4, height, width) in [-1, 1]."""
        frames, decoder, blocks = self._frames, self.vae.decoder, list(self.vae.decoder.up_blocks)
        num_whole = max(len(blocks) - 1 - int(math.log2(TILED_SCALE)), 0)
        whole, tiled = blocks[:num_whole], blocks[num_whole:]

        def near_pixels(x: Tensor) -> Tensor:
            for block in tiled:
                x = frames.up(block, x)
            return frames.last(decoder.norm_out, decoder.conv_out, x).clamp(-1, 1)

        x = convolve(decoder.conv_in, convolve(self.vae.post_quant_conv, latents))
        x = frames.middle(decoder.mid_block, x)
        for block in whole:
            x = frames.up(block, x)
        scale = 2 ** (len(tiled) - 1)
        return self._apply(near_pixels, x, scale, _up_reach(tiled), scale)

    def _apply(self, part: Callable[[Tensor], Tensor], x: Tensor, scale: float, reach: int, pixels_each: int) -> Tensor:
        """``part`` of ``x``, in tiles if it is large. ``part`` changes sides by ``scale`` and looks ``reach`` away;
        what it takes are ``pixels_each`` pixels of the picture a side."""
        sides = x.shape[-2:]
        if max(sides) * pixels_each <= self.tiled_above:
            return part(x)
        # Borders between tiles are where a smaller output has whole pixels.
        step = max(round(1 / scale), 1)
        side = self.tile_side // pixels_each
        margin = -(-reach // step) * step
        out: Tensor | None = None
        for top in range(0, sides[0], side):
            for left in range(0, sides[1], side):
                rows, cols = (_Range(start, side, margin, stop) for start, stop in ((top, sides[0]), (left, sides[1])))
                tile = part(self._laid_out(x[..., rows.around, cols.around]))
                tile = tile[..., rows.within(scale), cols.within(scale)]
                if out is None:
                    out = self._laid_out(tile.new_empty(*tile.shape[:-2], *(round(n * scale) for n in sides)))
                out[..., rows.scaled(scale), cols.scaled(scale)] = tile
        assert out is not None
        return out


class _Range:
    """One side of a tile: [start, start + side) of ``stop``, with ``margin`` around it."""

    def __init__(self, start: int, side: int, margin: int, stop: int) -> None:
        self.start, self.stop = start, min(start + side, stop)
        self.around = slice(max(start - margin, 0), min(self.stop + margin, stop))

    def scaled(self, scale: float) -> slice:
        """The range itself, in the output."""
        return slice(round(self.start * scale), round(self.stop * scale))

    def within(self, scale: float) -> slice:
        """The range itself, in what comes out of the tile."""
        first = self.around.start
        return slice(round((self.start - first) * scale), round((self.stop - first) * scale))


def peak_bytes(config: Mapping[str, Any], dtype: torch.dtype, fused: bool, side: int = TILED_ABOVE) -> int:
    """What a picture of ``side`` squared takes that goes through whole: behind the last upsampling, every value once in
    ``dtype``, normalised in fp32, and once more; fused, three times in ``dtype``, with what convolutions work in."""
    channels = 2 * (config.get("decoder_base_dim") or config["base_dim"])
    each = 3 * dtype.itemsize if fused else 2 * dtype.itemsize + 2 * torch.float32.itemsize
    return side**2 * channels * each


def _up_reach(blocks: Sequence[Any]) -> int:
    """How far the last blocks of the decoder look, in pixels of what they take. A 3 x 3 convolution looks one pixel of
    its own resolution away; residual blocks have two, and one follows each upsampling and the last block."""
    reach, scale = 0.0, 1
    for block in blocks:
        reach += 2 * len(block.resnets) / scale
        if block.upsampler is not None:
            scale *= 2
            reach += 1 / scale
    return math.ceil(reach + 1 / scale)


def _down_reach(blocks: Sequence[Any]) -> int:
    """How far the first blocks of the encoder look, in pixels. A 3 x 3 convolution with stride 2 looks two pixels to
    the right."""
    reach, scale = 1, 1
    for block in blocks:
        reach += 2 * len(block.resnets) * scale
        if block.downsampler is not None:
            reach += 2 * scale
            scale *= 2
    return reach


def scan_vae(directory: Path) -> Weights:
    """Read the headers of ``vae/`` and check every tensor against its config. Raises CheckpointError."""
    weights = Weights.scan(directory, "diffusion_pytorch_model")
    config = read_json(directory / "config.json")
    if config.get("_class_name") != "AutoencoderKLQwenImage21":
        raise CheckpointError(f"{directory} holds a {config.get('_class_name')!r}, not an AutoencoderKLQwenImage21")
    known = set(AutoencoderKLQwenImage21._get_init_keys(AutoencoderKLQwenImage21))
    if config.get("patch_size") is not None or not config.get("is_residual", True):
        raise CheckpointError(f"{directory / 'config.json'}: only residual VAEs without patches are supported")
    if sorted(config.get("dim_mult", [])) != config.get("dim_mult", []):
        raise CheckpointError(f"{directory / 'config.json'}: dim_mult must not fall: {config['dim_mult']}")
    if unknown := {key for key in config if not key.startswith("_")} - known:
        raise CheckpointError(f"{directory / 'config.json'}: unknown keys: {', '.join(sorted(unknown))}")
    with torch.device("meta"):
        vae = AutoencoderKLQwenImage21.from_config(config)
    weights.check(vae.state_dict())
    return weights


def load_vae(directory: Path, device: str, dtype: torch.dtype, offloaded: bool = False) -> ImageCodec:
    """The VAE of a checkpoint; ``offloaded``: on the device only while it works. Raises CheckpointError."""
    scan_vae(directory)
    # By default diffusers would want accelerate, and tell the log that it is not there.
    vae = AutoencoderKLQwenImage21.from_pretrained(
        directory, torch_dtype=dtype, local_files_only=True, low_cpu_mem_usage=False
    )
    pointwise = choose_pointwise(device)
    vae = vae.eval().requires_grad_(False).to(memory_format=pointwise.memory_format)
    if offloaded:
        return ImageCodec(vae, Visiting(vae, device), device, pointwise)
    return ImageCodec(vae.to(device), pointwise=pointwise)
