"""Joining linears: one product, the same numbers, and no second copy of the weights."""

import logging

import pytest
import torch
from torch import nn

from underpaint.models.fp8 import Fp8Linear, Linear
from underpaint.models.fusing import can_fuse, join_in_place
from underpaint.models.random import randomise


@pytest.mark.parametrize("quantised", [False, True])
@torch.no_grad()
def test_joined_linears_share_their_weights(quantised: bool, seed: int) -> None:
    torch.manual_seed(seed)
    linears: list[Linear] = [
        Fp8Linear(32, size) if quantised else nn.Linear(32, size, bias=False) for size in (16, 48, 16)
    ]
    for linear in linears:
        for parameter in linear.parameters():
            parameter.copy_(torch.rand(parameter.shape) + 0.5)
    x = torch.randn(5, 32)
    apart = [linear(x) for linear in linears]
    joined = join_in_place(linears)
    assert torch.equal(joined(x), torch.cat(apart, dim=-1))
    for linear, before in zip(linears, apart, strict=True):
        assert torch.equal(linear(x), before)
    joined.weight[16:64] = 1
    assert (linears[1].weight.float() == 1).all()
    assert (linears[0].weight.float() != 1).any()


def test_who_runs_fused_is_said(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("triton")
    caplog.set_level(logging.INFO)
    assert not can_fuse("cpu", 128)
    assert not caplog.records
    assert not can_fuse("cuda", 24)
    assert "power of two" in caplog.text
    assert can_fuse("cuda", 128)
    assert "fused kernels" in caplog.records[-1].getMessage()


def test_random_weights_keep_the_size_of_rows(seed: int) -> None:
    """Through a linear, and into a residual stream over any depth."""
    network = nn.ModuleDict({"up_proj": nn.Linear(256, 256, bias=False), "down_proj": nn.Linear(256, 256, bias=False)})
    x = torch.randn(200, 256, generator=torch.Generator().manual_seed(seed + 1))
    randomise(network, seed, num_layers=50)
    assert 0.8 < network["up_proj"](x).std() < 1.25
    assert 0.08 < network["down_proj"](x).std() < 0.125
