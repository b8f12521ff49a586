"""Tables of facts that print as text and as JSON, and the description of a checkpoint."""

import platform
from dataclasses import dataclass
from typing import Any

import torch

from underpaint.config import EngineConfig
from underpaint.kv.codec import CODECS
from underpaint.models.qwen_image21 import Checkpoint
from underpaint.models.qwen_image21.model import MAX_REFERENCES, MAX_SIDE, SIZE_MULTIPLE, cache_shape


class Bytes(int):
    """A number of bytes: an int in JSON, with a unit in a table."""


Cell = str | int | float


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]]


@dataclass(frozen=True)
class Report:
    """``notes``: lines before the tables, such as hardware and versions."""

    notes: tuple[str, ...]
    tables: tuple[Table, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "notes": list(self.notes),
            "tables": [
                {"title": t.title, "rows": [dict(zip(t.columns, row, strict=True)) for row in t.rows]}
                for t in self.tables
            ],
        }


def cell(value: Cell) -> str:
    """A value as people read it."""
    if isinstance(value, Bytes):
        return _size(value)
    if isinstance(value, int):
        return f"{value:,}"
    return value if isinstance(value, str) else f"{value:.3f}"


def _size(num_bytes: int) -> str:
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"


def machine(device: str) -> str:
    """Hardware and versions, for the head of a benchmark."""
    name = (
        torch.cuda.get_device_name(device) if device.startswith("cuda") else f"CPU, {torch.get_num_threads()} threads"
    )
    return f"{name}; torch {torch.__version__}, Python {platform.python_version()}"


def describe(checkpoint: Checkpoint, config: EngineConfig) -> Report:
    """Parts, parameters, bytes, page size and limits of a checkpoint, from its headers."""
    parts = [
        (name, len(weights.tensors), weights.num_parameters, Bytes(weights.num_bytes))
        for name, weights in checkpoint.weights.items()
    ]
    total = (
        "total",
        sum(int(part[1]) for part in parts),
        sum(int(part[2]) for part in parts),
        Bytes(sum(weights.num_bytes for weights in checkpoint.weights.values())),
    )
    defaults = checkpoint.defaults
    resolution = defaults.reference_resolution
    tokens = (resolution // 16) ** 2
    shape = cache_shape(checkpoint.transformer, torch.bfloat16)
    codecs = [
        (name, Bytes(row := shape.row_bytes(codec)), Bytes(row * defaults.page_rows), Bytes(row * tokens))
        for name, codec in CODECS.items()
    ]
    limits: list[tuple[Cell, ...]] = [
        ("width and height", f"multiples of {SIZE_MULTIPLE}, {SIZE_MULTIPLE} to {MAX_SIDE}"),
        ("references", f"up to {MAX_REFERENCES}"),
        ("prompt", f"{config.max_prompt_tokens} tokens (max_prompt_tokens)"),
        ("default resolution", f"{resolution}x{resolution}, {tokens} tokens"),
        ("default steps", len(checkpoint.sample_sigmas or ()) or defaults.num_inference_steps),
    ]
    return Report(
        (f"{checkpoint.root}: Qwen-Image 2.1, {checkpoint.transformer.num_layers} layers",),
        (
            Table("Parts", ("part", "tensors", "parameters", "bytes"), [*parts, total]),
            Table(
                f"K/V cache, pages of {defaults.page_rows} rows",
                ("codec", "a row", "a page", f"a {resolution}x{resolution} reference"),
                list(codecs),
            ),
            Table("Limits", ("what", "limit"), limits),
        ),
    )
