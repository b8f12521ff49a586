"""What is stored, how many bytes it takes, and how well it comes back."""

import pytest
import torch

from underpaint.kv.codec import CODECS, Plane, dequantise, quantise

ROWS, HEADS, HEAD_DIM = 40, 3, 128


def loud(seed: int) -> torch.Tensor:
    """Rows and heads of very different size, as real keys and values are."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, HEADS, HEAD_DIM, generator=generator)
    return x * torch.logspace(-3, 3, ROWS)[:, None, None] * torch.tensor([1.0, 10.0, 0.1])[:, None]


def test_quantise_keeps_each_token_and_head_to_e4m3_precision(seed: int) -> None:
    x = loud(seed)
    stored, scale = quantise(x)
    assert stored.dtype == torch.float8_e4m3fn
    assert scale.shape == (ROWS, HEADS)
    error = (dequantise(stored, scale, torch.float32) - x).abs()
    # 3 bits of mantissa: half a step is 1/16 of the value, or of the smallest normal of the row.
    largest = x.abs().amax(-1, keepdim=True)
    assert bool((error <= torch.maximum(x.abs() / 16, largest / 448 / 64) * 1.001).all())


def test_quantise_of_zeros_is_zero() -> None:
    stored, scale = quantise(torch.zeros(2, 1, 8))
    assert dequantise(stored, scale, torch.float32).abs().max() == 0


@pytest.mark.parametrize("name", CODECS)
def test_bytes_are_what_the_planes_take(name: str) -> None:
    codec = CODECS[name]
    planes = [Plane(ROWS, HEADS, HEAD_DIM, dtype, "cpu") for dtype in (codec.k_dtype, codec.v_dtype)]
    taken = sum(p.data.nbytes + (0 if p.scale is None else p.scale.nbytes) for p in planes)
    assert codec.row_bytes(HEADS, HEAD_DIM) * ROWS == taken


def test_fp8_v_is_three_quarters_and_fp8_half_of_bf16_plus_scales() -> None:
    plain = CODECS["bf16"].row_bytes(HEADS, HEAD_DIM)
    scales = 4 * HEADS
    assert CODECS["fp8_v"].row_bytes(HEADS, HEAD_DIM) == plain * 3 // 4 + scales
    assert CODECS["fp8"].row_bytes(HEADS, HEAD_DIM) == plain // 2 + 2 * scales


@pytest.mark.parametrize(("dtype", "exact"), [(torch.float32, True), (torch.bfloat16, False)])
def test_plane_returns_what_was_written(dtype: torch.dtype, exact: bool, seed: int) -> None:
    plane = Plane(2 * ROWS, HEADS, HEAD_DIM, dtype, "cpu")
    slots = torch.randperm(2 * ROWS, generator=torch.Generator().manual_seed(seed))[:ROWS]
    x = loud(seed)
    plane.write(slots, x)
    back = plane.read(slots, torch.float32)
    assert torch.equal(back, x) == exact
    torch.testing.assert_close(back, x, rtol=2**-8, atol=0)
