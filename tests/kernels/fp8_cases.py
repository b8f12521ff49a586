"""Passes to test attention in e4m3 with, the kernel's module with its launches emulated, and what is allowed."""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from gluon_emulator import Compiled, emulated, poison
from torch import Tensor

from underpaint import kernels
from underpaint.kernels.hybrid_attention_problems import Part, Problem, make_problem
from underpaint.kernels.pack_e4m3 import pack_rows_reference
from underpaint.kernels.tiles import Launch, Plan, Room, RowShape, StoredKV
from underpaint.layout import Layout

HERE = Path(kernels.__file__).parent
PATH = HERE / "hybrid_attention_fp8.py"
IMPORTS = [HERE / f"{name}.py" for name in ("gluon_walk", "softmax_bf16", "rows_e4m3", "softmax_e4m3")]
EDIT = Layout.of([30, (9, 11), 20, (15, 16), 45])
SEQUENCES: dict[str, list[Part]] = {
    "text": [(Layout.of([300]), 0)],
    "image": [(Layout.of([(13, 21)]), 0)],
    "edit": [(EDIT, 0)],
    "behind one partly filled page": [(Layout.of([37, (10, 10)]), 37)],
    "behind pages, the last full": [(Layout.of([256, (10, 10)]), 256)],
    "behind pages, the last partly filled": [(EDIT, 149), (EDIT, 434 - 45)],
    "many": [(Layout.of([70]), 0), (EDIT, 149), (Layout.of([(5, 30)]), 0), (Layout.of([300, (8, 8)]), 300)],
}
MANY = SEQUENCES["many"]


def load(path: Path, seed: int, imports: Sequence[Path] = IMPORTS) -> Any:
    torch.manual_seed(seed)
    module, emulator = emulated(path, seed, imports)
    module._compiled = lambda *about: Compiled(module.hybrid_attention_fp8_kernel, emulator)
    return module


def faulty_module(module: ModuleType, mutant: tuple[str, str], folder: Path) -> Any:
    """The module once more, with one text in it exchanged for another; the interpreter wants a file."""
    source = Path(str(module.__file__)).read_text()
    assert mutant[0] in source
    path = folder / f"faulty_{Path(str(module.__file__)).name}"
    path.write_text(source.replace(*mutant))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    faulty = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(faulty)
    return faulty


def of(sequences: Sequence[Part], heads: int, kv_heads: int, head_dim: int = 64, codec: str = "plain") -> Problem:
    """Loud queries, so that a wrongly weighted key shows, and NaN in all slots that no prefix owns."""
    problem = make_problem(sequences, heads, kv_heads, head_dim, codec=codec, device="cpu")
    problem.q.mul_(2)
    return poison(problem)


def plan_of(kernel: Any, problem: Problem, room: Room | None = None) -> Plan:
    plan: Plan = kernel.plan_pass(problem.groups, problem.row_stop, RowShape.of(problem.q, problem.k), room=room)
    return plan


def rounded_rows(problem: Problem, launch: Launch) -> Problem:
    """The problem with queries and the pass's own keys and values as the kernels round them, in fp32."""
    scale = problem.q.float().abs().amax(-1, keepdim=True).clamp(min=2**-40) / 448
    q = (problem.q.float() * (1 / scale)).to(torch.float8_e4m3fn).float() * scale
    k, v = (pack_rows_reference(x, None, launch.own_tiles) for x in (problem.k, problem.v))
    return replace(problem, q=q, k=k, v=v)


def assert_allowed(ours: Tensor, want: Problem) -> None:
    """``want``: inputs as they were rounded. Weights are rounded too: by 2**-4 of themselves at most, or by 2**-16 of
    the largest where they are small."""
    size = replace(want, v=want.v.abs(), stored=want.stored and StoredKV(want.stored.k, want.stored.v.abs())).plain()
    expected = want.plain()
    num_keys = len(want.q) + (0 if want.stored is None else len(want.stored.k))
    allowed = (2**-4 + 2**-7) * size + 2**-8 * expected.abs() + 2**-16 * num_keys * size.amax(-1, keepdim=True)
    error = (ours.float() - expected).abs()
    assert (error <= allowed).all(), f"{(error / allowed).max():.2f} of what is allowed"
    # Roundings are not all alike: together they are far smaller.
    assert error.square().mean().sqrt() < 0.4 * allowed.square().mean().sqrt()
