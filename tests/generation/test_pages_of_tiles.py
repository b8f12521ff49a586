"""Pictures from prefixes in pages of tiles: captured or not, reused or not, in pages of others or not, the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from test_parity import TOLERANCE, difference, references
from torch import Tensor

from underpaint import Pipeline
from underpaint.kernels.packed_tiles import PackedTiles

DrawImage = Callable[..., Image.Image]
CALL: dict[str, Any] = {
    "width": 64, "height": 64, "num_inference_steps": 3, "true_cfg_scale": 3.0, "negative_prompt": "blurred",
    "output_type": "latent", "reference_resolution": 64,
}  # fmt: skip


def make(checkpoint: Path, **options: Any) -> Pipeline:
    return Pipeline.from_pretrained(checkpoint, **{"kv_cache_bytes": 64 << 20, "kv_codec": "fp8_tiles", **options})


def paint(pipeline: Pipeline, prompt: str, images: list[Image.Image], seed: int) -> Tensor:
    latents: Tensor = pipeline(prompt, images, seed=seed, **CALL).images[0]
    return latents


@pytest.mark.parametrize("option", ["step_graphs", "read_graphs"])
def test_as_in_plain_passes(checkpoint: Path, draw_image: DrawImage, seed: int, option: str) -> None:
    """Rows that round up to a graph's are kept nowhere, and a graph turns from prefix to prefix."""
    images = references(draw_image, 2)
    captured, plain = (make(checkpoint, **{option: choice}) for choice in ("on", "off"))
    for turn, num_images in enumerate((2, 0, 1, 2)):
        ours, theirs = (paint(p, "cat " * (9 * turn + 1), images[:num_images], seed + turn) for p in (captured, plain))
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    runner = captured.service.runner
    assert (runner.graphs if option == "step_graphs" else runner.reads).hits > 3


def test_pages_that_change_hands(checkpoint: Path, draw_image: DrawImage, seed: int) -> None:
    """Room for one request at a time, and every page NaN before the first: nobody reads what another left."""
    images = references(draw_image, 3)
    large = make(checkpoint)
    small = make(checkpoint, kv_cache_bytes=3 * large.service.pool.page_bytes)
    for layer in range(large.service.pool.shape.num_layers):
        stored = small.service.pool.stored(layer)
        assert isinstance(stored, PackedTiles)
        for x in (stored.k, stored.v):
            x.view(torch.uint8).fill_(0x7F)
    for turn, image in enumerate([*images, *images[::-1]]):
        prompt = "cat " * (20 - 3 * turn)
        ours, theirs = (paint(pipeline, prompt, [image], seed) for pipeline in (small, large))
        assert ours.isfinite().all()
        assert difference(ours, theirs) < TOLERANCE
    assert small.service.tree.evictions >= 4
    assert large.service.tree.evictions == 0
