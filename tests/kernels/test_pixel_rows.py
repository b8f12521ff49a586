"""The kernels between the VAE's convolutions: in Triton's interpreter against plain PyTorch, compiled for Hopper."""

from collections.abc import Iterator

import pytest
import torch
from interpreter import DTYPES, interpreted  # noqa: F401 - a fixture for all
from test_compiled import Report, report  # noqa: F401 - a fixture
from torch import Tensor

from underpaint.kernels.pixel_rows import add_residual, norm_silu
from underpaint.models.qwen_image21 import frames

WIDTHS = [7, 12, 96, 144, 1152]
SIZES = [(1, 1), (5, 7), (2, 129)]


@pytest.fixture(autouse=True)
def seeded(seed: int) -> Iterator[None]:
    torch.manual_seed(seed)
    with torch.inference_mode():
        yield


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    x = (torch.randn(shape) * 3).to(dtype)
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x


def assert_close(ours: Tensor, plain: Tensor, exact: Tensor) -> None:
    """Of plain PyTorch in fp32 what rounding leaves: one of the dtype, and those of fp32 on the way."""
    assert ours.shape == plain.shape
    assert ours.dtype == plain.dtype
    error, of_plain = ((x.float() - exact).abs().max() for x in (ours, plain))
    assert error <= 1.01 * of_plain + 1e-6 * exact.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("has_bias", [True, False])
def test_norm_silu(width: int, size: tuple[int, int], dtype: torch.dtype, has_bias: bool) -> None:
    """Loud and quiet pixels, and one of zeros."""
    x = draw(1, width, *size, dtype=dtype)
    x *= torch.logspace(-2, 1, size[1]).to(dtype)
    x[..., 0] = 0
    bias, gamma = draw(width, dtype=dtype) if has_bias else None, draw(width, dtype=dtype)
    given = x.clone()
    ours = norm_silu(x, bias, gamma)
    assert ours.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(x, given)
    exact = frames.norm_silu(x.float(), None if bias is None else bias.float(), gamma.float())
    assert_close(ours, frames.norm_silu(x, bias, gamma), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("size", SIZES)
def test_add_residual(width: int, size: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual = draw(1, width, *size, dtype=dtype), draw(1, width, *size, dtype=dtype)
    bias = draw(width, dtype=dtype)
    exact = x.float() + bias.float()[:, None, None] + residual.float()
    plain = exact.to(dtype)
    add_residual(x, bias, residual, x)
    assert_close(x, plain, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels_each", [1, 2, 3])
def test_add_residual_between_views(channels_each: int, dtype: torch.dtype) -> None:
    """A part of a picture and some channels of another, to every other pixel of a third; nothing else is touched."""
    width, height, columns = 24, 5, 70
    x = draw(1, width, height + 1, columns + 1, dtype=dtype)[:, :, 1:, 1:]
    residual = draw(1, channels_each * width, height, columns, dtype=dtype)[:, channels_each - 1 :: channels_each]
    bias = draw(width, dtype=dtype)
    out = torch.full((1, width, 2 * height, 2 * columns), 7.0, dtype=dtype).contiguous(
        memory_format=torch.channels_last
    )
    add_residual(x, bias, residual, out[:, :, 1::2, ::2])
    exact = x.float() + bias.float()[:, None, None] + residual.float()
    assert_close(out[:, :, 1::2, ::2], exact.to(dtype), exact)
    assert (out[:, :, ::2] == 7).all()
    assert (out[:, :, :, 1::2] == 7).all()


def test_compiled(report: Report) -> None:  # noqa: F811
    """At the released widths: rows stay in registers, and all but every other channel is moved 16 bytes at a time."""
    reports = report("pixel_report.py")
    assert len(reports) == 8 * 4
    for case in reports:
        assert case["local"] == case["stack"] == 0, case
        pieces = case["width"] // case["piece"]
        assert case["wide_stores"] == case["stores"] == pieces, case
        assert case["narrow_loads"] == (8 * pieces if case["residual_channel"] == 2 else 0), case
        assert case["shared_memory"] == 0 or case["residual_channel"] == 2, case
        assert case["registers"] <= 128, case
