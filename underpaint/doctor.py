"""``underpaint doctor``: what this machine has, what would be used of it, and why not the rest."""

import platform
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from underpaint.attention.choice import PREFERRED, why_not
from underpaint.config import ATTENTION_BACKENDS, FP8_CAPABILITY, EngineConfig, resolve
from underpaint.errors import BadConfig, CheckpointError
from underpaint.models import neo_unify, registry
from underpaint.report import Bytes, Cell, Report, Table, cell

HEAD_DIM = 128
"""Of both released models."""
PACKAGES = (
    "torch", "triton", "transformers", "diffusers", "huggingface_hub", "safetensors", "numpy", "pillow", "typer",
    "rich", "fastapi", "uvicorn", "prometheus-client", "structlog", "httpx", "fa3-fwd",
)  # fmt: skip
OPTIONAL = {
    "triton": "attention on GPUs", "fa3-fwd": "attention_backend fa3", "fastapi": "underpaint serve",
    "uvicorn": "underpaint serve", "prometheus-client": "underpaint serve", "structlog": "underpaint serve",
    "httpx": "underpaint serve",
}  # fmt: skip
ENOUGH_LOCKED = 1 << 30
"""Bytes of memory that a process should be allowed to lock where processes hand K/V over through host memory."""


@dataclass
class Findings:
    """``problems``: what keeps Underpaint from working here at all."""

    tables: list[Table] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def examine(device: str = "auto", checkpoint: Path | None = None) -> tuple[Report, list[str]]:
    """What was found, and the problems among it, one sentence each."""
    found = Findings()
    found.tables.append(Table("Machine", ("what", "is"), [*_machine()]))
    found.tables.append(Table("Packages", ("package", "version", "without it"), [*_packages(found.problems)]))
    try:
        config = resolve(EngineConfig(device=device))
    except BadConfig as error:
        found.problems.append(str(error))
    else:
        found.tables.append(Table(f"Attention on {config.device}", ("backend", "verdict"), [*_backends(config)]))
        found.tables.append(Table(f"Other choices on {config.device}", ("what", "is"), [*_choices(config)]))
    if checkpoint is not None:
        found.tables.append(Table("Checkpoint", ("what", "is"), [*_checkpoint(checkpoint, found.problems)]))
    notes = tuple(f"problem: {problem}" for problem in found.problems) or ("no problem found",)
    return Report(notes, tuple(found.tables)), found.problems


def _machine() -> Iterator[tuple[Cell, ...]]:
    yield "Python", f"{platform.python_version()} ({sys.executable})"
    yield "system", f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield "CPU threads", torch.get_num_threads()
    yield "CUDA of torch", torch.version.cuda or "none: this torch is for CPUs"
    if not torch.cuda.is_available():
        yield "GPUs", "none that torch can use"
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        free, total = torch.cuda.mem_get_info(i)
        memory = f"{cell(Bytes(free))} of {cell(Bytes(total))} free"
        yield f"cuda:{i}", f"{properties.name}, compute capability {properties.major}.{properties.minor}, {memory}"
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    low = "" if soft == resource.RLIM_INFINITY or soft >= ENOUGH_LOCKED else "; low for pinned host memory"
    yield "memory a process may lock", f"{_limit(soft)}, up to {_limit(hard)} (ulimit -l){low}"


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else cell(Bytes(value))


def _packages(problems: list[str]) -> Iterator[tuple[Cell, ...]]:
    for name in PACKAGES:
        try:
            yield name, version(name), ""
        except PackageNotFoundError:
            yield name, "not installed", OPTIONAL.get(name, "nothing works")
            if name not in OPTIONAL:
                problems.append(f"the package {name} is not installed")


def _backends(config: EngineConfig) -> Iterator[tuple[Cell, ...]]:
    where = (config.device, config.dtype, HEAD_DIM)
    chosen = next(name for name in PREFERRED if why_not(name, *where) is None)
    for name in ATTENTION_BACKENDS:
        reason = why_not(name, *where)
        can = "can be named" if reason is None else reason
        yield name, f"chosen by auto for {config.dtype} and head_dim {HEAD_DIM}" if name == chosen else can


def _choices(config: EngineConfig) -> Iterator[tuple[Cell, ...]]:
    yield "dtype", config.dtype
    yield "kv_codec", f"{config.kv_codec}; fp8_v and fp8 are there everywhere, fp8_tiles for attention_backend fp8"
    on_gpu = config.device.startswith("cuda")
    capable = on_gpu and torch.cuda.get_device_capability(config.device) >= FP8_CAPABILITY
    emulated = "in products of torch's own, to try it out" if not on_gpu else "no: needs compute capability 8.9"
    yield "quantize fp8", "by the tensor cores" if capable else emulated
    yield "CUDA graphs of steps", "where attention plans (triton, gluon, fp8)" if on_gpu else "no: needs a CUDA device"


def _checkpoint(root: Path, problems: list[str]) -> Iterator[tuple[Cell, ...]]:
    try:
        checkpoint = registry.inspect(root)
    except CheckpointError as error:
        problems.append(str(error))
        yield str(root), "cannot be used, see above"
        return
    yield "directory", str(root)
    yield "family", "SenseNova-U1" if isinstance(checkpoint, neo_unify.Checkpoint) else "Qwen-Image 2.1"
    yield "weights", Bytes(registry.num_bytes(checkpoint))
