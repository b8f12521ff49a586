"""Row-wise quantisation under Triton's interpreter."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from interpreter import interpreted  # noqa: F401 - a fixture for all
from triton.runtime import interpreter

from underpaint.kernels.e4m3 import divide, row_scale, to_e4m3
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


@triton.jit
def divide_rows_kernel(x_ptr, quotient_ptr, code_ptr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    x = tl.load(x_ptr + place).to(tl.float32)
    quotient = divide(x, row_scale(tl.max(tl.abs(x), 0)), True)
    tl.store(quotient_ptr + place, quotient)
    tl.store(code_ptr + place, to_e4m3(quotient))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_division_by_the_reciprocal(dtype: torch.dtype, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a card divides, with a multiplication and addition that round once: to the bit what a division gives, and in
    e4m3 whatever the size of a row, from zeros to the largest of all."""

    def fused(self: object, x: interpreter.TensorHandle, y: interpreter.TensorHandle, z: interpreter.TensorHandle):  # type: ignore[no-untyped-def]
        exact = x.data.astype(np.longdouble) * y.data + z.data
        return interpreter.TensorHandle(exact.astype(np.float32), z.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fused)
    torch.manual_seed(seed)
    x = (torch.randn(64, 1024).clip(-4, 4) * torch.logspace(-44, 37, 64).double()[:, None]).to(dtype)
    x[0] = 0
    x = x[x.isfinite().all(dim=1)]
    quotient, code = torch.empty(x.shape), torch.empty(x.shape, dtype=torch.uint8)
    divide_rows_kernel[(len(x),)](x, quotient, code, WIDTH=x.shape[1])
    values, scale = quantise(x)
    assert len(values) > 20
    assert torch.equal(code, values.view(torch.uint8))
    want = x.float() / scale[:, None]
    large = want.abs() > 2**-11
    assert torch.equal(quotient[large], want[large])
