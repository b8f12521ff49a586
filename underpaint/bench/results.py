"""Measurements as files: a page of tables, the figures as JSON, and bars as SVG."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from underpaint.report import Report, Table, cell

LINE, BAR, GAP = 18, 13, 10
"""Heights in a drawing, in pixels: of a line, of the bar in it, and of the space between groups."""
LEFT, LONGEST, RIGHT = 270, 420, 60
"""Widths: of names, of the longest bar, and of a number."""
COLOURS = (("limit", "#c9ced6"), ("ours", "#2459c4"), ("underpaint", "#2459c4"))
"""How a name begins, and the colour of its bar: limits are pale, ours blue, and peers are ``PEER``."""
PEER = "#e08a3c"


@dataclass(frozen=True)
class Bars:
    """A group of bars: ``label``, and what is drawn, by name."""

    label: str
    values: Mapping[str, float]


def write(
    directory: Path,
    name: str,
    report: Report,
    found: Mapping[str, Any] | None = None,
    bars: Sequence[Bars] = (),
    what: str = "",
) -> None:
    """``name``.md, ``name``.json and, if there are ``bars``, ``name``.svg in ``directory``. ``found``: what the JSON
    says instead of the report's own cells. ``what``: see ``plot``."""
    directory.mkdir(parents=True, exist_ok=True)
    tables = "\n".join(f"\n## {table.title}\n\n{markdown(table)}" for table in report.tables)
    picture = [f"![]({name}.svg)", ""] if bars else []
    text = "\n".join([f"# {name.capitalize()}", "", *(f"{note}  " for note in report.notes), tables, "", *picture])
    (directory / f"{name}.md").write_text(text)
    (directory / f"{name}.json").write_text(json.dumps(report.as_json() if found is None else found, indent=1) + "\n")
    if bars:
        (directory / f"{name}.svg").write_text(plot(bars, what))


def markdown(table: Table) -> str:
    lines = [table.columns, ["---"] * len(table.columns), *([cell(value) for value in row] for row in table.rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(groups: Sequence[Bars], what: str) -> str:
    """As SVG: a line a bar, its name before it and its value behind it. ``what``: what the bars are so much of."""
    scale = LONGEST / max(value for group in groups for value in group.values.values())
    parts, y = [f'<text x="8" y="18" class="what">{escape(what)}</text>'], 30
    for group in groups:
        y += GAP
        parts.append(f'<text x="8" y="{y + BAR}" class="group">{escape(group.label)}</text>')
        y += LINE
        for name, value in group.values.items():
            width, shown = value * scale, f"{value:.0f}" if value >= 100 else f"{value:.3g}"
            colour = next((colour for start, colour in COLOURS if name.startswith(start)), PEER)
            parts.append(f'<text x="{LEFT - 6}" y="{y + BAR - 2}" text-anchor="end">{escape(name)}</text>')
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{width:.0f}" height="{BAR}" rx="2" fill="{colour}"/>')
            parts.append(f'<text x="{LEFT + width + 5:.0f}" y="{y + BAR - 2}">{shown}</text>')
            y += LINE
    style = "text{font:11px sans-serif;fill:#222}.group{font-weight:bold}.what{font-size:13px;font-weight:bold}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + LONGEST + RIGHT}" height="{y + GAP}">'
    paper = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head, f"<style>{style}</style>", paper, *parts, "</svg>"]) + "\n"
