"""The RGBA VAE: the same as diffusers', whole and in tiles."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from diffusers import AutoencoderKLQwenImage21
from PIL import Image
from test_memory import LiveBytes

from underpaint.errors import CheckpointError
from underpaint.images import to_array
from underpaint.models.qwen_image21 import frames
from underpaint.models.qwen_image21 import vae as module
from underpaint.models.qwen_image21.frames import PLAIN, Pointwise, convolve
from underpaint.models.qwen_image21.vae import ImageCodec, peak_bytes, scan_vae

TOLERANCE = 1e-5
SIZES = [(160, 96), (64, 224), (256, 256), (96, 32)]


@pytest.fixture(params=[1, 2], ids=["one residual block", "two residual blocks"])
def loud(request: pytest.FixtureRequest) -> AutoencoderKLQwenImage21:
    """Loud: what is around a pixel matters, so a tile with too little around it shows."""
    config = {**tiny.make_vae().config, "num_res_blocks": request.param}
    torch.manual_seed(3)
    vae = AutoencoderKLQwenImage21.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in vae.named_parameters():
            if name.endswith("weight") and parameter.ndim > 1:
                parameter.normal_(0, 1.5 / parameter[0].numel() ** 0.5)
    return vae


def both(vae: AutoencoderKLQwenImage21, tile_side: int) -> tuple[ImageCodec, ImageCodec]:
    """Whole, and in tiles."""
    whole, tiled = ImageCodec(vae), ImageCodec(vae)
    tiled.tiled_above, tiled.tile_side = 64, tile_side
    return whole, tiled


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@pytest.mark.parametrize("size", SIZES)
def test_equal_to_diffusers(
    loud: AutoencoderKLQwenImage21, size: tuple[int, int], draw_image: Callable[..., Image.Image], seed: int
) -> None:
    codec, image = ImageCodec(loud), draw_image(*size)
    pixels = torch.from_numpy(to_array(image))[None, :, None]
    mean, std = codec._mean[:, :, None], codec._std[:, :, None]
    with torch.inference_mode():
        theirs = (loud.encode(pixels).latent_dist.mode() - mean) / std
        assert difference(codec.encode(image), theirs[0].flatten(1).T) < TOLERANCE
        shown = loud.decode(theirs * std + mean).sample[0, :, 0]
    ours = codec.decode(theirs[0].flatten(1).T, codec.grid(*size))
    assert (ours - (shown / 2 + 0.5).clamp(0, 1)).abs().max() < TOLERANCE
    assert ours.std() > 0.1, "a picture that says something"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tile_side", [32, 48, 64])
def test_tiles_are_the_whole(
    loud: AutoencoderKLQwenImage21, size: tuple[int, int], tile_side: int, draw_image: Callable[..., Image.Image],
    seed: int,
) -> None:  # fmt: skip
    """Encoded and decoded, sides that tiles do not divide among them, within rounding."""
    whole, tiled = both(loud, tile_side)
    image = draw_image(*size)
    latents = whole.encode(image)
    assert difference(tiled.encode(image), latents) < TOLERANCE
    assert (tiled.decode(latents, tiled.grid(*size)) - whole.decode(latents, whole.grid(*size))).abs().max() < TOLERANCE


@pytest.mark.parametrize("side", ["_up_reach", "_down_reach"])
def test_less_around_a_tile_would_show(
    loud: AutoencoderKLQwenImage21, side: str, draw_image: Callable[..., Image.Image], monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:  # fmt: skip
    whole, tiled = both(loud, 64)
    image = draw_image(256, 128)
    latents = whole.encode(image)
    reach = getattr(module, side)
    monkeypatch.setattr(module, side, lambda blocks: reach(blocks) // 2)
    if side == "_down_reach":
        assert difference(tiled.encode(image), latents) > TOLERANCE
    else:
        shown = [codec.decode(latents, codec.grid(256, 128)) for codec in (tiled, whole)]
        assert (shown[0] - shown[1]).abs().max() > TOLERANCE


def test_no_tile_sees_more_than_its_share(
    loud: AutoencoderKLQwenImage21, draw_image: Callable[..., Image.Image], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the resolution of the picture nothing is computed on more than a tile and what is around it."""
    _, tiled = both(loud, 64)
    largest = 0

    def watch(conv: torch.nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        if conv in (loud.decoder.conv_out, loud.encoder.conv_in):
            largest = max(largest, int(np.prod(x.shape[-2:])))
        return convolve(conv, x)

    monkeypatch.setattr(module, "convolve", watch)
    monkeypatch.setattr(frames, "convolve", watch)
    latents = tiled.encode(draw_image(512, 512))
    tiled.decode(latents, tiled.grid(512, 512))
    assert 64 * 64 < largest < 512 * 512 // 4


NOTHING_BESIDE_RESULTS = Pointwise(
    lambda x, bias, gamma: torch.empty_like(x), lambda x, bias, residual, out: None, torch.channels_last, fused=True
)
"""What fused kernels allocate, without their work."""


@pytest.mark.parametrize("pointwise", [PLAIN, NOTHING_BESIDE_RESULTS], ids=["plain", "fused"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_picture_takes_what_is_counted(pointwise: Pointwise, dtype: torch.dtype) -> None:
    """What grows with the picture: no more than is counted, and decoding no less than two thirds of it."""
    vae = AutoencoderKLQwenImage21.from_config({**tiny.make_vae().config, "num_res_blocks": 2}).eval().to(dtype)
    codec, sides = ImageCodec(vae, pointwise=pointwise), (128, 256)
    peaks = []
    for side in sides:
        latents = torch.zeros(1, codec.num_channels, side // 16, side // 16, dtype=dtype)
        pixels = torch.zeros(1, 4, side, side, dtype=dtype)
        for part, x in ((codec._pixels, latents), (codec._latents, pixels)):
            with torch.no_grad(), LiveBytes() as live:
                part(codec._laid_out(x))
            peaks.append(live.peak)
    small, large = (peak_bytes(vae.config, dtype, pointwise.fused, side) for side in sides)
    decoding, encoding = peaks[2] - peaks[0], peaks[3] - peaks[1]
    assert 2 / 3 * (large - small) < decoding <= large - small
    assert encoding <= large - small
    codec.tiled_above = 256
    assert codec.peak_bytes == large


def test_widths_that_fall_are_refused(tmp_path: Path) -> None:
    vae = AutoencoderKLQwenImage21.from_config({**tiny.make_vae().config, "dim_mult": [1, 4, 2, 4, 4]})
    vae.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"dim_mult must not fall: \[1, 4, 2, 4, 4\]"):
        scan_vae(tmp_path)
