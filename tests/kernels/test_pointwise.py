"""The pointwise kernels under Triton's interpreter, against the modules whose arithmetic they fuse."""

from collections.abc import Iterator

import pytest
import torch
from interpreter import CODEC_OF, DTYPES, interpreted  # noqa: F401 - a fixture for all
from torch import Tensor, nn

from underpaint.kernels.head_form import HeadForm
from underpaint.kernels.kept import Kept
from underpaint.kernels.kv_pack import FEW_ROWS, kv_pack, kv_pack_reference
from underpaint.kernels.norm_modulate import (
    add_rms_norm,
    add_rms_norm_quantised,
    add_rms_norm_reference,
    gate_norm_modulate,
    gate_norm_modulate_quantised,
    gate_norm_modulate_reference,
)
from underpaint.kernels.quantise import quantise_rows
from underpaint.kernels.quantised_rows import QuantisedRows
from underpaint.kernels.swiglu import swiglu, swiglu_quantised, swiglu_reference
from underpaint.kernels.tiles import StoredKV
from underpaint.kv.codec import CODECS, E4M3_MAX, quantise
from underpaint.kv.pool import CacheShape, PagePool
from underpaint.models.neo_unify import transformer as neo
from underpaint.models.qwen_image21 import transformer as qwen
from underpaint.models.rms_norm import RMSNorm

EPS = 1e-6


@pytest.fixture(autouse=True)
def seeded(seed: int) -> Iterator[None]:
    torch.manual_seed(seed)
    with torch.inference_mode():
        yield


TURNED = 2**0.5
"""How much larger a channel may have been before a rotation of pairs than the largest of its head is after it."""


def draw(*shape: int, dtype: torch.dtype, loud: float = 3.0) -> Tensor:
    return (torch.randn(shape) * loud).to(dtype)


def assert_close(ours: Tensor, theirs: Tensor, shrunk: float = 1.0) -> None:
    """Within 1e-5 of the largest of a row in fp32. In fp16 an intermediate value that lies between two numbers may be
    rounded to the other one: one rounding of a value as large as the row's largest, or ``shrunk`` times that."""
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    relative = 1e-5 if ours.dtype == torch.float32 else shrunk * 2**-10
    largest = theirs.float().abs().amax(dim=-1, keepdim=True)
    assert ((ours.float() - theirs.float()).abs() <= relative * largest).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (7, 96), (3, 4096)])
@pytest.mark.parametrize("adds", [True, False])
def test_add_rms_norm(shape: tuple[int, int], dtype: torch.dtype, adds: bool) -> None:
    x, delta = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype) if adds else None
    norm = RMSNorm(shape[1], EPS).to(dtype)
    norm.weight.data = draw(shape[1], dtype=dtype)
    total, normed = add_rms_norm(x, delta, norm.weight, EPS)
    want = x if delta is None else x + delta
    assert torch.equal(total, want)
    assert_close(normed, norm(want))
    for ours, theirs in zip((want, norm(want)), add_rms_norm_reference(x, delta, norm.weight, EPS), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (9, 96), (3, 4096)])
@pytest.mark.parametrize("by_group", [True, False])
def test_gate_norm_modulate(shape: tuple[int, int], dtype: torch.dtype, by_group: bool) -> None:
    """As ``Block.forward`` and ``OutputNorm`` compute it, tables cut out of wider ones."""
    num_rows, width = shape
    x, delta = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype)
    gate, scale, _ = draw(3, 3 * width, dtype=dtype, loud=0.5).chunk(3, dim=-1)
    group = torch.randint(0, 3, (num_rows,)) if by_group else None
    norm = nn.LayerNorm(width, eps=EPS, elementwise_affine=False)
    lines = qwen._lines
    want = x + lines(gate, group) * delta
    normed = norm(want) * (1 + lines(scale, group))
    total, out = gate_norm_modulate(x, delta, gate, scale, group, EPS)
    assert torch.equal(total, want)
    assert_close(out, normed)
    same, out = gate_norm_modulate(want, None, None, scale, group, EPS)
    assert same is want
    assert_close(out, normed)
    limited, same = gate_norm_modulate(x, delta, gate, None, group, EPS, limit=2.0)
    assert torch.equal(limited, want.clip(-2, 2))
    assert same is limited
    reference = gate_norm_modulate_reference(x, delta, gate, scale, group, EPS)
    assert torch.equal(reference[0], want)
    assert torch.equal(reference[1], normed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 16), (5, 100), (2, 12288)])
def test_swiglu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    num_rows, width = shape
    x = draw(num_rows, 2 * width, dtype=dtype)
    assert_close(swiglu(x), swiglu_reference(x))
    module = neo.SwiGLU(8, width).to(dtype)
    module.down_proj = nn.Identity()  # type: ignore[assignment]
    row = draw(num_rows, 8, dtype=dtype)
    assert_close(swiglu(torch.cat([module.gate_proj(row), module.up_proj(row)], dim=-1)), module(row))


def assert_quantised(ours: QuantisedRows, theirs: Tensor) -> None:
    """To the bit what the reference, and the kernel that only quantises, make of the plain result."""
    for values, scale in (quantise(theirs), quantise_rows(theirs)):
        assert torch.equal(ours.values.float(), values.float())
        assert torch.equal(ours.scale, scale)
    assert ours.dtype == theirs.dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 16), (9, 96), (3, 4096)])
@pytest.mark.parametrize("adds", [True, False])
def test_what_an_fp8_product_reads(shape: tuple[int, int], dtype: torch.dtype, adds: bool) -> None:
    """Quantised on the way out as by the two kernels one after the other; loud and quiet rows, and one of zeros."""
    num_rows, width = shape
    x = draw(*shape, dtype=dtype) * torch.logspace(-3, 1, num_rows).to(dtype)[:, None]
    x[-1] = 0
    delta = x.flip(0) if adds else None
    weight = draw(width, dtype=dtype)
    total, rows = add_rms_norm_quantised(x, delta, weight, EPS)
    plain_total, plain = add_rms_norm(x, delta, weight, EPS)
    assert torch.equal(total, plain_total)
    assert_quantised(rows, plain)
    gate, scale = draw(2, 2 * width, dtype=dtype, loud=0.5).chunk(2, dim=-1)
    group = torch.randint(0, 2, (num_rows,))
    total, rows = gate_norm_modulate_quantised(x, delta, gate if adds else None, scale, group, EPS, 5.0)
    plain_total, plain = gate_norm_modulate(x, delta, gate if adds else None, scale, group, EPS, 5.0)
    assert torch.equal(total, plain_total)
    assert_quantised(rows, plain)
    pair = torch.cat([x, draw(*shape, dtype=dtype)], dim=-1)
    assert_quantised(swiglu_quantised(pair), swiglu(pair))


class Heads:
    """A product of q, k and v whose rows are apart, and what the modules make of it."""

    def __init__(self, num_rows: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, adjacent: bool):
        self.kv_heads = kv_heads
        self.rotary = torch.polar(torch.ones(num_rows, head_dim // 2), torch.rand(num_rows, head_dim // 2) * 7)
        wide = draw(num_rows, heads + 2 * kv_heads + 1, head_dim, dtype=dtype)
        self.qkv = wide[:, :-1]
        self.form = HeadForm.of(draw(2, head_dim, dtype=dtype), EPS, adjacent)
        q, k, v = self.qkv.clone().split([heads, kv_heads, kv_heads], dim=1)
        finish = self._qwen if adjacent else self._neo
        self.want = finish(q, self.form.weight[0]), finish(k, self.form.weight[1]), v

    def _neo(self, x: Tensor, weight: Tensor) -> Tensor:
        head_dim = x.shape[-1]
        parts = []
        for part, scale in zip(x.chunk(2, -1), weight.chunk(2), strict=True):
            norm = RMSNorm(head_dim // 2, EPS)
            norm.weight.data = scale
            parts.append(norm(part))
        axes = (head_dim // 2, head_dim // 4, head_dim // 4)
        return neo.apply_rotary(torch.cat(parts, dim=-1), self.rotary, axes)

    def _qwen(self, x: Tensor, weight: Tensor) -> Tensor:
        norm = RMSNorm(x.shape[-1], EPS)
        norm.weight.data = weight
        return qwen.apply_rotary(norm(x).type_as(x), self.rotary)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("adjacent", [True, False])
@pytest.mark.parametrize("sizes", [(1, 4, 2, 128), (7, 3, 1, 32), (5, 4, 4, 64), (33, 2, 2, 16), (33, 4, 2, 32)])
def test_kv_pack_in_place(sizes: tuple[int, int, int, int], dtype: torch.dtype, adjacent: bool) -> None:
    case = Heads(*sizes, dtype, adjacent)
    reference = kv_pack_reference(case.qkv, case.kv_heads, case.form, case.rotary)
    kv_pack(case.qkv, case.kv_heads, case.form, case.rotary, None)
    ours = case.qkv.split([sizes[1], sizes[2], sizes[2]], dim=1)
    for got, want, plain in zip(ours, case.want, reference, strict=True):
        assert_close(got, want, TURNED)
        assert_close(plain, want, TURNED)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("adjacent", [True, False])
@pytest.mark.parametrize("codec", ["plain", "fp8_v", "fp8"])
@pytest.mark.parametrize("num_rows", [9, FEW_ROWS + 1])
def test_kv_pack_keeps_rows(num_rows: int, dtype: torch.dtype, adjacent: bool, codec: str) -> None:
    """Some rows in pages as ``PagePool.write`` has them, one not, those behind the slots not; the other slots alone."""
    heads, kv_heads, head_dim = 4, 2, 32
    case = Heads(num_rows, heads, kv_heads, head_dim, dtype, adjacent)
    shape = CacheShape(1, kv_heads, head_dim, dtype)
    name = CODEC_OF[dtype] if codec == "plain" else codec
    pools = [PagePool(shape, CODECS[name], 4 * 8 * shape.row_bytes(CODECS[name]), "cpu", 8) for _ in range(2)]
    for pool in pools:
        for plane in planes(pool.rows(0)):
            plane.zero_()
    slots = torch.randperm(32)[:6]
    slots[2] = -1
    kv_pack(case.qkv, kv_heads, case.form, case.rotary, Kept(pools[0].rows(0), slots.int()))
    kept = slots >= 0
    q, k, v = case.qkv.split([heads, kv_heads, kv_heads], dim=1)
    for got, want in zip((q, k, v), case.want, strict=True):
        assert_close(got, want, TURNED)
    pools[1].write(0, slots[kept], k[:6][kept], v[:6][kept])
    for ours, theirs in zip(planes(pools[0].rows(0)), planes(pools[1].rows(0)), strict=True):
        if ours.dtype == torch.bfloat16:  # the interpreter cuts digits off, where a GPU rounds
            assert ((ours.float() - theirs.float()).abs() <= theirs.float().abs() * 2**-7).all()
        else:
            assert torch.equal(ours, theirs)


def test_e4m3_rounds_to_even() -> None:
    """Every e4m3 value, every tie between two, and what is just beside; all of them next to 448, so the scale is 1."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[1:] + codes[:-1]) / 2
    every = torch.cat([codes, ties, ties * (1 + 2**-20), ties * (1 - 2**-20)])
    every = torch.cat([every, -every])
    rows = -(-len(every) // 15)
    heads = torch.zeros(rows, 3, 16)
    # A row of v: 15 of them, and the largest.
    heads[:, 2, :15] = torch.cat([every, every.new_zeros(15 * rows - len(every))]).view(rows, 15)
    heads[:, 2, 15] = E4M3_MAX
    stored = StoredKV(*torch.empty(2, rows, 1, 16, dtype=torch.uint8), *torch.empty(2, rows, 1))
    form = HeadForm.of(torch.ones(2, 16), EPS, adjacent=True)
    kept = Kept(stored, torch.arange(rows, dtype=torch.int32))
    kv_pack(heads, 1, form, torch.ones(rows, 8, dtype=torch.complex64), kept)
    want = quantise(heads[:, 2:])[0].view(torch.uint8)
    # -0 and 0 are one value
    assert ((stored.v == want) | (heads[:, 2:] == 0)).all()


def planes(stored: StoredKV) -> list[Tensor]:
    return [x for x in vars(stored).values() if x is not None]
