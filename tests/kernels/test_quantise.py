"""Row-wise quantisation under Triton's interpreter."""

import pytest
import torch
from interpreter import interpreted  # noqa: F401 - a fixture for all

from underpaint.kernels.quantise import quantise_rows
from underpaint.kv.codec import E4M3_MAX, quantise


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 16), (9, 300), (3, 4096)])
def test_equals_the_reference(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> None:
    """Value for value, whatever the size of a row, with a row of zeros and values that become subnormal."""
    torch.manual_seed(seed)
    x = torch.randn(shape) * torch.logspace(-4, 3, shape[0])[:, None]
    x[:, ::3] *= 1e-3
    x[-1, 1:] = 0
    x = x.to(dtype)
    ours, scale = quantise_rows(x)
    theirs, their_scale = quantise(x)
    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    assert torch.equal(scale, their_scale)
    loud = x.abs().amax(dim=-1) > 0  # in fp16 a row may vanish
    assert (ours.float().abs().amax(dim=-1)[loud] == E4M3_MAX).all()


def test_rows_of_zeros_and_parts_of_wider_rows(seed: int) -> None:
    torch.manual_seed(seed)
    assert not quantise_rows(torch.zeros(2, 32))[0].float().any()
    wide = torch.randn(5, 96)
    assert torch.equal(quantise_rows(wide[:, 32:64])[0].float(), quantise(wide[:, 32:64])[0].float())
    assert quantise_rows(torch.empty(0, 32))[0].shape == (0, 32)
