"""Attention in e4m3: packing under Triton's interpreter, the Gluon kernel under ``gluon_emulator``, against the plain
computation on inputs that were rounded to e4m3 as the kernels round them."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gluon_emulator
import pytest
import torch
from fp8_cases import (
    EDIT,
    HERE,
    IMPORTS,
    MANY,
    PATH,
    SEQUENCES,
    assert_allowed,
    load,
    of,
    plan_of,
    rounded_rows,
)
from interpreter import interpreted  # noqa: F401 - a fixture for all
from torch import Tensor

from underpaint.kernels.hybrid_attention_problems import Part, Problem, make_problem
from underpaint.kernels.hybrid_attention_triton import plan_pass
from underpaint.kernels.pack_e4m3 import key_at, pack_launch, pack_rows_reference
from underpaint.kernels.packed_tiles import PackedTiles
from underpaint.kernels.tiles import Plan, Room, RowShape, StoredKV, TileShape, WorkFields
from underpaint.layout import Layout


@pytest.fixture
def kernel(seed: int) -> Any:
    """The module, whose launches are emulated."""
    return load(PATH, seed)


def rounded(problem: Problem, plan: Plan) -> Problem:
    """The problem with queries, keys and values as the kernels round them, in fp32."""
    (launch,) = plan.launches
    stored = problem.stored
    if stored is not None:
        pairs = ((stored.k, stored.k_scale), (stored.v, stored.v_scale))
        stored = StoredKV(*(pack_rows_reference(*pair, launch.prefix_tiles) for pair in pairs))
    return replace(rounded_rows(problem, launch), stored=stored)


def check(kernel: Any, problem: Problem, room: Room | None = None, tile: TileShape | None = None) -> None:
    """Twice with one plan: the queue must be wound back."""
    plan = plan_of(kernel, problem, room)
    if tile is not None:
        plan = kernel.plan_pass(problem.groups, problem.row_stop, RowShape.of(problem.q, problem.k), tile)
    inputs = (problem.q, problem.k, problem.v, problem.stored)
    ours, again = (kernel.hybrid_attention(*inputs, plan) for _ in range(2))
    assert torch.equal(ours, again)
    assert_allowed(ours, rounded(problem, plan))


def uneven(kernel: Any, problem: Problem) -> Problem:
    """Values that differ from key tile to key tile by up to 2**12, and keys that get louder from row to row."""
    (launch,) = plan_of(kernel, problem).launches
    assert problem.stored is not None
    for x, tiles in ((problem.v, launch.own_tiles), (problem.stored.v, launch.prefix_tiles)):
        for row, count in tiles.tolist():
            x[row : row + count] *= 2.0 ** int(torch.randint(-6, 7, ()))
    for x in (problem.k, problem.stored.k):
        x *= torch.linspace(0.1, 2, len(x), dtype=x.dtype)[:, None, None]
    return problem


@pytest.mark.parametrize("sequences", SEQUENCES.values(), ids=SEQUENCES)
def test_layouts(kernel: Any, sequences: list[Part]) -> None:
    check(kernel, of(sequences, 2, 2))


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 1, 64), (8, 2, 128), (1, 1, 128), (16, 1, 64)])
def test_heads(kernel: Any, heads: int, kv_heads: int, head_dim: int) -> None:
    check(kernel, of(MANY, heads, kv_heads, head_dim))


@pytest.mark.parametrize("codec", ["fp8_v", "fp8"])
def test_quantised_prefixes(kernel: Any, codec: str) -> None:
    check(kernel, of(MANY, 2, 1, codec=codec))


@pytest.mark.parametrize("num_stages", [2, 3, 6])
def test_rings_of_other_lengths(kernel: Any, num_stages: int) -> None:
    check(kernel, of(MANY, 2, 1), tile=replace(kernel.choose_tile(64), num_stages=num_stages))


def test_peaks_that_are_followed_at_once(kernel: Any) -> None:
    kernel.SLACK = 0
    check(kernel, of(MANY, 2, 1))


def test_key_tiles_of_all_sizes(kernel: Any) -> None:
    """Values and keys that differ by thousands from tile to tile, each of which has its own power of two, and peaks
    that rise by more than they may lag."""
    check(kernel, uneven(kernel, of(MANY, 2, 1)))


def test_values_of_a_tile_that_are_all_zero(kernel: Any) -> None:
    """Their weights count all the same."""
    problem = of([(Layout.of([256, (10, 10)]), 256)], 2, 2)
    assert problem.stored is not None
    problem.stored.v[:128] = 0
    check(kernel, problem)


def test_rows_of_one_product(kernel: Any) -> None:
    """q, k and v side by side, as a fused product leaves them."""
    problem = of(MANY, 4, 2)
    joined = torch.cat([problem.q, problem.k, problem.v], dim=1)
    q, k, v = joined.split([4, 2, 2], dim=1)
    check(kernel, replace(problem, q=q, k=k, v=v))


def test_split_keys(kernel: Any) -> None:
    """Few rows behind a long prefix: pieces, merged."""
    problem = of([(Layout.of([1500, (5, 5)]), 1500), (Layout.of([20, 30]), 20)], 1, 1)
    assert [launch.num_pieces for launch in plan_of(kernel, problem).launches] == [4]
    check(kernel, problem)


def test_groups_of_few_rows_stay_in_16_bits(kernel: Any) -> None:
    problem = of([(Layout.of([300, 3]), 300), (Layout.of([200]), 0)], 2, 2)
    launches = plan_of(kernel, problem).launches
    assert [(launch.shape.kernel, int(launch.work[:, 1].sum())) for launch in launches] == [("fp8", 200), ("triton", 3)]


def test_a_plan_with_room_is_turned_to_other_prefixes(kernel: Any) -> None:
    """What was planned for one pass runs another: groups that begin elsewhere, behind longer prefixes. Rows of nobody
    are finite."""
    room = Room(420, 4, 8)
    first, second = (
        of(parts, 2, 1)
        for parts in (
            [(Layout.of([20, (6, 7)]), 20), (Layout.of([(3, 9)]), 0)],
            [(EDIT, 149), (Layout.of([400, 99]), 400)],
        )
    )
    plan = plan_of(kernel, first, room)
    plan_of(kernel, second, room).copy_into(plan)
    assert int(plan.launches[0].queue[0]) < len(plan.launches[0].work)
    pad = room.num_rows - len(second.q)
    q, k, v = (torch.cat([x, torch.randn(pad, *x.shape[1:]).to(x)]) for x in (second.q, second.k, second.v))
    ours = kernel.hybrid_attention(q, k, v, second.stored, plan)
    assert ours.isfinite().all()
    alone = kernel.hybrid_attention(second.q, second.k, second.v, second.stored, plan_of(kernel, second))
    assert second.relative_error(ours[: len(second.q)]) < 1.1 * second.relative_error(alone) < 0.1


def test_a_broken_sequence_breaks_no_other(kernel: Any) -> None:
    problem = of([(Layout.of([n, (5, 7), 9]), 0) for n in (20, 30, 3)], 2, 1)
    broken = problem.groups[1]
    others = torch.ones(len(problem.q), dtype=torch.bool)
    others[broken.first : broken.first + broken.num_rows] = False
    want = problem.runner(kernel)()
    for value in (float("nan"), float("inf")):
        for x in (problem.k, problem.v):
            x[broken.first : broken.first + broken.num_rows] = value
        ours = problem.runner(kernel)()
        assert torch.equal(ours[others], want[others])
        assert ours[~others].isnan().all()


def test_the_expected_error(kernel: Any) -> None:
    """What a GPU is held to: as derived, for inputs of a standard normal distribution."""
    problem = make_problem([(Layout.of([500, (20, 20)]), 500)], 2, 2, 128, device="cpu")
    assert 0.04 < problem.relative_error(problem.runner(kernel)()) < kernel.EXPECTED_ERROR


def test_own_tiles_of_a_plan(seed: int) -> None:
    """Every work item knows the packed tile of each of its own keys."""
    torch.manual_seed(seed)
    problem = of([*MANY, (Layout.of([900, 60]), 900)], 1, 1)
    row_shape, tile = RowShape.of(problem.q, problem.k), TileShape(128, 128, 4, 4, "fp8")
    for room in (None, Room(len(problem.q) + 100, 6, 20)):
        (launch,) = plan_pass(problem.groups, problem.row_stop, row_shape, tile, room).launches
        tiles = launch.own_tiles.tolist()
        for item, (own_tile,) in zip(launch.work.tolist(), launch.own_tile.tolist(), strict=True):
            work = WorkFields(*item)
            if work.num_rows < 0:
                continue  # room
            for start, stop in ((work.own_start, work.own_stop), (work.masked_start, work.masked_stop)):
                for row in range(start, stop, 128):
                    first, count = tiles[own_tile + (row - work.own_start) // 128]
                    assert (first, count) == (row, min(128, work.own_end - row))


def unpacked(packed: PackedTiles, tile: int, head: int) -> tuple[Tensor, Tensor]:
    """K and V of one tile and head, (keys, head_dim) fp32."""
    keys, head_dim, place = packed.keys, packed.head_dim, tile * packed.kv_heads + head
    k_scale, exponent, unit = packed.facts[place, :3]
    assert unit == 2**-exponent
    k = packed.k[place * keys : (place + 1) * keys].float() * k_scale
    first, second = (packed.v[(2 * place + half) * head_dim :][:head_dim].float() / unit for half in range(2))
    v = torch.empty(keys, head_dim)
    v[[key_at.fn(p) for p in range(keys)]] = torch.cat([first, second], dim=1).T
    return k, v


@pytest.mark.parametrize("codec", ["plain", "fp8_v", "fp8"])
def test_packing(kernel: Any, codec: str) -> None:
    """To the bit, and 0 where there is no key."""
    problem = of(MANY, 2, 2, 128 if codec == "plain" else 64, codec)
    assert problem.stored is not None
    (launch,) = plan_of(kernel, problem).launches
    packed = pack_launch(problem.k, problem.v, problem.stored, launch)
    want = rounded(problem, plan_of(kernel, problem))
    assert want.stored is not None
    numbered = [(row, count, want.k, want.v) for row, count in launch.own_tiles.tolist()]
    numbered += [(row, count, want.stored.k, want.stored.v) for row, count in launch.prefix_tiles.tolist()]
    for tile, (row, count, *rows) in enumerate(numbered):
        for head in range(2):
            for ours, exact in zip(unpacked(packed, tile, head), rows, strict=True):
                assert torch.equal(ours[:count], exact[row : row + count, head])
                assert not ours[count:].any()


@pytest.mark.parametrize("bits", [0x7FC0, 0x7FFF, 0x7F80, -1, -0x80])
def test_packing_what_is_not_finite(kernel: Any, bits: int) -> None:
    """It becomes NaN, its tile has the largest exponent, and no other tile is any different."""
    problem = of(MANY, 2, 2)
    (launch,) = plan_of(kernel, problem).launches
    before = pack_launch(problem.k, problem.v, problem.stored, launch)
    problem.v.view(torch.int16)[5, 1, 3] = bits
    packed = pack_launch(problem.k, problem.v, problem.stored, launch)
    (broken,) = (i for i, (row, count) in enumerate(launch.own_tiles.tolist()) if row <= 5 < row + count)
    _, v = unpacked(packed, broken, 1)
    row = 5 - int(launch.own_tiles[broken, 0])
    assert v[row, 3].isnan()
    assert v.isnan().sum() == 1
    place = broken * packed.kv_heads + 1
    assert packed.facts[place, 1] == 120
    others = torch.arange(len(packed.facts)) != place
    assert torch.equal(packed.facts[others, :3], before.facts[others, :3])


def test_the_order_of_values_is_that_of_the_weights() -> None:
    """The thread that holds columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of 16 scores feeds places 4 t to 4 t + 3."""
    for thread in range(4):
        held = [16 + 2 * thread + i for i in (0, 1, 8, 9)]
        assert [key_at.fn(16 + 4 * thread + i) for i in range(4)] == held


MUTANTS = {
    "values are not waited for": ("    mbarrier.wait(ring[V_FULL].index(stage), phase)\n    scores", "    scores"),
    "values are released before the product": (
        "    values_half = values.slice(HEAD_DIM, HEAD_DIM).permute((1, 0))\n    acc_token",
        "    mbarrier.arrive(ring[V_EMPTY].index(last), count=1)\n"
        "    values_half = values.slice(HEAD_DIM, HEAD_DIM).permute((1, 0))\n    acc_token",
    ),
    "halves of values are exchanged": ("values.slice(0, HEAD_DIM)", "values.slice(HEAD_DIM, HEAD_DIM)"),
    "one half is hidden like the other": ("hide(second_scores, limit - HALF", "hide(second_scores, limit"),
    "the first tile of a group": ("own_tile = gl.load(own_tile_ptr + item)", "own_tile = 0"),
    "own tiles instead of the prefix's": ("number = num_own_tiles + tile", "number = tile"),
    "a wrong head": ("place = number * HEADS + head", "place = number * HEADS"),
    "facts of another tile": ("facts(tiles[FACTS].index(stage))\n    if", "facts(tiles[FACTS].index(last))\n    if"),
    "the queue is not wound back": ("gl.store(queue_ptr + 1, 0)", "gl.store(queue_ptr + 3, 0)"),
    "the sum does not shrink": ("sums * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]", "sums"),
    "exponents of values do not count": ("of_tile * unit", "of_tile"),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_the_tests_notice(mutant: tuple[str, str], seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel with a fault in it fails."""
    monkeypatch.setattr(gluon_emulator, "DEADLOCK_SECONDS", 2.0)
    monkeypatch.setattr(gluon_emulator, "COPY_SECONDS", 2e-2)
    sources = {path.name: path.read_text() for path in (PATH, *IMPORTS)}
    assert any(mutant[0] in source for source in sources.values())
    for name, source in sources.items():
        (tmp_path / name).write_text(source.replace(*mutant))
    faulty = load(tmp_path / PATH.name, seed, [tmp_path / path.name for path in IMPORTS])
    problem = of([*MANY, (Layout.of([100, (10, 20), 150]), 0)], 2, 2)
    with pytest.raises(AssertionError):
        check(faulty, uneven(faulty, problem), tile=replace(faulty.choose_tile(64), num_stages=2))


def test_what_it_compiles_to(tmp_path: Path) -> None:
    """No spills. Of products there are, in each of two consumers, before, in and behind the loops, two groups to be
    waited for: ptxas has not let them run one by one. Softmax stands beside them, 64 values of a tile in a thread, and
    no byte is moved between a weight's conversion and its product."""
    path = os.pathsep.join([str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    script = str(Path(__file__).parent / "fp8_report.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    attention = [case for case in reports if case["kernel"] == "fp8"]
    packing = [case for case in reports if case["kernel"] == "packing"]
    assert len(attention) == 5
    finishing = [case for case in reports if case["kernel"] == "finishing"]
    assert len(packing) == 6
    assert len(finishing) == 2
    for case in reports:
        assert case["local"] == case["stack"] == 0, case
        assert case["shared_memory"] <= case["shared_memory_limit"], case
    for case in attention:
        assert case["waits"] == 2 * (2 + 2 * 2 + 2), case
        assert case["overlapped_exponentials"] >= 2 * 2 * 64, case
        assert case["moved_bytes"] <= 8, case
    for case in packing:
        assert case["wide_stores"] > 0, case
        assert case["waits"] > 0, case
        assert case["conversions"] > 0, case
    for case in finishing:
        assert case["waits"] > 0, case
        assert case["conversions"] > 0, case
        assert not case["adjacent"] or case["shared_memory"] == 0, "rows stay with the threads that read them"
