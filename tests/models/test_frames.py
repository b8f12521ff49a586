"""Every block of the VAE on a single frame against diffusers' own module, which has a dimension for time."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from diffusers.models.autoencoders import autoencoder_kl_qwenimage21 as theirs
from interpreter import interpreted  # noqa: F401 - a fixture for all
from PIL import Image
from torch import Tensor, nn

from underpaint.kernels import pixel_rows
from underpaint.models.qwen_image21 import frames
from underpaint.models.qwen_image21.frames import PLAIN, Frames, Pointwise
from underpaint.models.qwen_image21.vae import ImageCodec

TOLERANCE = 1e-6
"""Of the largest value."""
LAST = replace(PLAIN, memory_format=torch.channels_last)
FUSED = Pointwise(pixel_rows.norm_silu, pixel_rows.add_residual, torch.channels_last, fused=True)


@pytest.fixture(params=[PLAIN, LAST, FUSED], ids=["contiguous", "channels last", "fused"])
def ours(request: pytest.FixtureRequest) -> Frames:
    return Frames(request.param)


@pytest.fixture(autouse=True)
def seeded(seed: int) -> Iterator[None]:
    torch.manual_seed(seed)
    with torch.inference_mode():
        yield


def loud(module: nn.Module) -> Any:
    for name, parameter in module.named_parameters():
        if name.endswith("weight"):
            nn.init.normal_(parameter, 0, 1.5 / parameter[0].numel() ** 0.5)
        else:
            nn.init.normal_(parameter, 1.0 if name.endswith("gamma") else 0.0, 0.5)
    return module


def check(
    ours: Frames,
    run: Callable[[Any, Tensor], Tensor],
    module: nn.Module,
    size: tuple[int, int, int],
    tolerance: float = TOLERANCE,
    **first: bool,
) -> None:
    """``run`` on a picture of ``size``: channels, height, width."""
    module = loud(module)
    x = torch.randn(1, *size)
    want = module(x[:, :, None], **first)[:, :, 0]
    module.to(memory_format=ours.memory_format)  # type: ignore[call-overload]
    given = x.contiguous(memory_format=ours.memory_format)
    got = run(module, given)
    assert torch.equal(given, x), "what is given is left alone"
    assert got.is_contiguous(memory_format=ours.memory_format)
    assert got.shape == want.shape
    assert (got - want).abs().max() < tolerance * want.abs().max()


@pytest.mark.parametrize(("into", "out"), [(12, 12), (24, 12), (8, 16)])
def test_residual_block(ours: Frames, into: int, out: int) -> None:
    check(ours, ours._residual, theirs.QwenImage21ResidualBlock(into, out), (into, 5, 7))


def test_attention_block(ours: Frames) -> None:
    check(ours, ours._attend, theirs.QwenImage21AttentionBlock(12), (12, 5, 7))


@pytest.mark.parametrize("num_layers", [1, 2])
def test_mid_block(ours: Frames, num_layers: int) -> None:
    """What rounding leaves in one block, a loud attention behind it multiplies: diffusers' own was seen 4e-6 away from
    fp64."""
    check(ours, ours.middle, theirs.QwenImage21MidBlock(12, num_layers=num_layers), (12, 7, 3), tolerance=2e-5)


@pytest.mark.parametrize("in_time", [False, True])
@pytest.mark.parametrize(("into", "out"), [(12, 12), (12, 24), (8, 32)])
def test_down_block(ours: Frames, into: int, out: int, in_time: bool) -> None:
    """Averages of 4, 2 and 1 of a square, and in time with zeros among them or not."""
    module = theirs.QwenImage21ResidualDownBlock(into, out, 0.0, 2, in_time, down_flag=True)
    check(ours, ours.down, module, (into, 6, 10))


def test_down_block_that_keeps_the_size(ours: Frames) -> None:
    check(ours, ours.down, theirs.QwenImage21ResidualDownBlock(12, 12, 0.0, 1, down_flag=False), (12, 5, 7))


@pytest.mark.parametrize("in_time", [False, True])
@pytest.mark.parametrize(("into", "out"), [(12, 12), (24, 12), (32, 8)])
def test_up_block(ours: Frames, into: int, out: int, in_time: bool) -> None:
    module = theirs.QwenImage21ResidualUpBlock(into, out, 1, 0.0, in_time, up_flag=True)
    check(ours, ours.up, module, (into, 5, 7), first_chunk=True)


def test_up_block_that_keeps_the_size(ours: Frames) -> None:
    check(ours, ours.up, theirs.QwenImage21ResidualUpBlock(24, 12, 1, up_flag=False), (24, 5, 7), first_chunk=True)


def test_the_end(ours: Frames) -> None:
    class End(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = theirs.QwenImage21RMS_norm(12, images=False)
            self.conv = theirs.QwenImage21CausalConv3d(12, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(nn.functional.silu(self.norm(x)))

    def run(module: Any, x: Tensor) -> Tensor:
        return ours.last(module.norm, module.conv, x).contiguous(memory_format=ours.memory_format)

    check(ours, run, End(), (12, 5, 7))


def test_a_black_pixel_is_no_division_by_zero(ours: Frames) -> None:
    x = torch.zeros(1, 12, 2, 3).contiguous(memory_format=ours.memory_format)
    assert torch.equal(ours._pointwise.norm_silu(x, None, torch.ones(12)), x)


@pytest.mark.parametrize("tiled_above", [32, 16], ids=["whole", "in tiles"])
def test_the_fused_codec_is_the_plain_one(tiled_above: int, draw_image: Callable[..., Image.Image]) -> None:
    vae, image = loud(tiny.make_vae()), draw_image(32, 16)
    plain = ImageCodec(vae)
    latents, grid = plain.encode(image), plain.grid(32, 16)
    shown = plain.decode(latents, grid)
    fused = ImageCodec(vae.to(memory_format=torch.channels_last), pointwise=FUSED)
    fused.tiled_above, fused.tile_side = tiled_above, 16
    assert (fused.encode(image) - latents).abs().max() < 1e-5 * latents.abs().max()
    decoded = fused.decode(latents, grid)
    assert (decoded - shown).abs().max() < 1e-5
    assert decoded.is_contiguous()


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
@pytest.mark.parametrize("has_triton", [True, False])
def test_which_form_runs(
    device: str, has_triton: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(frames, "find_spec", lambda name: object() if has_triton else None)
    chosen = frames.choose_pointwise(device)
    assert chosen == (PLAIN if device == "cpu" else FUSED if has_triton else LAST)
    assert ("vae: plain, since" in caplog.text) == (chosen == LAST)
