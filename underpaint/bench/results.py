"""Measurements as files: a page of tables, the figures as JSON, and bars as SVG."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from underpaint.report import Report, Table, cell

BAR, GAP, LONGEST, LEFT, COLUMN = 7, 6, 240, 180, 110
"""Of a drawing, in pixels: heights of a bar and of a space, and widths of the longest bar, labels, and a name."""


@dataclass(frozen=True)
class Bars:
    """A group of bars: ``label``, and what is drawn, by name."""

    label: str
    values: Mapping[str, float]


def write(
    directory: Path, name: str, report: Report, found: Mapping[str, Any] | None = None, bars: Sequence[Bars] = ()
) -> None:
    """``name``.md, ``name``.json and, if there are ``bars``, ``name``.svg in ``directory``. ``found``: what the JSON
    says instead of the report's own cells."""
    directory.mkdir(parents=True, exist_ok=True)
    tables = "\n".join(f"\n## {table.title}\n\n{markdown(table)}" for table in report.tables)
    picture = [f"![]({name}.svg)", ""] if bars else []
    text = "\n".join([f"# {name.capitalize()}", "", *(f"{note}  " for note in report.notes), tables, "", *picture])
    (directory / f"{name}.md").write_text(text)
    (directory / f"{name}.json").write_text(json.dumps(report.as_json() if found is None else found, indent=1) + "\n")
    if bars:
        (directory / f"{name}.svg").write_text(plot(bars))


def markdown(table: Table) -> str:
    lines = [table.columns, ["---"] * len(table.columns), *([cell(value) for value in row] for row in table.rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(groups: Sequence[Bars]) -> str:
    """As SVG, a colour a name; the longest bar is as wide as the drawing allows."""
    names = list(dict.fromkeys(name for group in groups for name in group.values))
    hue = {name: f"hsl({360 * i // len(names)} 60% 45%)" for i, name in enumerate(names)}
    scale = LONGEST / max(value for group in groups for value in group.values.values())
    parts, y = [], 20
    for i, name in enumerate(names):
        parts.append(f'<text x="{LEFT + COLUMN * i}" y="12" fill="{hue[name]}">{name}</text>')
    for group in groups:
        parts.append(f'<text x="4" y="{y + BAR * len(group.values) / 2 + 4}">{group.label}</text>')
        for name, value in group.values.items():
            width, shown = value * scale, f"{value:.0f}" if value >= 100 else f"{value:.3g}"
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{width:.0f}" height="{BAR}" fill="{hue[name]}"/>')
            parts.append(f'<text x="{LEFT + width + 3:.0f}" y="{y + BAR}">{shown}</text>')
            y += BAR
        y += GAP
    style = "<style>text{font:7px sans-serif}</style>"
    width = LEFT + max(COLUMN * len(names), LONGEST + COLUMN)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}">{style}'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"
