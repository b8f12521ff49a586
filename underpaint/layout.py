"""Where every row of a sequence stands, what it sees, and how a prefix divides into reusable parts.

The mask rule of every model of this package, in words:

    A text row sees the rows before it and itself. An image row sees everything before its image and the whole of
    its image. Nothing sees anything further.

In one integer a row: key ``k`` is visible to a row iff ``k < visible_stop[row]``. This module owns that rule; the
attention plan, the kernels' tiles and the dense oracle are derived from it and from nothing else.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Grid = tuple[int, int]
"""Height and width of an image in tokens."""


@dataclass(frozen=True)
class Segment:
    """A run of text, or one image, at rows [start, stop). ``grid`` is the image's, None for text."""

    kind: Literal["text", "image"]
    start: int
    stop: int
    grid: Grid | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.start < self.stop, f"empty or backward segment [{self.start}, {self.stop})"
        assert (self.kind == "image") == (self.grid is not None), "an image has a grid, text has none"
        if self.grid is not None:
            assert self.grid[0] * self.grid[1] == self.stop - self.start, f"grid {self.grid} does not fill its rows"


@dataclass(frozen=True)
class AttentionCall:
    """Rows [start, stop) of one segment and their last visible key: all see [0, stop) if not ``causal``, else
    each sees up to itself."""

    start: int
    stop: int
    causal: bool

    def visible_stop(self) -> npt.NDArray[np.int32]:
        """(stop - start,) one past the last key that each row sees."""
        if self.causal:
            return np.arange(self.start + 1, self.stop + 1, dtype=np.int32)
        return np.full(self.stop - self.start, self.stop, np.int32)


@dataclass(frozen=True)
class Span:
    """Rows [start, stop) that are shared between prefixes as a whole, or not at all."""

    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """The segments of one sequence, in order, without gaps, from row 0."""

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        stop = 0
        for segment in self.segments:
            assert segment.start == stop, f"segment starts at {segment.start}, the one before stops at {stop}"
            stop = segment.stop

    @classmethod
    def of(cls, parts: Iterable[int | Grid]) -> "Layout":
        """A layout from the length of each text run and the grid of each image, in order. Empty runs vanish.

        Images may touch: each remains its own block.
        """
        segments: list[Segment] = []
        start = 0
        for part in parts:
            if isinstance(part, int):
                stop, kind, grid = start + part, "text", None
            else:
                stop, kind, grid = start + part[0] * part[1], "image", part
            if stop > start:
                segments.append(Segment(kind, start, stop, grid))  # type: ignore[arg-type]
            start = stop
        return cls(tuple(segments))

    @property
    def num_rows(self) -> int:
        return self.segments[-1].stop if self.segments else 0

    @property
    def images(self) -> tuple[Segment, ...]:
        return tuple(s for s in self.segments if s.kind == "image")

    @property
    def trunk_stop(self) -> int:
        """One past the last row of the last image; rows from here on are the tail."""
        return self.images[-1].stop if self.images else 0

    def with_image(self, grid: Grid) -> "Layout":
        """This layout followed by one more image: a prefix becomes the sequence that paints a target."""
        start = self.num_rows
        return Layout((*self.segments, Segment("image", start, start + grid[0] * grid[1], grid)))

    def visible_stop(self) -> Tensor:
        """(num_rows,) int32: one past the last key that each row sees."""
        stops = [call.visible_stop() for call in self.plan(0, self.num_rows)]
        return torch.from_numpy(np.concatenate(stops)) if stops else torch.empty(0, dtype=torch.int32)

    def plan(self, start: int, stop: int) -> tuple[AttentionCall, ...]:
        """The attention calls of rows [start, stop), one a segment. The range never ends inside an image."""
        calls = []
        for segment in self.segments:
            first, last = max(segment.start, start), min(segment.stop, stop)
            if first >= last:
                continue
            cut = (first, last) != (segment.start, segment.stop)
            assert not (cut and segment.kind == "image"), f"rows [{start}, {stop}) cut an image"
            calls.append(AttentionCall(first, last, causal=segment.kind == "text"))
        return tuple(calls)

    def trunk_units(self) -> tuple[Span, ...]:
        """The trunk divided after each image: the text before an image, and the image."""
        stops = [image.stop for image in self.images]
        return tuple(Span(start, stop) for start, stop in zip([0, *stops], stops, strict=False))

    def paged_units(self, page_rows: int) -> tuple[Span, ...]:
        """Like ``trunk_units``, and each full page of text is a unit too. What is left at the end is none.

        Where a unit ends depends on nothing that comes after it.
        """
        units = []
        start = 0
        for segment in self.segments:
            stops = [segment.stop] if segment.grid else range(start + page_rows, segment.stop + 1, page_rows)
            for stop in stops:
                units.append(Span(start, stop))
                start = stop
        return tuple(units)

    def chunk_stop(self, start: int, max_rows: int) -> int:
        """Where a chunk of prefill that begins at ``start`` ends: after at most ``max_rows`` rows, but never inside an
        image, so after a whole image even if that is larger."""
        stop = min(start + max_rows, self.num_rows)
        for segment in self.segments:
            if segment.kind == "image" and segment.start < stop < segment.stop:
                return segment.start if segment.start > start else segment.stop
        return stop


PositionRule = Callable[[Layout], Tensor]
"""(num_rows, 3) int64 rotary positions of a layout, one column an axis; each model family has its own rule."""


def qwen_positions(layout: Layout) -> Tensor:
    """Qwen-Image 2.1: (frame, height, width), shape (num_rows, 3), int64.

    Text stands at p on all three axes and moves p on by one. An image stands at p on the frame axis, its rows and
    columns count from minus half its size (rounded up), and it moves p on by the larger of its sides.
    """
    columns = []
    position = 0
    for segment in layout.segments:
        if segment.grid is None:
            text = torch.arange(position, position + segment.stop - segment.start)
            columns.append(text[:, None].expand(-1, 3))
            position += len(text)
            continue
        height, width = segment.grid
        rows = torch.arange(-(height - height // 2), height // 2)
        cols = torch.arange(-(width - width // 2), width // 2)
        image = torch.stack([torch.full((height, width), position), *torch.meshgrid(rows, cols, indexing="ij")], -1)
        columns.append(image.reshape(-1, 3))
        position += max(height, width)
    return torch.cat(columns) if columns else torch.empty(0, 3, dtype=torch.int64)


def neo_positions(layout: Layout) -> Tensor:
    """NEO-Unify: (t, height, width), shape (num_rows, 3), int64.

    Text moves t on by one a row and stands at 0 on the other axes. All rows of an image share one t, an image moves t
    on by one, and its rows and columns count from 0.
    """
    columns = []
    position = 0
    for segment in layout.segments:
        num_rows = segment.stop - segment.start
        if segment.grid is None:
            text = torch.zeros(num_rows, 3, dtype=torch.int64)
            text[:, 0] = torch.arange(position, position + num_rows)
            columns.append(text)
            position += num_rows
            continue
        rows, cols = (torch.arange(side) for side in segment.grid)
        image = torch.stack([torch.full(segment.grid, position), *torch.meshgrid(rows, cols, indexing="ij")], -1)
        columns.append(image.reshape(-1, 3))
        position += 1
    return torch.cat(columns) if columns else torch.empty(0, 3, dtype=torch.int64)
