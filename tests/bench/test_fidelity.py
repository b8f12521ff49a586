"""Likeness of pictures."""

import math

import pytest
import torch

from underpaint.bench.codec import psnr
from underpaint.bench.fidelity import ssim, state_psnr


def test_psnr_of_a_known_error() -> None:
    a = torch.cat([torch.full((3, 8, 8), 0.5), torch.ones(1, 8, 8)])
    assert psnr(a, a) == math.inf
    b = a.clone()
    b[:3] += 0.1
    assert psnr(a, b) == pytest.approx(-10 * math.log10(0.01 * 3 / 4), abs=1e-3)
    a[3], b[3] = 0, 0
    assert psnr(a, b) == math.inf, "colour under transparency is not seen"


def test_ssim_is_the_formula(seed: int) -> None:
    """Against the sums written out at one place: a picture of 11 x 11 has one window."""
    torch.manual_seed(seed)
    a, b = torch.rand(2, 4, 11, 11, dtype=torch.float64)
    a[3], b[3] = 1, 1
    weights = [[math.exp(-((i - 5) ** 2 + (j - 5) ** 2) / 4.5) for j in range(11)] for i in range(11)]
    w = torch.tensor(weights, dtype=torch.float64) / sum(map(sum, weights))
    values = []
    for x, y in zip(a, b, strict=True):
        mx, my = (w * x).sum(), (w * y).sum()
        vx, vy, c = (w * (x - mx) ** 2).sum(), (w * (y - my) ** 2).sum(), (w * (x - mx) * (y - my)).sum()
        values.append((2 * mx * my + 1e-4) * (2 * c + 9e-4) / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4)))
    assert ssim(a, b) == pytest.approx(torch.stack(values).mean().item(), rel=1e-9)
    assert ssim(a, a) == pytest.approx(1)
    assert ssim(a, b) < 0.9


def test_psnr_of_states(seed: int) -> None:
    """Errors of a quarter of a tenth of the peak are 32 dB, whatever the scale."""
    torch.manual_seed(seed)
    plain = torch.randn(64, 64)
    plain = plain / plain.std()
    error = 0.1 * torch.sign(torch.randn(64, 64))
    for scale in (1.0, 1000.0):
        assert state_psnr(scale * (plain + error), scale * plain) == pytest.approx(20 * math.log10(40), abs=1e-2)
    assert state_psnr(plain, plain) == math.inf
    assert math.isnan(state_psnr(plain * math.nan, plain))
