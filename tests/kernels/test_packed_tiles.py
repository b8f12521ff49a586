"""Pages of tiles: the format in plain PyTorch, the kernel that fills pages under Triton's interpreter, and attention in
e4m3 that reads them in place under ``gluon_emulator``."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gluon_emulator
import pytest
import torch
from fp8_cases import EDIT, IMPORTS, MANY, PATH, SEQUENCES, assert_allowed, faulty_module, load, of, rounded_rows
from interpreter import interpreted  # noqa: F401 - a fixture for all
from torch import Tensor

from underpaint.attention import RowGroup
from underpaint.attention.fp8 import InPlace, prepare
from underpaint.kernels import check_on_gpu, pack_e4m3
from underpaint.kernels.hybrid_attention_problems import Part, Problem, make_problem
from underpaint.kernels.pack_e4m3 import key_at, pack_pages
from underpaint.kernels.packed_tiles import PackedTiles, encode_tiles, key_order
from underpaint.kernels.tiles import Extent, Plan, Room, RowShape, StoredKV
from underpaint.kv.pool import CacheShape, PagePool, View
from underpaint.kv.tile_codec import FP8_TILES, TileLayer
from underpaint.layout import Layout

KEYS = 128
NAN = 0x7F


@pytest.fixture
def kernel(seed: int) -> Any:
    """The module, whose launches are emulated."""
    return load(PATH, seed)


def spoilt(num_pages: int, kv_heads: int, head_dim: int, keys: int = KEYS) -> PackedTiles:
    """Pages as their last user may have left them, at the worst: all NaN."""
    pages = PackedTiles.empty(num_pages, kv_heads, head_dim, keys, "cpu")
    for x in (pages.k, pages.v):
        x.view(torch.uint8).fill_(NAN)
    pages.facts.fill_(float("nan"))
    return pages


def slots_of(extents: Sequence[Extent]) -> Tensor:
    return torch.cat([torch.arange(slot, slot + count) for slot, count in extents])


def keep(pages: PackedTiles, extents: Sequence[Extent], k: Tensor, v: Tensor) -> None:
    """What lies at these extents of ``k`` and ``v`` (slots, kv_heads, head_dim), by the kernel."""
    slots = slots_of(extents)
    pack_pages(k[slots], v[slots], pages, slots.int())


def fill(problem: Problem) -> PackedTiles:
    """The prefixes of a problem in pages of tiles, each kept by itself."""
    assert problem.stored is not None
    stored = problem.stored
    pages = spoilt(len(stored.k) // KEYS, *stored.k.shape[1:])
    for group in problem.groups:
        if group.extents:
            keep(pages, group.extents, stored.k, stored.v)
    return pages


def plan_in_place(kernel: Any, problem: Problem, room: Room | None = None) -> Plan:
    row_shape = RowShape.of(problem.q, problem.k)
    plan: Plan = kernel.plan_pass(problem.groups, problem.row_stop, row_shape, room=room, apart=False)
    return plan


def check_in_place(kernel: Any, problem: Problem, pages: PackedTiles) -> Tensor:
    """Against the plain computation on what the pages hold of each prefix."""
    plan = plan_in_place(kernel, problem)
    (launch,) = plan.launches
    ours: Tensor = kernel.hybrid_attention(problem.q, problem.k, problem.v, pages, plan)
    slots = torch.arange(len(pages.k) // pages.kv_heads)
    held = pages.read(slots // KEYS, slots % KEYS)
    assert_allowed(ours, replace(rounded_rows(problem, launch), stored=StoredKV(*held)))
    return ours


def test_the_order_is_that_of_the_kernel() -> None:
    assert key_order(256).tolist() == [key_at.fn(place) for place in range(256)]


@pytest.mark.parametrize("keys", [16, 48, 128])
def test_what_is_written_is_read(keys: int, seed: int) -> None:
    """To e4m3's precision in tiles of any size, and 0 stays 0."""
    torch.manual_seed(seed)
    pages = spoilt(5, 3, 32, keys)
    numbers = torch.tensor([4, 0, 1])
    loudness = 2.0 ** torch.randint(-12, 12, (2, 3, 1, 3, 1))
    k, v = torch.randn(2, 3, keys, 3, 32) * loudness
    v[1, keys // 2 :] = 0
    pages.write(numbers, k, v)
    for tile, number in enumerate(numbers.tolist()):
        read = pages.read(torch.full((keys,), number), torch.arange(keys))
        for ours, exact in zip(read, (k[tile], v[tile]), strict=True):
            # Half a step of 3 bits, or of the smallest normal number of a tile whose largest code is 224 or more.
            smallest = exact.abs().amax(dim=(0, 2))[:, None] / 224 * 2**-6
            assert ((ours - exact).abs() <= torch.maximum(exact.abs(), smallest) / 16).all()
            assert (ours[exact == 0] == 0).all()


def test_exponents(seed: int) -> None:
    """The smallest power of two that no value passes 448 times of, whatever the other values are."""
    largest = torch.tensor([448.0, 448.1, 447.9, 896.0, 1.75, 0.0, 1e-30, 1e38, float("inf"), float("nan")])
    x = torch.zeros(len(largest), 16, 1, 16)
    x[:, 3, 0, 5] = -largest
    x[-1, 4, 0, 5] = 7.0  # beside NaN
    codes, exponent = encode_tiles(x)
    assert exponent[:, 0].tolist() == [0, 1, 0, 1, -8, -40, -40, 118, 120, -6]
    assert codes[-2:].float().isnan().sum() == 2


def page_cases() -> dict[str, list[list[Extent]]]:
    """Runs of rows in pages, one after another in a pass: first slot and length of each stretch."""
    return {
        "one row": [[(256, 1)]],
        "a full page": [[(128, 128)]],
        "pages in order": [[(128, 300)]],
        "scattered pages": [[(640, 128), (0, 128), (384, 17)]],
        "many short runs": [[(128 * page, 1 + 3 * page)] for page in (5, 2, 0, 4)],
        "a run behind part of one": [[(0, 77)], [(512, 128), (256, 100)], [(384, 128)]],
    }


def assert_pages_equal(ours: PackedTiles, theirs: PackedTiles) -> None:
    """To the bit, facts that nobody reads apart."""
    for x, y in ((ours.k, theirs.k), (ours.v, theirs.v)):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))
    assert torch.equal(ours.facts[:, :3].nan_to_num(), theirs.facts[:, :3].nan_to_num())


def pages_by(module: Any, runs: list[list[Extent]], head_dim: int, nobody: int) -> tuple[PackedTiles, PackedTiles]:
    """Six pages, filled by the kernel of ``module`` from a pass with ``nobody``'s rows between and behind runs, and by
    the plain statement."""
    pages, plain = spoilt(6, 2, head_dim), spoilt(6, 2, head_dim)
    slots: list[Tensor] = []
    for run in runs:
        slots += [slots_of(run), torch.full((nobody,), -1)]
    of_pass = torch.cat(slots)
    # q, k and v side by side, as a product leaves them, and rows behind the slots.
    product = torch.randn(len(of_pass) + 9, 6, head_dim).bfloat16()
    product *= 2.0 ** torch.randint(-6, 7, (len(product), 1, 1))
    k, v = product[:, 2:4], product[:, 4:]
    module.pack_pages(k, v, pages, of_pass.int())
    kept = of_pass >= 0
    TileLayer(plain).write(of_pass[kept], k[: len(of_pass)][kept], v[: len(of_pass)][kept])
    return pages, plain


@pytest.mark.parametrize("nobody", [0, 5])
@pytest.mark.parametrize("runs", page_cases().values(), ids=page_cases())
def test_rows_are_kept_in_pages(runs: list[list[Extent]], nobody: int, seed: int) -> None:
    """As by the plain statement, to the bit: the pages of the slots as wholes, 0 behind their rows, and no other."""
    torch.manual_seed(seed)
    assert_pages_equal(*pages_by(pack_e4m3, runs, 64, nobody))


def test_rows_of_128_channels_are_kept_in_pages(seed: int) -> None:
    torch.manual_seed(seed)
    assert_pages_equal(*pages_by(pack_e4m3, page_cases()["a run behind part of one"], 128, 3))


def test_a_warm_up_keeps_nothing() -> None:
    pages = spoilt(2, 1, 64)
    k, v = torch.randn(2, 40, 1, 64).bfloat16()
    pack_pages(k, v, pages, torch.full((40,), -1, dtype=torch.int32))
    assert (pages.k.view(torch.uint8) == NAN).all()
    assert pages.facts.isnan().all()


PREFIXED = {name: parts for name, parts in SEQUENCES.items() if any(before for _, before in parts)}


@pytest.mark.parametrize("heads", [(2, 2, 64), (8, 2, 128)])
@pytest.mark.parametrize("sequences", PREFIXED.values(), ids=PREFIXED)
def test_in_place_is_as_packed_anew(kernel: Any, sequences: list[Part], heads: tuple[int, int, int]) -> None:
    """To the bit: pages hold what packing before each launch makes of the same rows."""
    problem = of(sequences, *heads)
    ours = check_in_place(kernel, problem, fill(problem))
    anew = kernel.hybrid_attention(problem.q, problem.k, problem.v, problem.stored, plan_in_place(kernel, problem))
    assert torch.equal(ours, anew)


def test_groups_of_few_rows_read_tiles_too(kernel: Any) -> None:
    problem = of([(Layout.of([300, 3]), 300), (Layout.of([200]), 0)], 2, 2)
    assert len(plan_in_place(kernel, problem).launches) == 1
    check_in_place(kernel, problem, fill(problem))


def test_split_keys(kernel: Any) -> None:
    problem = of([(Layout.of([1500, (5, 5)]), 1500)], 1, 1)
    assert plan_in_place(kernel, problem).launches[0].num_pieces > 1
    check_in_place(kernel, problem, fill(problem))


def test_a_page_that_belongs_to_another_unit_now(kernel: Any) -> None:
    """The second user has fewer rows, and quieter ones: not a byte of the first is left, not even its power of two."""
    problem = of([(Layout.of([40, (10, 10)]), 40)], 2, 2)
    assert problem.stored is not None
    fresh, used = (spoilt(1, 2, 64) for _ in range(2))
    keep(used, [(0, 128)], *torch.randn(2, 128, 2, 64).bfloat16() * 2000)
    loud = check_in_place(kernel, problem, used)
    for pages in (fresh, used):
        keep(pages, problem.groups[0].extents, problem.stored.k, problem.stored.v)
    assert_pages_equal(used, fresh)
    ours = check_in_place(kernel, problem, used)
    assert torch.equal(ours, check_in_place(kernel, problem, fresh))
    assert (ours - loud).abs().max() > 100, "nobody would have noticed"


def test_rows_behind_the_count_of_a_prefix_are_not_seen(kernel: Any) -> None:
    """A prefix that ends inside a page of which more is written, as that of ``View.before``. Not much louder: weights
    lose what a tile's power of two is too large for."""
    whole = of([(Layout.of([256, (10, 10)]), 256)], 2, 2)
    assert whole.stored is not None
    (group,) = whole.groups
    (first, _), (second, _) = group.extents
    whole.stored.v[second + 22 : second + KEYS] += 30
    pages = fill(whole)
    part = replace(whole, groups=[replace(group, extents=((first, KEYS), (second, 22)))])
    ours, of_all = (check_in_place(kernel, problem, pages) for problem in (part, whole))
    assert (of_all - ours).abs().max() > 5, "nobody would have noticed"


def test_a_pass_over_a_pool(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine does: a unit and a tail behind it are kept in pages, a target reads them, one plan with room is
    turned from one prefix to another, and pages change hands meanwhile."""
    monkeypatch.setattr("underpaint.attention.fp8.hybrid_attention_fp8", kernel)
    shape = CacheShape(2, 2, 64, torch.bfloat16)
    pool = PagePool(shape, FP8_TILES, 8 * shape.page_bytes(FP8_TILES, KEYS), "cpu")
    standing, seen = None, []
    for sizes in ((150, 20), (30, 260), (128, 5)):
        runs = tuple(pool.allocate(size) for size in sizes)
        of_prefix = [torch.randn(2, sum(sizes), 2, 64).bfloat16() for _ in range(2)]
        for layer, (k, v) in enumerate(of_prefix):
            stored, first = pool.stored(layer), 0
            assert isinstance(stored, PackedTiles)
            for run in runs:
                rows = slice(first, first + run.num_rows)
                pack_pages(k[rows], v[rows], stored, pool.slots([run]).int())
                first += run.num_rows
        layout, view = Layout.of([sum(sizes), (8, 9)]), View(pool, runs)
        groups = (RowGroup.of(layout, layout.num_rows, 0, view, "cpu"),)
        q, k, v = torch.randn(3, 72, 2, 64).bfloat16()
        if standing is None:
            standing = prepare(groups, Room(72, 1, 8))
        else:
            standing.refill(groups)
        assert isinstance(standing._kernel, InPlace)
        for layer in range(2):
            ours = standing(q, k, v, layer)
            assert torch.equal(ours, prepare(groups)(q, k, v, layer))
            before = [torch.cat(pair).float() for pair in zip(view.read(layer), (k, v), strict=True)]
            scores = torch.einsum("qhd,khd->hqk", q.float(), before[0]) * 64**-0.5
            exact = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), before[1])
            assert (ours - exact).square().mean() < 0.08**2 * exact.square().mean()
            seen.append(ours)
        for run in runs:
            pool.release(run)
    assert not any(torch.equal(seen[0], other) for other in seen[1:])


def test_the_check_of_a_gpu_runs(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With sizes for a CPU; and it says so where a page is not filled."""
    monkeypatch.setattr(check_on_gpu, "hybrid_attention_fp8", kernel)
    monkeypatch.setattr(check_on_gpu, "make_problem", lambda parts, *heads: make_problem(parts, 2, 2, 64, device="cpu"))
    parts = [(Layout.of([200, (8, 8), 3]), 200), (Layout.of([20, (5, 6), 3]), 0)]
    assert check_on_gpu.check_in_place(parts).startswith("ok")
    monkeypatch.setattr(check_on_gpu, "pack_pages", lambda k, v, pages, slots: pack_pages(k, v, pages, slots[:128]))
    assert check_on_gpu.check_in_place(parts).startswith("WRONG")


PACKING_MUTANTS = {
    "rows of the neighbour are packed too": ("count = tl.sum((behind == first + key).to(tl.int32))", "count = KEYS"),
    "only the first page of a block": ("tl.where(begins & (own > row), own, num_slots)", "own * 0 + num_slots"),
    "pages that are nobody's": ("(slot >= 0) & (slot % KEYS == 0)", "slot % KEYS <= 0"),
    "what was behind the rows stays": ("tl.trans(code))", "tl.trans(code), mask=(key < count)[None, :])"),
    "a power of two of neither": ("tl.store(facts_ptr, _power(exponent))", "tl.store(facts_ptr, _power(exponent * 0))"),
}  # fmt: skip


@pytest.mark.parametrize("mutant", PACKING_MUTANTS.values(), ids=PACKING_MUTANTS)
def test_the_tests_notice_faulty_packing(mutant: tuple[str, str], seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    faulty = faulty_module(pack_e4m3, mutant, tmp_path)
    with pytest.raises((AssertionError, IndexError)):
        assert_pages_equal(*pages_by(faulty, page_cases()["a run behind part of one"], 64, 5))


ATTENTION_MUTANTS = {
    "tiles in the order of the plan": ("gl.load(prefix_tiles_ptr + 2 * tile) // KEYS", "tile"),
    "the count for the slot": ("gl.load(prefix_tiles_ptr + 2 * tile)", "gl.load(prefix_tiles_ptr + 2 * tile + 1)"),
    "prefixes among the own tiles": ("_fetch(prefix_descs,", "_fetch(descs,"),
    "own tiles among the pages": ("_fetch(descs, tile * HEADS", "_fetch(prefix_descs, tile * HEADS"),
    "keys behind the count": ("limit - HALF, S_LAYOUT", "limit * 0 + KEYS, S_LAYOUT"),
}  # fmt: skip


@pytest.mark.parametrize("mutant", ATTENTION_MUTANTS.values(), ids=ATTENTION_MUTANTS)
def test_the_tests_notice(mutant: tuple[str, str], seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading in place with a fault in it fails."""
    monkeypatch.setattr(gluon_emulator, "DEADLOCK_SECONDS", 2.0)
    source = PATH.read_text()
    assert mutant[0] in source
    (tmp_path / PATH.name).write_text(source.replace(*mutant))
    faulty = load(tmp_path / PATH.name, seed, IMPORTS)
    problem = of([*MANY, (EDIT, 390)], 2, 2)
    with pytest.raises(AssertionError):
        check_in_place(faulty, problem, fill(problem))
