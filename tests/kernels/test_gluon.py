"""The Gluon kernel under ``gluon_emulator``, against the plain computation; what it leaves to Triton kernels runs under
Triton's interpreter."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gluon_emulator
import pytest
import torch
from fp8_cases import SEQUENCES
from gluon_emulator import Compiled, emulated, poison
from interpreter import interpreted  # noqa: F401 - a fixture for all

from underpaint import kernels
from underpaint.kernels.hybrid_attention_problems import Part, Problem, make_problem, raise_peaks
from underpaint.kernels.tiles import Room, RowShape
from underpaint.layout import Layout

FOLDER = Path(kernels.__file__).parent
FILES = ("gluon_walk.py", "softmax_bf16.py", "hybrid_attention_gluon.py")
"""The kernel's, the last its module."""


@pytest.fixture
def kernel(seed: int) -> Any:
    """The module, whose launches are emulated."""
    return load(FOLDER, seed)


def load(folder: Path, seed: int) -> Any:
    torch.manual_seed(seed)
    *imports, path = (folder / name for name in FILES)
    module, emulator = emulated(path, seed, imports)
    module._compiled = lambda *about: Compiled(module.hybrid_attention_gluon_kernel, emulator)
    return module


def check(kernel: Any, problem: Problem) -> None:
    """Twice with one plan: the queue must be wound back."""
    call = problem.runner(kernel)
    ours, again = call(), call()  # at once, or the second would find a copy of the first in the memory it gets
    error, plain = problem.error(ours)
    assert error < 2 * plain, f"error {error:.2e}, plain {plain:.2e}"
    assert torch.equal(again, ours)


def of(sequences: Sequence[Part], heads: int, kv_heads: int, head_dim: int = 64, codec: str = "plain") -> Problem:
    return poison(make_problem(sequences, heads, kv_heads, head_dim, codec=codec, device="cpu"))


@pytest.mark.parametrize("sequences", SEQUENCES.values(), ids=SEQUENCES)
def test_layouts(kernel: Any, sequences: list[Part]) -> None:
    check(kernel, of(sequences, 2, 2))


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 1, 64), (8, 2, 128), (1, 1, 128), (16, 1, 64)])
def test_heads(kernel: Any, heads: int, kv_heads: int, head_dim: int) -> None:
    check(kernel, of(SEQUENCES["many"], heads, kv_heads, head_dim))


@pytest.mark.parametrize("codec", ["fp8_v", "fp8"])
def test_quantised_prefixes(kernel: Any, codec: str) -> None:
    check(kernel, of(SEQUENCES["many"], 2, 1, codec=codec))


def test_split_keys(kernel: Any) -> None:
    """Few rows behind a long prefix: pieces, merged."""
    problem = of([(Layout.of([1500, (5, 5)]), 1500), (Layout.of([20, 30]), 20)], 1, 1)
    plan = kernel.plan_pass(problem.groups, problem.row_stop, RowShape.of(problem.q, problem.k))
    assert [launch.num_pieces for launch in plan.launches] == [4]
    check(kernel, problem)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_peaks_that_rise(kernel: Any, head_dim: int) -> None:
    check(kernel, raise_peaks(of([*SEQUENCES["many"], (Layout.of([900]), 700)], 2, 1, head_dim)))


def test_a_plan_with_room(kernel: Any) -> None:
    """Work items of nothing are not taken, and rows of nobody are finite."""
    problem = of([(Layout.of([149, (6, 7)]), 149), (Layout.of([(3, 4)]), 0)], 2, 1)
    room = Room(80, 4, 4)
    plan = kernel.plan_pass(problem.groups, problem.row_stop, RowShape.of(problem.q, problem.k), room=room)
    assert int(plan.launches[0].queue[0]) < len(plan.launches[0].work)
    q, k, v = (torch.cat([x, torch.randn(80 - len(x), *x.shape[1:]).to(x)]) for x in (problem.q, problem.k, problem.v))
    ours = kernel.hybrid_attention(q, k, v, problem.stored, plan)
    error, plain = problem.error(ours[: len(problem.q)])
    assert error < 2 * plain
    assert ours.isfinite().all()


def test_a_broken_sequence_breaks_no_other(kernel: Any) -> None:
    problem = of([(Layout.of([n, (5, 7), 9]), 0) for n in (20, 30, 3)], 2, 1)
    broken = problem.groups[1]
    others = torch.ones(len(problem.q), dtype=torch.bool)
    others[broken.first : broken.first + broken.num_rows] = False
    want = problem.runner(kernel)()[others]
    for x in (problem.k, problem.v):
        x[broken.first : broken.first + broken.num_rows] = float("nan")
    assert torch.equal(problem.runner(kernel)()[others], want)


MUTANTS = {
    "values are not waited for": ("    mbarrier.wait(ring[V_FULL].index(last), last_phase)\n", ""),
    "values are released before the product": (
        "    acc = warpgroup_mma_wait(0, deps=[acc_token])\n    mbarrier.arrive(ring[V_EMPTY].index(last), count=1)\n",
        "    mbarrier.arrive(ring[V_EMPTY].index(last), count=1)\n    acc = warpgroup_mma_wait(0, deps=[acc_token])\n",
    ),
    "rows are not waited for": ("        mbarrier.wait(pair_barriers.index(Q_FULL), turn & 1)\n", ""),
    "what was summed stays as it is": (
        "    acc = shrunk(acc, gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT)))\n",
        "",
    ),
    "a wrong phase": ("(turn & 1) ^ 1)\n        mbarrier.expect", "turn & 1)\n        mbarrier.expect"),
    "what is not valid stays": ("if num_valid < KEYS:", "if num_valid < 0:"),
    "one key too many": ("limit = row_stop - first", "limit = row_stop - first + 1"),
    "the queue is not wound back": ("gl.store(queue_ptr + 1, 0)", "gl.store(queue_ptr + 3, 0)"),
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_the_emulator_notices(
    mutant: tuple[str, str], seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel with a fault in it, of the kinds that only timing brings out on the chip, fails."""
    monkeypatch.setattr(gluon_emulator, "DEADLOCK_SECONDS", 2.0)
    monkeypatch.setattr(gluon_emulator, "COPY_SECONDS", 2e-2)
    sources = {name: (FOLDER / name).read_text() for name in FILES}
    assert any(mutant[0] in source for source in sources.values())
    for name, source in sources.items():
        (tmp_path / name).write_text(source.replace(*mutant))
    faulty = load(tmp_path, seed)
    problem = raise_peaks(of([*SEQUENCES["many"], (Layout.of([700, (5, 30)]), 700)], 4, 2, head_dim=128))
    with pytest.raises(AssertionError):
        check(faulty, problem)
