"""The Triton kernel under Triton's interpreter, against the dense oracle."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from interpreter import CODEC_OF, interpreted  # noqa: F401 - a fixture for all
from torch import Tensor

from underpaint.attention import RowGroup, reference
from underpaint.attention.triton import prepare, triton
from underpaint.kernels.dequantise import dequantise_tiles, dequantise_tiles_reference
from underpaint.kernels.hybrid_attention_triton import hybrid_attention, hybrid_attention_reference, plan_pass
from underpaint.kernels.planning import make_plan
from underpaint.kernels.tiles import Group, Ints, OutOfRoom, Room, RowShape, SplitRule, StoredKV, TileShape
from underpaint.kv.codec import CODECS, E4M3, quantise
from underpaint.kv.pool import CacheShape, PagePool, View
from underpaint.layout import AttentionCall, Grid, Layout

SHAPES: dict[str, list[int | Grid]] = {
    "image then text": [(3, 5), 9],
    "images touching": [4, (4, 4), (2, 9), 7],
    "text only": [110],
    "edit": [8, (6, 6), 7, (4, 9), 50, (8, 8)],
}


class Case:
    """Sequences in a pool of scattered, partly filled pages whose unused slots hold NaN."""

    def __init__(
        self, seed: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, codec: str, page_rows: int = 16
    ) -> None:
        self.heads, self.kv_heads, self.head_dim, self.dtype = heads, kv_heads, head_dim, dtype
        self.generator = torch.Generator().manual_seed(seed)
        self.rng = random.Random(seed)
        shape = CacheShape(2, kv_heads, head_dim, dtype)
        budget = 48 * page_rows * shape.row_bytes(CODECS[codec])
        self.pool = PagePool(shape, CODECS[codec], budget, "cpu", page_rows)
        for layer in range(2):
            for x in vars(self.pool.stored(layer)).values():
                if x is not None:
                    x.fill_(127 if x.dtype == torch.uint8 else float("nan"))  # 127 is NaN in e4m3
        holes = [self.pool.allocate(1) for _ in range(12)]
        for hole in self.rng.sample(holes, 8):
            self.pool.release(hole)

    def draw(self, num_rows: int, heads: int) -> Tensor:
        """Loud: scores spread over several units, so that a wrongly visible key shows."""
        return (torch.randn(num_rows, heads, self.head_dim, generator=self.generator) * 2).to(self.dtype)

    def prefix(self, num_rows: int) -> View:
        """In two runs, so that a page in the middle is partly filled too."""
        cut = self.rng.randint(1, num_rows - 1) if num_rows > 1 else num_rows
        runs = tuple(self.pool.allocate(n) for n in (cut, num_rows - cut) if n)
        for layer in range(2):
            k, v = (self.draw(num_rows, self.kv_heads) for _ in range(2))
            self.pool.write(layer, self.pool.slots(runs), k, v)
        return View(self.pool, runs)

    def check(self, sequences: Sequence[tuple[Layout, View]]) -> None:
        """Both layers of a pass over the rows behind each prefix: three-way against the oracle in fp32."""
        groups: list[RowGroup] = []
        first = 0
        for layout, view in sequences:
            groups.append(RowGroup.of(layout, layout.num_rows, first, view, "cpu"))
            first += groups[-1].num_rows
        q, k, v = self.draw(first, self.heads), *(self.draw(first, self.kv_heads) for _ in range(2))
        attend = prepare(tuple(groups))
        plain, row_stop = as_plain(groups)
        for layer in range(2):
            exact = reference(q.float(), k.float(), v.float(), tuple(groups), layer)
            native = hybrid_attention_reference(q, k, v, self.pool.rows(layer), plain, row_stop)
            ours = attend(q, k, v, layer)
            assert ours.dtype == q.dtype
            assert_as_good(ours, native, exact)


def assert_as_good(ours: Tensor, native: Tensor, exact: Tensor) -> None:
    """In 16 bits: our error is under twice that of the plain computation. In fp32 that one is the oracle itself."""
    if ours.dtype == torch.float32:
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=2e-5)
        return
    error, allowed = ((x.float() - exact).abs().max().item() for x in (ours, native))
    assert error < 2 * allowed, f"error {error:.2e}, plain {allowed:.2e}"


def row_stops(*calls: tuple[int, int, bool]) -> Ints:
    """Of segments (start, stop, causal) of the pass, in order."""
    return np.concatenate([AttentionCall(*call).visible_stop() for call in calls])


def borders(layout: Layout) -> list[int]:
    inside = {row for image in layout.images for row in range(image.start + 1, image.stop)}
    return [row for row in range(layout.num_rows) if row not in inside]


HEADS = [(4, 4, torch.float32), (4, 2, torch.float16), (6, 2, torch.float16)]


@pytest.mark.parametrize(("heads", "kv_heads", "dtype"), HEADS)
@pytest.mark.parametrize("shape", SHAPES)
def test_layouts_from_every_kind_of_start(shape: str, heads: int, kv_heads: int, dtype: torch.dtype, seed: int) -> None:
    case = Case(seed, heads, kv_heads, 16, dtype, CODEC_OF[dtype])
    layout = Layout.of(SHAPES[shape])
    starts = borders(layout)
    for start in {0, case.rng.choice(starts), starts[-1]}:
        case.check([(layout, case.prefix(start))])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("codec", ["bf16", "fp16", "fp8_v", "fp8"])
@pytest.mark.parametrize("page_rows", [16, 40])
def test_many_sequences_in_every_codec(codec: str, dtype: torch.dtype, page_rows: int, seed: int) -> None:
    """Unlike sequences in one pass, two behind one prefix, and single rows of text that get small tiles."""
    case = Case(seed, 4, 2, 32, dtype, codec, page_rows)
    edit, text = Layout.of([5, (3, 3), 6, (7, 7)]), Layout.of([131])
    shared, long = case.prefix(14), case.prefix(130)
    case.check([(edit, shared), (text, long), (Layout.of([(5, 7)]), View(case.pool, ())), (edit, shared)])


@pytest.mark.parametrize("head_dim", [16, 24, 64, 128])
def test_head_dims(head_dim: int, seed: int) -> None:
    case = Case(seed, 2, 2, head_dim, torch.float16, "fp16")
    layout = Layout.of([20, (4, 5), 3, (3, 11)])
    case.check([(layout, case.prefix(43))])


def test_few_rows_split_the_keys(seed: int) -> None:
    """Text decode: the walks over long prefixes are cut into pieces and merged, short ones are not."""
    case = Case(seed, 4, 1, 16, torch.float16, "fp16", page_rows=128)
    views = [case.prefix(n) for n in (1300, 40)]
    layouts = [Layout.of([view.num_rows + 1]) for view in views]
    row_stop = row_stops((0, 2, True))
    groups = [Group(i, 1, view.extents) for i, view in enumerate(views)]
    plan = plan_pass(groups, row_stop, RowShape.of(case.draw(2, 4), case.draw(2, 1)))
    assert [launch.num_pieces for launch in plan.launches] == [3]
    case.check(list(zip(layouts, views, strict=True)))


def test_pieces_that_some_rows_see_nothing_of(seed: int) -> None:
    """Walks cut after every key tile: the last pieces of a text lie beyond what its first rows see."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(75, heads, 16, generator=generator) for heads in (2, 1, 1))
    groups, row_stop = [Group(0, 75, ())], row_stops((0, 40, True), (40, 50, False), (50, 75, True))
    shape = TileShape(rows=64, keys=16, num_warps=4, num_stages=2)
    rule = SplitRule(min_programs=1000, min_keys=16)
    plan = make_plan(row_stop, [(shape, groups, rule)], RowShape.of(q, k))
    assert plan.launches[0].num_pieces == len(plan.launches[0].work) > 5
    got = hybrid_attention(q, k, v, None, plan)
    want = hybrid_attention_reference(q, k, v, None, groups, row_stop)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("native", [True, False], ids=["float8", "bytes"])
def test_e4m3_as_float8_and_as_bytes(native: bool, seed: int) -> None:
    """All 254 finite patterns, converted by the hardware's instruction and by integer arithmetic."""
    generator = torch.Generator().manual_seed(seed)
    finite = torch.tensor([i for i in range(256) if i & 127 != 127], dtype=torch.uint8)
    k8, k_scale = quantise(torch.randn(254, 1, 16, generator=generator))
    v8 = finite.view(E4M3)[torch.stack([torch.randperm(254, generator=generator) for _ in range(16)], 1)][:, None]
    v_scale = torch.rand(254, 1, generator=generator)
    k8, v8 = (x if native else x.view(torch.uint8) for x in (k8, v8))
    stored = StoredKV(k8, v8, k_scale, v_scale)
    q, k, v = (torch.randn(33, 1, 16, generator=generator) for _ in range(3))
    groups, row_stop = [Group(0, 33, ((0, 254),))], row_stops((0, 33, True))
    got = hybrid_attention(q, k, v, stored, plan_pass(groups, row_stop, RowShape.of(q, k)))
    torch.testing.assert_close(got, hybrid_attention_reference(q, k, v, stored, groups, row_stop), rtol=1e-5, atol=1e-4)


def test_a_broken_sequence_breaks_no_other(seed: int) -> None:
    """NaN in the keys and values of one sequence of a pass, and in a slot behind a prefix."""
    case = Case(seed, 2, 2, 16, torch.float16, "fp16")
    layout = Layout.of([21])
    groups = tuple(RowGroup.of(layout, 21, first, case.prefix(3), "cpu") for first in (0, 18))
    q, k, v = (case.draw(36, 2) for _ in range(3))
    want = triton(q, k, v, groups, 0)
    k[18:], v[18:] = float("nan"), float("nan")
    got = triton(q, k, v, groups, 0)
    assert torch.equal(got[:18], want[:18])
    assert got[18:].isnan().all()


def test_rows_of_a_fused_projection(seed: int) -> None:
    """q, k and v as slices of one tensor, not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(40, 4 + 2 + 2, 16, generator=generator).split([4, 2, 2], dim=1)
    groups, row_stop = [Group(0, 40, ())], row_stops((0, 10, True), (10, 40, False))
    got = hybrid_attention(q, k, v, None, plan_pass(groups, row_stop, RowShape.of(q, k)))
    want = hybrid_attention_reference(q, k, v, None, groups, row_stop)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def targets(case: Case, *sizes: tuple[Grid, int]) -> tuple[RowGroup, ...]:
    """Images, each behind a prefix of so many rows."""
    groups, first = [], 0
    for grid, num_before in sizes:
        layout = Layout.of([num_before, grid])
        view = case.prefix(num_before) if num_before else View(case.pool, ())
        groups.append(RowGroup.of(layout, layout.num_rows, first, view, "cpu"))
        first += groups[-1].num_rows
    return tuple(groups)


@pytest.mark.parametrize("codec", ["fp16", "fp8_v"])
def test_a_pass_with_room_serves_any_other(codec: str, seed: int) -> None:
    """As in a captured graph: the tensors of the first plan are read again, with what later groups put there. Other
    prefixes, other rows, fewer groups; rows of nobody are finite."""
    case = Case(seed, 4, 2, 32, torch.float16, codec)
    q, k, v = (case.draw(64, heads) for heads in (4, 2, 2))
    room = Room(64, 4, 16)
    standing = prepare(targets(case, ((6, 7), 0), ((1, 1), 0)), room)
    standing(q, k, v, 0)
    for sizes in ((((6, 7), 40), ((1, 1), 3)), (((4, 5), 5), ((2, 2), 90), ((5, 8), 0)), (((8, 8), 17),)):
        groups = targets(case, *sizes)
        standing.refill(groups)
        num_rows = sum(group.num_rows for group in groups)
        ours = standing(q, k, v, 0)
        q_used, k_used, v_used = (x[:num_rows] for x in (q, k, v))
        plain = hybrid_attention_reference(q_used, k_used, v_used, case.pool.rows(0), *as_plain(groups))
        exact = reference(q_used.float(), k_used.float(), v_used.float(), groups, 0)
        assert_as_good(ours[:num_rows], plain, exact)
        assert ours.isfinite().all()
    with pytest.raises(OutOfRoom):
        standing.refill(targets(case, ((8, 9), 0)))
    assert torch.equal(standing(q, k, v, 0), ours), "a refusal changes nothing"


def as_plain(groups: Sequence[RowGroup]) -> tuple[list[Group], Ints]:
    """As the kernels have them."""
    row_stop = torch.cat([g.visible_stop + g.first - g.prefix.num_rows for g in groups]).numpy()
    return [Group(g.first, g.num_rows, g.prefix.extents) for g in groups], row_stop


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("stored", ["float8", "bytes", "plain"])
def test_dequantised_tiles(stored: str, dtype: torch.dtype, seed: int) -> None:
    """Partly valid tiles are zero behind what is valid, and places of a plan with room are left alone."""
    generator = torch.Generator().manual_seed(seed)
    x: Tensor = torch.randn(300, 3, 40, generator=generator)
    scale: Tensor | None = None
    if stored != "plain":
        x, scale = quantise(x)
        x = x if stored == "float8" else x.view(torch.uint8)
    tiles = torch.tensor([[7, 16], [200, 16], [100, 5], [250, 1], [-1, -1]], dtype=torch.int32)
    got = dequantise_tiles(x, scale, tiles, 16, dtype)[:64]
    assert torch.equal(got, dequantise_tiles_reference(x, scale, tiles, 16, dtype)[:64])
