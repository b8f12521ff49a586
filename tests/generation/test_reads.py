"""Short reads on buffers that do not move, as CUDA graphs read them, against plain passes.

On a CPU nothing is captured; the buffers, keys and counts are those of a GPU.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import interpreted  # noqa: F401 - a fixture for all
from PIL import Image
from test_parity import references

from underpaint import Pipeline
from underpaint.attention import RowGroup
from underpaint.attention.triton import prepare
from underpaint.capture.attention import PassKey, Planned, Replanned
from underpaint.capture.reads import MAX_READ_ROWS, ReadGraphs
from underpaint.capture.recorder import run_again
from underpaint.config import EngineConfig
from underpaint.errors import BadConfig
from underpaint.kv.pool import View
from underpaint.layout import Layout

DrawImage = Callable[..., Image.Image]


def pair(checkpoint: Path, **options: Any) -> list[Pipeline]:
    """With graphs of reads, and without."""
    options = {"kv_cache_bytes": 64 << 20, **options}
    return [Pipeline.from_pretrained(checkpoint, read_graphs=choice, **options) for choice in ("on", "off")]


def reads_of(pipeline: Pipeline) -> ReadGraphs:
    assert pipeline.service.runner._reads is not None
    return pipeline.service.runner._reads


@pytest.mark.parametrize("options", [{}, {"kv_codec": "fp8"}, {"quantize": "fp8"}, {"step_graphs": "on"}], ids=str)
def test_equal_to_plain_reads(checkpoint: Path, draw_image: DrawImage, seed: int, options: dict[str, Any]) -> None:
    """Prompts of many lengths, references and guidance, on few graphs."""
    images = references(draw_image, 2)
    with_graphs, plain = pair(checkpoint, **options)
    for turn, (words, num_images, scale) in enumerate(
        [(1, 0, 3.0), (20, 2, 1.0), (90, 1, 3.0), (3, 0, 1.0), (60, 2, 3.0)]
    ):
        call: dict[str, Any] = {
            "width": 64, "height": 64, "seed": seed + turn, "num_inference_steps": 2, "true_cfg_scale": scale,
            "negative_prompt": "dog", "output_type": "latent", "reference_resolution": 64,
        }  # fmt: skip
        painted = [one("cat " * words, images[:num_images], **call).images[0] for one in (with_graphs, plain)]
        allowed = (0.02 if options.get("quantize") else 1e-5) * painted[1].abs().max()
        assert (painted[0] - painted[1]).abs().max() <= allowed
    counts = with_graphs.service.runner.reads
    assert counts.misses == len(reads_of(with_graphs).keys) <= 5
    assert counts.hits >= 4
    assert counts.eager == 0
    assert plain.service.runner.reads.hits == 0


def test_nobodys_rows_are_kept_nowhere(checkpoint: Path, seed: int) -> None:
    """A read that rounds up writes its own slots and no others."""
    pipeline, _ = pair(checkpoint)
    pool, owner = pipeline.service.pool, reads_of(pipeline)
    run = pool.allocate(21)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(21, pipeline.service.qwen.num_hidden, generator=generator)
    layout = Layout.of([21])
    group = RowGroup.of(layout, 21, 0, View(pool, ()), "cpu")
    # As bytes: pages that nobody wrote to hold anything, NaN too.
    stored = [pool.stored(layer).k.view(torch.uint8) for layer in range(pool.shape.num_layers)]
    before = [bytes_of_layer.clone() for bytes_of_layer in stored]
    rotary = pipeline.service.qwen.rotary(layout, 0, 21)
    assert owner.run(rows, rotary, pool.slots([run]), [group]) is not None
    assert owner.keys == (PassKey(64, 1),)
    for now, old in zip(stored, before, strict=True):
        changed = (now != old).flatten(1).any(1).nonzero().flatten()
        assert torch.equal(changed, pool.slots([run]).sort().values)


@pytest.mark.parametrize("codec", ["fp32", "fp8"])
def test_replayed_reads_are_plain_reads(checkpoint: Path, draw_image: DrawImage, seed: int, codec: str) -> None:
    """With attention whose plan lies in buffers, under Triton's interpreter: all of a GPU's but the capture."""
    images = [draw_image(64, 64) for _ in range(2)]
    painted = []
    for with_graphs in (True, False):
        pipeline = Pipeline.from_pretrained(checkpoint, kv_cache_bytes=16 << 20, kv_codec=codec)
        runner = pipeline.service.runner
        runner._prepare = prepare
        if with_graphs:
            pool, painter = pipeline.service.pool, pipeline.service.qwen
            runner._reads = ReadGraphs(painter.prefill, pool, Planned(prepare), run_again)
        for turn, num_images in enumerate((1, 2, 0)):
            call: dict[str, Any] = {"width": 64, "height": 64, "seed": seed + turn, "num_inference_steps": 1}
            call |= {"reference_resolution": 64, "output_type": "latent", "true_cfg_scale": 3.0, "negative_prompt": ""}
            painted += pipeline("cat " * (5 * turn + 1), images[:num_images], **call).images
        if with_graphs:
            assert runner.reads.hits >= 2
    for ours, theirs in zip(painted[:3], painted[3:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_after_warm_up_nothing_is_captured(checkpoint: Path, seed: int) -> None:
    pipeline, _ = pair(checkpoint)
    pipeline.service.generation.warm_up([(4, 4)])
    captured = pipeline.service.runner.reads.misses
    assert captured == len(reads_of(pipeline).keys) > 10
    for words in (1, 50, 300):
        call: dict[str, Any] = {"width": 64, "height": 64, "seed": seed, "num_inference_steps": 1}
        pipeline("cat " * words, true_cfg_scale=3.0, negative_prompt="", **call)
    assert pipeline.service.runner.reads.misses == captured


def test_long_reads_are_eager(checkpoint: Path, seed: int) -> None:
    with_graphs, plain = pair(checkpoint)
    call: dict[str, Any] = {"width": 64, "height": 64, "seed": seed, "num_inference_steps": 1}
    prompt = "cat " * (MAX_READ_ROWS + 1)
    painted = [pipeline(prompt, output_type="latent", **call).images[0] for pipeline in (with_graphs, plain)]
    assert torch.equal(*painted)
    assert with_graphs.service.runner.reads.eager == 1


def test_read_graphs_is_honoured_or_refused(checkpoint: Path) -> None:
    with pytest.raises(BadConfig, match="read_graphs is 'maybe'"):
        EngineConfig(read_graphs="maybe")
    with pytest.raises(BadConfig, match="read_graphs on and offload dit"):
        EngineConfig(read_graphs="on", offload="dit")
    pipeline = Pipeline.from_pretrained(checkpoint, read_graphs="auto")
    assert pipeline.service.runner._reads is None, "a CPU needs no graphs"
    assert isinstance(reads_of(pair(checkpoint)[0])._attention, Replanned)
