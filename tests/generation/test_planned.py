"""Steps with attention whose plan lies in buffers, under Triton's interpreter: all of a GPU's but the capture."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import interpreted  # noqa: F401 - a fixture for all
from PIL import Image

from underpaint import Pipeline
from underpaint.attention.triton import prepare
from underpaint.capture.attention import PassKey, Planned
from underpaint.capture.recorder import run_again
from underpaint.generation.graphs import StepGraphs


@pytest.mark.parametrize("codec", ["fp32", "fp8"])
def test_replayed_steps_are_plain_steps(
    checkpoint: Path, draw_image: Callable[..., Image.Image], seed: int, codec: str
) -> None:
    """Requests of one number of rows in turn, with prefixes of other lengths, on one graph; against passes without."""
    images = [draw_image(64, 64) for _ in range(2)]
    painted = []
    for graphs in (True, False):
        pipeline = Pipeline.from_pretrained(checkpoint, kv_cache_bytes=16 << 20, kv_codec=codec)
        runner = pipeline.service.runner
        runner._prepare = prepare
        if graphs:
            pool = pipeline.service.pool
            runner._graphs = StepGraphs(pipeline.service.qwen, pool, Planned(prepare), run_again, 256)
        for turn, num_images in enumerate((1, 2, 0)):
            call: dict[str, Any] = {"width": 96, "height": 64, "seed": seed + turn, "num_inference_steps": 2}
            call |= {"reference_resolution": 64, "output_type": "latent"}
            painted += pipeline(
                "cat " * turn, images[:num_images], true_cfg_scale=3.0, negative_prompt="", **call
            ).images
        if graphs:
            assert runner.graphs.hits == 5
            assert runner._graphs is not None
            assert runner._graphs.keys == (PassKey(48, 2, Planned.FEWEST_UNITS),)
    for ours, theirs in zip(painted[:3], painted[3:], strict=True):
        assert torch.equal(ours, theirs)
