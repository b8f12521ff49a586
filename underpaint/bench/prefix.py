"""What sharing trunks saves: rows prefilled and K/V bytes, measured on a model and planned for the released one."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

from underpaint.kv.codec import CODECS
from underpaint.kv.pool import PAGE_ROWS, pages_for
from underpaint.layout import Layout
from underpaint.models.qwen_image21 import Condition
from underpaint.models.qwen_image21.condition import prefix_layout
from underpaint.models.qwen_image21.model import cache_shape
from underpaint.models.qwen_image21.transformer import TransformerConfig
from underpaint.pipeline import Pipeline
from underpaint.report import Bytes, Report, Table, machine

NUM_REFERENCES = (1, 2, 4)
PROMPT, NEXT_PROMPT, NEGATIVE_PROMPT = "make it red", "make it blue, please", ""
RELEASED_GRID = (64, 64)  # 1024 x 1024 pixels


def prefix(pipeline: Pipeline) -> Report:
    """Guided edits with 1, 2 and 4 references: each branch alone, both together, then a second request."""
    generator = np.random.default_rng(0)
    side = pipeline.service.qwen.checkpoint.defaults.reference_resolution
    pictures = [
        Image.fromarray(generator.integers(0, 256, (side, side, 4), dtype=np.uint8)) for _ in range(max(NUM_REFERENCES))
    ]
    measured = [_measure(pipeline, pictures[:num]) for num in NUM_REFERENCES]
    planned = [_plan(pipeline, num) for num in NUM_REFERENCES]
    columns = ("refs", "rows alone", "rows shared", "2nd request", "K/V alone", "K/V shared", "ratio")
    return Report(
        (
            machine(pipeline.service.config.device),
            "Two guidance branches. Alone: each branch with a prefix of its own. 2nd request: rows for another prompt.",
        ),
        (
            Table(f"Measured, {side}x{side}, pages of {pipeline.service.pool.page_rows} rows", columns, measured),
            Table(f"Plan for the released 7B, 1024x1024, bf16, pages of {PAGE_ROWS} rows", columns, planned),
        ),
    )


def _measure(pipeline: Pipeline, pictures: Sequence[Image.Image]) -> tuple[str | int | float, ...]:
    """One line of the first table: rows the runner prefilled and bytes the pool held, with the cache emptied before
    each branch, once before both, and not at all."""
    model = pipeline.service.qwen
    references = [model.reference(p, model.checkpoint.defaults.reference_resolution) for p in pictures]
    branches = [model.condition(prompt, references) for prompt in (PROMPT, NEGATIVE_PROMPT)]
    unshared = [_lease(pipeline, [branch], clear=True) for branch in branches]
    shared = _lease(pipeline, branches, clear=True)
    second = [model.condition(prompt, references) for prompt in (NEXT_PROMPT, NEGATIVE_PROMPT)]
    rows_second, _ = _lease(pipeline, second, clear=False)
    rows_unshared, bytes_unshared = (sum(column) for column in zip(*unshared, strict=True))
    return _line(len(pictures), rows_unshared, shared[0], rows_second, bytes_unshared, shared[1])


def _lease(pipeline: Pipeline, conditions: list[Condition], clear: bool) -> tuple[int, int]:
    if clear:
        pipeline.service.tree.clear()
    before = pipeline.service.runner.rows_prefilled
    with pipeline.service.prefixes.lease(conditions):
        return pipeline.service.runner.rows_prefilled - before, pipeline.service.pool.used_bytes


def _plan(pipeline: Pipeline, num: int) -> tuple[str | int | float, ...]:
    """The same line for the released sizes, by arithmetic; text is counted by this checkpoint's tokenizer. Unshared,
    a branch is one contiguous run of pages, the tightest that a private cache can be."""
    tokenizer = pipeline.service.qwen.encoder.tokenizer
    first, negative, second = (
        prefix_layout(tokenizer.texts(prompt, num), [RELEASED_GRID] * num)
        for prompt in (PROMPT, NEGATIVE_PROMPT, NEXT_PROMPT)
    )
    page_bytes = PAGE_ROWS * cache_shape(TransformerConfig(), torch.bfloat16).row_bytes(CODECS["bf16"])
    trunk = first.trunk_stop
    tails = [layout.num_rows - trunk for layout in (first, negative)]
    unshared_pages = sum(pages_for(trunk + tail, PAGE_ROWS) for tail in tails)
    shared_pages = _unit_pages(first) + sum(pages_for(tail, PAGE_ROWS) for tail in tails)
    second_rows = second.num_rows + negative.num_rows - 2 * trunk
    rows_unshared = first.num_rows + negative.num_rows
    return _line(
        num, rows_unshared, trunk + sum(tails), second_rows, unshared_pages * page_bytes, shared_pages * page_bytes
    )


def _unit_pages(layout: Layout) -> int:
    return sum(pages_for(unit.stop - unit.start, PAGE_ROWS) for unit in layout.trunk_units())


def _line(
    num: int, rows_unshared: int, rows_shared: int, rows_second: int, bytes_unshared: int, bytes_shared: int
) -> tuple[str | int | float, ...]:
    ratio = bytes_shared / bytes_unshared
    return num, rows_unshared, rows_shared, rows_second, Bytes(bytes_unshared), Bytes(bytes_shared), ratio
