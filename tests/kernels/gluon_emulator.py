"""Runs Gluon kernels on the CPU: Triton's interpreter does not know them.

A module of kernels is loaded once more with stand-ins for Gluon: tensors are PyTorch's, scalars Python's, layouts
nothing. Each warp-specialised role is a thread, and what is asynchronous on the chip is so here, at its worst: a TMA
copy spoils its place at once and fills it later, a matrix product reads its operands as late as it may. So a buffer
that is released too early, a barrier waited for in the wrong phase, or none, shows as NaN, a wrong number, or a
deadlock. What only the compiler decides (registers, instructions) is not seen here.
"""

import importlib.util
import math
import random
import sys
import threading
import time
import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from underpaint.kernels.hybrid_attention_problems import Problem

DEADLOCK_SECONDS = 60.0
COPY_SECONDS = 1e-3
"""A TMA copy takes up to this long."""


class Int(int):
    """A scalar of a kernel: an int that stays one under arithmetic, and can be cast."""

    value = property(lambda self: int(self))

    def to(self, dtype: torch.dtype) -> "Int":
        return self


def _closed(name: str) -> Callable[..., Any]:
    def operate(self: Int, *others: Any) -> Any:
        result = getattr(int, name)(self, *(int(o) if isinstance(o, int) else o for o in others))
        return Int(result) if type(result) is int else result

    return operate


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "rshift", "lshift"):
    setattr(Int, f"__{_name}__", _closed(f"__{_name}__"))
    setattr(Int, f"__r{_name}__", _closed(f"__r{_name}__"))


@dataclass(frozen=True, eq=False)
class Pointer:
    """Into a flat tensor, by one offset or a tensor of them."""

    data: Tensor
    offset: Any = field(default_factory=lambda: Int(0))

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.data, self.offset + other)


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all expected bytes are there."""

    def __init__(self, core: "Core") -> None:
        self.core = core
        self.count = self.pending = self.bytes = self.phase = 0

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def change(self, arrivals: int, num_bytes: int) -> None:
        with self.core.changed:
            self.pending -= arrivals
            self.bytes += num_bytes
            assert self.pending >= 0, "more arrivals than the barrier counts"
            if self.pending == 0 and self.bytes == 0:
                self.phase, self.pending = self.phase ^ 1, self.count
            self.core.changed.notify_all()

    def wait(self, phase: int) -> None:
        self.core.wait_for(lambda: self.phase != phase)


class Shared:
    """Shared memory, or a view of it; at first what was left there."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    shape = property(lambda self: self.data.shape)

    def index(self, i: int) -> "Shared":
        return Shared(self.data[i])

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        return Shared(self.data.narrow(dim, start, length))

    def reshape(self, shape: Sequence[int]) -> "Shared":
        return Shared(self.data.view(*shape))

    def permute(self, order: Sequence[int]) -> "Shared":
        return Shared(self.data.permute(*order))

    def load(self, layout: object) -> Tensor:
        return self.data.clone()

    def store(self, value: Tensor) -> None:
        self.data.copy_(value)


class Barriers:
    def __init__(self, core: "Core", count: int) -> None:
        self.all = [Barrier(core) for _ in range(count)]

    def index(self, i: int) -> Barrier:
        return self.all[i]


@dataclass(frozen=True, eq=False)
class Descriptor:
    """A tensor as TMA sees it."""

    data: Tensor
    box: tuple[int, ...]
    layout: None = None

    @classmethod
    def from_tensor(cls, data: Tensor, box: Sequence[int], layout: None) -> "Descriptor":
        assert data.stride(-1) == 1
        return cls(data, tuple(box))

    @property
    def block_type(self) -> Any:
        return types.SimpleNamespace(nbytes=math.prod(self.box) * self.data.itemsize)

    def read(self, corner: Sequence[int]) -> Tensor:
        """The box at ``corner``, 0 outside of the tensor."""
        inside = tuple(slice(c, min(c + b, n)) for c, b, n in zip(corner, self.box, self.data.shape, strict=True))
        out = self.data.new_zeros(self.box)
        part = self.data[inside]
        out[tuple(slice(0, n) for n in part.shape)] = part
        return out


@dataclass(eq=False)
class Product:
    """A matrix product in flight. ``done``: its result, once it has been waited for."""

    a: Any
    b: Shared
    acc: Tensor | None
    done: Tensor | None = None

    def finish(self) -> None:
        if self.done is None:
            a = self.a.data if isinstance(self.a, Shared) else self.a
            product = a.float() @ self.b.data.float()
            self.done = product if self.acc is None else self.acc + product


class Abandoned(AssertionError):
    """Another role failed, or a copy did."""


class Core:
    """One program on one multiprocessor."""

    def __init__(self, program: int, num_programs: int, seed: int) -> None:
        self.program, self.num_programs = program, num_programs
        self.changed = threading.Condition(threading.RLock())
        self.random = random.Random(seed)
        self.failed = False
        self.inference = torch.is_inference_mode_enabled()
        self.products: dict[int, list[Product]] = defaultdict(list)
        self.met: dict[int, int] = defaultdict(int)
        self.copies: list[Callable[[], None]] = []

    def dawdle(self, probability: float) -> None:
        if self.random.random() < probability:
            time.sleep(self.random.random() * 4e-3)

    def wait_for(self, ready: Callable[[], bool]) -> None:
        self.dawdle(0.05)
        with self.changed:
            met = self.changed.wait_for(lambda: ready() or self.failed, DEADLOCK_SECONDS)
            if self.failed:
                raise Abandoned
            assert met, "deadlock"

    def copy(self, descriptor: Descriptor, corner: Sequence[int], barrier: Barrier, there: Shared) -> None:
        there.data.fill_(math.nan)

        def land() -> None:
            with torch.inference_mode(self.inference):
                there.data.copy_(descriptor.read(corner).view_as(there.data))
            try:
                barrier.change(0, -descriptor.block_type.nbytes)
            except AssertionError:
                with self.changed:
                    self.failed = True
                    self.changed.notify_all()

        threading.Timer(self.random.random() * COPY_SECONDS, land).start()

    def named_barrier(self, code: str, number: int) -> None:
        """``bar.sync`` and ``bar.arrive`` of 256 threads, 128 of them in each role."""
        with self.changed:
            self.met[number] += 1
            rounds = (self.met[number] + 1) // 2
            self.changed.notify_all()
        if "bar.sync" in code:
            self.wait_for(lambda: self.met[number] >= 2 * rounds)

    def specialise(self, roles: Sequence[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        """Raises what the first role to fail raised; the others then stop waiting."""

        def run(role: Callable[..., None], arguments: tuple[Any, ...]) -> None:
            try:
                with torch.inference_mode(self.inference):
                    role(*arguments)
                done.add(role)
            finally:
                with self.changed:
                    self.failed = self.failed or role not in done
                    self.changed.notify_all()

        done: set[Callable[..., None]] = set()
        with ThreadPoolExecutor(len(roles)) as pool:
            results = [pool.submit(run, *role) for role in roles]
        errors = [error for error in (result.exception() for result in results) if error is not None]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, Abandoned))


class Emulator:
    """The stand-ins; ``core`` is the program that runs."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.core = Core(0, 1, seed)

    def load(self, pointer: Pointer, mask: Tensor | None = None, other: int = 0) -> Any:
        if isinstance(pointer.offset, int):
            return Int(pointer.data[pointer.offset].item())
        if mask is None:
            return pointer.data[pointer.offset]
        return torch.where(mask, pointer.data[pointer.offset.where(mask, 0)], other)

    def store(self, pointer: Pointer, value: Any, mask: Tensor | None = None) -> None:
        if isinstance(pointer.offset, int):
            pointer.data[pointer.offset] = value
            return
        chosen = torch.ones_like(pointer.offset, dtype=torch.bool) if mask is None else mask.expand_as(pointer.offset)
        pointer.data[pointer.offset[chosen]] = value[chosen].to(pointer.data.dtype)

    def atomic_add(self, pointer: Pointer, value: int, sem: str = "acq_rel") -> Int:
        before = Int(pointer.data[pointer.offset].item())
        pointer.data[pointer.offset] += value
        return before

    def allocate(self, dtype: torch.dtype, shape: Sequence[int], layout: object) -> Shared | Barriers:
        if layout == "barriers":
            return Barriers(self.core, shape[0])
        left = torch.full(tuple(shape), -1 if dtype == torch.int32 else math.nan)
        return Shared(left.to(dtype))

    def multiply(self, a: Any, b: Shared, acc: Tensor, use_acc: bool = True, is_async: bool = False) -> Product:
        assert is_async
        product = Product(a, b, acc if use_acc else None)
        self.core.products[threading.get_ident()].append(product)
        return product

    def multiply_wait(self, num_outstanding: int, deps: Sequence[Product]) -> Any:
        issued = self.core.products[threading.get_ident()]
        self.core.dawdle(0.3)
        for product in issued[: len(issued) - num_outstanding]:
            product.finish()
        del issued[: len(issued) - num_outstanding]
        assert all(product.done is not None for product in deps), "a result is used that was not waited for"
        return deps[0].done if len(deps) == 1 else tuple(product.done for product in deps)

    def assembly(self, code: str, values: Sequence[Any]) -> Any:
        """The pieces of assembly that kernels have."""
        if "bar." in code:
            self.core.named_barrier(code, values[0])
            return None
        if "cvt.rn.satfinite.e4m3x2.f32" in code:  # four values to a word
            return torch.stack([*values], -1).to(torch.float8_e4m3fn).view(torch.int32).squeeze(-1)
        if "cvt.rn.bf16x2.f32" in code:
            return values[0].bfloat16()
        if "mul.f32" in code:
            return values[0] * values[1]
        assert code == "mov.b32 $0, $1;", code  # four of a word to its four values
        return values[0][..., ::4].contiguous().view(torch.float8_e4m3fn)

    def language(self) -> types.ModuleType:
        nothing = lambda *arguments, **options: None  # noqa: E731
        gl: Any = types.ModuleType("triton.experimental.gluon.language")
        gl.float32, gl.bfloat16, gl.int32, gl.int64 = torch.float32, torch.bfloat16, torch.int32, torch.int64
        gl.float8e4nv = torch.float8_e4m3fn
        gl.constexpr = lambda value: Int(value) if isinstance(value, int) else value
        gl.SliceLayout = gl.BlockedLayout = gl.NVMMADistributedLayout = gl.DotOperandLayout = nothing
        gl.SwizzledSharedLayout, gl.DistributedLinearLayout, gl.thread_barrier = nothing, nothing, nothing
        gl.NVMMASharedLayout = types.SimpleNamespace(get_default_for=nothing)
        gl.static_range = lambda *bounds: map(Int, range(*bounds))
        gl.program_id = lambda axis: Int(self.core.program)
        gl.num_programs = lambda axis: Int(self.core.num_programs)
        gl.load, gl.store, gl.atomic_add, gl.allocate_shared_memory = (
            self.load,
            self.store,
            self.atomic_add,
            self.allocate,
        )
        gl.arange = lambda start, stop, layout: torch.arange(start, stop)
        gl.full = lambda shape, value, dtype, layout: torch.full(tuple(shape), value, dtype=dtype)
        gl.zeros = lambda shape, dtype, layout: torch.zeros(tuple(shape), dtype=dtype)
        gl.zeros_like, gl.exp2, gl.log2, gl.abs = torch.zeros_like, torch.exp2, torch.log2, torch.abs
        gl.split = lambda x: x.unbind(-1)
        gl.join = lambda x, y: torch.stack([x, y], -1)
        gl.convert_layout = lambda x, layout: x
        gl.where, gl.maximum, gl.max = _where, _maximum, _max
        gl.sum = lambda x, axis: x.sum(axis)
        gl.inline_asm_elementwise = lambda code, constraints, values, **rest: self.assembly(code, values)
        gl.warp_specialize = lambda roles, num_warps, num_registers: self.core.specialise(roles)
        return gl

    def hopper(self) -> types.ModuleType:
        module: Any = types.ModuleType("triton.experimental.gluon.language.nvidia.hopper")
        module.fence_async_shared = lambda: None
        module.tma = types.SimpleNamespace(async_copy_global_to_shared=lambda *args: self.core.copy(*args))
        module.mbarrier = types.SimpleNamespace(
            MBarrierLayout=lambda: "barriers",
            init=lambda barrier, count: barrier.init(count),
            expect=lambda barrier, num_bytes: barrier.change(1, num_bytes),
            arrive=lambda barrier, count, pred=True: pred and barrier.change(count, 0),
            wait=lambda barrier, phase, pred=True: pred and barrier.wait(phase),
        )
        module.warpgroup_mma, module.warpgroup_mma_wait = self.multiply, self.multiply_wait
        return module

    def run(self, kernel: Callable[..., None], num_programs: int, arguments: Sequence[Any]) -> None:
        """All programs, one after the other."""
        given = [
            Pointer(_flat(x)) if isinstance(x, Tensor) else Int(x) if type(x) in (int, bool) else x for x in arguments
        ]
        for program in range(num_programs):
            self.core = Core(program, num_programs, self.seed + program)
            kernel(*given)


def _where(condition: Any, a: Any, b: Any) -> Any:
    if not isinstance(condition, Tensor):
        return a if condition else b
    return torch.where(condition, a, b)


def _maximum(a: Any, b: Any) -> Any:
    return torch.maximum(a, torch.as_tensor(b)) if isinstance(a, Tensor) else Int(max(a, b))


def _max(x: Tensor, axis: int) -> Any:
    if x.ndim > 1:
        return x.amax(axis)
    return x.max().item() if x.is_floating_point() else Int(x.max().item())


def _flat(x: Tensor) -> Tensor:
    """From the first value of ``x`` to the last, as they lie in memory."""
    length = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return x.as_strided((length,), (1,))


def emulated(path: Path, seed: int, imports: Sequence[Path] = ()) -> tuple[Any, Emulator]:
    """The module at ``path`` with its Gluon emulated, and the emulator. ``imports``: modules of kernels from which it
    has functions."""
    emulator = Emulator(seed)
    gluon: Any = types.ModuleType("triton.experimental.gluon")
    gluon.jit = gluon.constexpr_function = lambda function: function
    gluon.language = emulator.language()
    experimental: Any = types.ModuleType("triton.experimental")
    experimental.gluon = gluon
    host: Any = types.ModuleType("triton.experimental.gluon.nvidia.hopper")
    host.TensorDescriptor = Descriptor
    with pytest.MonkeyPatch.context() as patch:
        for module in (experimental, gluon, gluon.language, emulator.hopper(), host):
            patch.setitem(sys.modules, module.__name__, module)
        for imported in imports:
            patch.setitem(sys.modules, f"underpaint.kernels.{imported.stem}", _load(imported))
        return _load(path), emulator


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"emulated_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


class Compiled:
    """What stands for a compiled kernel: its launches are emulated."""

    def __init__(self, kernel: Callable[..., None], emulator: Emulator) -> None:
        self.kernel, self.emulator = kernel, emulator

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: self.emulator.run(self.kernel, grid[0], arguments)


def poison(problem: Problem) -> Problem:
    """NaN in all slots that no prefix owns."""
    if problem.stored is not None:
        free = torch.ones(len(problem.stored.k), dtype=torch.bool)
        for slot, count in (extent for group in problem.groups for extent in group.extents):
            free[slot : slot + count] = False
        for x in (problem.stored.k, problem.stored.v):
            x[free] = 127 if x.dtype == torch.uint8 else float("nan")  # 127 is NaN in e4m3
    return problem
