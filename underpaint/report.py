"""Tables of facts that print as text and as JSON. Nothing here needs a model: a client imports it."""

import platform
import re
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from underpaint.errors import BadParameter


class Bytes(int):
    """A number of bytes: an int in JSON, with a unit in a table."""


Cell = str | int | float
WRONG = "WRONG"
"""How a cell begins that tells of something checked and found wrong."""


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

    @property
    def wrong(self) -> bool:
        """Whether something in it was checked and is wrong."""
        return any(isinstance(x, str) and x.startswith(WRONG) for t in self.tables for row in t.rows for x in row)

    def as_json(self) -> dict[str, Any]:
        return {
            "notes": list(self.notes),
            "tables": [
                {"title": t.title, "rows": [dict(zip(t.columns, row, strict=True)) for row in t.rows]}
                for t in self.tables
            ],
        }


def show(report: Report, console: Console) -> None:
    """Print a report as text."""
    for line in report.notes:
        console.print(line, highlight=False)
    for table in report.tables:
        shown = RichTable(*table.columns, title=table.title, title_justify="left", box=box.SIMPLE_HEAD)
        for row in table.rows:
            shown.add_row(*(cell(value) for value in row))
        console.print(shown)


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


def parse_bytes(text: str) -> int:
    """``24GiB``, ``24GB`` or a number of bytes. Raises BadParameter."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|[KMGT]i?B)", text.strip(), re.IGNORECASE)
    if found is None:
        raise BadParameter(f"{text!r} is not a size; write for example 24GiB", param="card")
    unit = found.group(2).upper()
    base = 1024 if "I" in unit else 1000
    return int(float(found.group(1)) * base ** (1 + "KMGT".index(unit[0]) if unit else 0))


def machine(device: str) -> str:
    """Hardware and versions, for the head of a benchmark."""
    import torch  # takes a second, which a client need not wait

    name = (
        torch.cuda.get_device_name(device) if device.startswith("cuda") else f"CPU, {torch.get_num_threads()} threads"
    )
    return f"{name}; torch {torch.__version__}, Python {platform.python_version()}"
