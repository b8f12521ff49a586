"""The kernels of text decode under Triton's interpreter."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from interpreter import CODEC_OF, DTYPES, interpreted  # noqa: F401 - a fixture for all
from torch import Tensor

from underpaint.kernels.decode_attention import decode_attention
from underpaint.kernels.decode_plan import (
    KEYS,
    DecodePlan,
    decode_attention_reference,
    num_pieces,
    plan_decode,
    tile_keys,
)
from underpaint.kernels.skinny_linear import SkinnyShape, skinny_linear, skinny_linear_reference
from underpaint.kv.codec import CODECS
from underpaint.kv.pool import CacheShape, PagePool, Run, View

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def seeded(seed: int) -> Iterator[None]:
    torch.manual_seed(seed)
    with torch.inference_mode():
        yield


def make_pool(page_rows: int, kv_heads: int, head_dim: int, dtype: torch.dtype, codec: str) -> PagePool:
    """Every slot holds NaN."""
    shape = CacheShape(1, kv_heads, head_dim, dtype)
    pool = PagePool(shape, CODECS[codec], 30 * page_rows * shape.row_bytes(CODECS[codec]), "cpu", page_rows)
    for x in vars(pool.stored(0)).values():
        if x is not None:
            x.fill_(127 if x.dtype == torch.uint8 else float("nan"))  # 127 is NaN in e4m3
    return pool


def fill(pool: PagePool, num_rows: int) -> View:
    """A sequence in two runs, in pages that are not in order, so that a page in the middle is partly filled too."""
    pages = torch.randperm(pool.num_free).tolist()
    taken = [pool.allocate(1) for _ in pages]
    cut = num_rows // 3
    runs, start = [], 0
    for rows in (cut, num_rows - cut):
        if rows:
            stop = start - (-rows // pool.page_rows)
            runs.append(Run(tuple(taken[i].pages[0] for i in pages[start:stop]), rows))
            start = stop
    for i in pages[start:]:
        pool.release(taken[i])
    heads, dim = pool.shape.num_heads, pool.shape.head_dim
    k, v = ((torch.randn(num_rows, heads, dim) * 2).to(pool.shape.dtype) for _ in range(2))
    pool.write(0, pool.slots(runs), k, v)
    return View(pool, tuple(runs))


def plan_of(views: list[View | None], page_rows: int, kv_heads: int) -> DecodePlan:
    pages = [[(page * page_rows, count) for page, count in pages_of(view, page_rows)] for view in views]
    pages = [sorted(p[:-1], key=lambda page: page[1] < page_rows) + p[-1:] for p in pages]
    num_full = [sum(count == page_rows for _, count in p[:-1]) for p in pages]
    counts = (np.array(x, np.int32) for x in ([len(p) for p in pages], num_full))
    pieces, merges = plan_decode(next(counts), page_rows, kv_heads, next(counts))
    flat = torch.tensor([page for of_view in pages for page in of_view] or [(0, 0)], dtype=torch.int32)
    return DecodePlan(flat, torch.from_numpy(pieces), torch.from_numpy(merges))


def pages_of(view: View | None, page_rows: int) -> Iterator[tuple[int, int]]:
    for run in view.runs if view else ():
        for i, page in enumerate(run.pages):
            yield page, min(page_rows, run.num_rows - i * page_rows)


def difference(ours: Tensor, theirs: Tensor) -> float:
    return ((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()).item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 2, 32), (4, 1, 16), (2, 2, 64)])
@pytest.mark.parametrize("codec", ["plain", "fp8"])
@pytest.mark.parametrize("page_rows", [32, 2 * KEYS])
def test_decode_attention(page_rows: int, heads: tuple[int, int, int], dtype: torch.dtype, codec: str) -> None:
    """Unlike lengths, partly filled pages in the middle, a sequence that is not there, and pieces that are merged. A
    page is one tile, and a short sequence one piece; or a page is two, of which the second may be empty, at the end or
    in the middle of a sequence, and all of a piece."""
    pool = make_pool(page_rows, heads[1], heads[2], dtype, CODEC_OF[dtype] if codec == "plain" else codec)
    lengths = (150, None, 1, 67, 16) if page_rows == 32 else (600, None, 1, 268, 64)
    views = [fill(pool, n) if n else None for n in lengths]
    q = (torch.randn(len(views), heads[0] + 1, heads[2]) * 2).to(dtype)[:, : heads[0]]
    plan = plan_of(views, page_rows, heads[1])
    assert len(plan.pieces) == num_pieces(len(views), heads[1])
    spans = (plan.merges[:, 1] - plan.merges[:, 0]).tolist()
    assert spans[1] == 0
    assert spans[2] == page_rows // tile_keys(page_rows)
    assert spans[0] > 1, "the longest is not split"
    ours = decode_attention(q, pool.rows(0), plan, page_rows)
    want = torch.zeros_like(ours, dtype=torch.float32)
    for i, view in enumerate(views):
        if view is not None:
            k, v = (x.float().repeat_interleave(heads[0] // heads[1], dim=1) for x in view.read(0))
            weights = (torch.einsum("hd,khd->hk", q[i].float(), k) * heads[2] ** -0.5).softmax(dim=-1)
            want[i] = torch.einsum("hk,khd->hd", weights, v)
    assert difference(ours, want) < TOLERANCE[dtype]
    assert difference(decode_attention_reference(q, pool.rows(0), plan, page_rows), want) < TOLERANCE[dtype]
    assert not ours[1].any()


def test_plans_cover_every_tile_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(200):
        num_pages = rng.integers(0, rng.choice([2, 30, 3000]), rng.integers(1, 40)).astype(np.int32)
        kv_heads = int(rng.choice([1, 2, 8]))
        num_full = rng.integers(0, num_pages + 1).astype(np.int32)
        pieces, merges = plan_decode(num_pages, 2 * KEYS, kv_heads, num_full)
        first = 0
        for sequence, pages in enumerate(num_pages):
            own = pieces[slice(*merges[sequence])]
            tiles = 2
            covered = [tile for _, start, stop, *_ in own for tile in range(start, stop)]
            full = [tile for _, start, _, _, full_stop in own for tile in range(start, full_stop)]
            assert full == covered[: tiles * num_full[sequence]]
            assert (own[:, 3] == (len(own) == 1)).all()
            assert covered == list(range(first, first + tiles * pages))
            assert (own[:, 0] == sequence).all()
            first += tiles * int(pages)
        assert not pieces[merges[-1, 1] :].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("sizes", [(1, 64, 32), (1, 200, 50), (3, 200, 50), (16, 96, 130)])
def test_skinny_linear(sizes: tuple[int, int, int], gated: bool, dtype: torch.dtype) -> None:
    num_rows, inputs, outputs = sizes
    x = torch.randn(num_rows, inputs).to(dtype)
    weight = (torch.randn(outputs * (2 if gated else 1), inputs) * 3 * inputs**-0.5).to(dtype)
    for shape in (None, SkinnyShape(32, 64, 4, 3), SkinnyShape(2, 128, 4)):
        if shape and shape.outputs < 16 and num_rows > 1:
            continue
        ours = skinny_linear(x, weight, gated, shape=shape)
        assert difference(ours, skinny_linear_reference(x, weight, gated)) < TOLERANCE[dtype]
