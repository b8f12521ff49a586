"""Steps on buffers that do not move, as CUDA graphs read them, against plain passes: the same bits.

On a CPU nothing is captured; the buffers, keys and counts are those of a GPU.
"""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import plan_walker
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from neo_unify.cases import CONFIG, ROOT
from PIL import Image
from safetensors.torch import save_file
from test_cases import finish, make_conditions
from test_engine import make
from test_parity import references
from torch.utils._python_dispatch import TorchDispatchMode

from underpaint import Pipeline
from underpaint.attention import RowGroup
from underpaint.attention.planned import PlannedPass
from underpaint.capture.attention import PassKey, Planned, Replanned
from underpaint.capture.recorder import round_up
from underpaint.config import EngineConfig
from underpaint.errors import BadConfig
from underpaint.generation import graphs
from underpaint.generation.graphs import MAX_TARGETS, SMALLEST_STEP, STEPS_AN_OCTAVE, StepGraphs
from underpaint.kernels.tiles import OutOfRoom
from underpaint.models import neo_unify
from underpaint.models.painter import Target, Targets, cell_places
from underpaint.service import Service

DrawImage = Callable[..., Image.Image]


def pair(checkpoint: Path, **options: Any) -> list[Pipeline]:
    """With graphs, and without."""
    options = {"kv_cache_bytes": 64 << 20, **options}
    return [Pipeline.from_pretrained(checkpoint, step_graphs=choice, **options) for choice in ("on", "off")]


def graphs_of(pipeline: Pipeline) -> StepGraphs:
    assert pipeline.service.runner._graphs is not None
    return pipeline.service.runner._graphs


@pytest.mark.parametrize(
    "options", [{}, {"kv_codec": "fp8_v"}, {"kv_codec": "fp8"}, {"quantize": "fp8"}, {"dtype": "bfloat16"}], ids=str
)
def test_equal_to_plain_passes(checkpoint: Path, draw_image: DrawImage, seed: int, options: dict[str, Any]) -> None:
    """Sizes in turn, with and without references and guidance; rows that fill their buckets, so that all bits agree."""
    images = references(draw_image, 2)
    with_graphs, plain = pair(checkpoint, **options)
    for turn, (size, num_images, scale) in enumerate([(64, 2, 3.0), (128, 0, 1.0), (64, 1, 1.0), (128, 2, 3.0)] * 2):
        call: dict[str, Any] = {
            "width": size, "height": size, "seed": seed + turn, "num_inference_steps": 3, "true_cfg_scale": scale,
            "negative_prompt": "blurred", "output_type": "latent", "reference_resolution": 64,
        }  # fmt: skip
        painted = [pipeline(f"cat {turn}", images[:num_images], **call).images[0] for pipeline in (with_graphs, plain)]
        assert torch.equal(*painted)
    counts, keys = with_graphs.service.runner.graphs, graphs_of(with_graphs).keys
    assert set(keys) == {PassKey(16, 1), PassKey(64, 1), PassKey(32, 2), PassKey(128, 2)}
    assert (counts.hits, counts.misses, counts.eager) == (8 * 3 - 4, 4, 0)
    assert plain.service.runner.graphs.hits == 0


def test_rows_that_round_up_change_nothing(checkpoint: Path, seed: int) -> None:
    """Sizes between those of the buckets: the same within rounding."""
    for with_graphs, plain in [pair(checkpoint)]:
        for size in ((96, 64), (160, 96), (32, 32)):
            call: dict[str, Any] = {
                "width": size[0], "height": size[1], "seed": seed, "num_inference_steps": 3, "num_images": 3,
                "output_type": "latent",
            }  # fmt: skip
            painted = [torch.stack(pipeline("cat", **call).images) for pipeline in (with_graphs, plain)]
            assert (painted[0] - painted[1]).abs().max() <= 1e-5 * painted[1].abs().max()
        assert {key.num_groups for key in graphs_of(with_graphs).keys} == {4}


@pytest.mark.parametrize("variant", ["dense", "moe", "pixelhead"])
@pytest.mark.parametrize("quantize", ["none", "fp8"])
def test_neo_unify(variant: str, quantize: str, draw_image: DrawImage, seed: int) -> None:
    """Both heads and the experts; one, two and three branches, of which the interval lets some steps have fewer."""
    with_graphs, plain = pair(ROOT / variant, quantize=quantize)
    picture = draw_image(64, 64)
    for images, options in (
        ([], {"guidance_scale": 1.0}), ([], {"guidance_scale": 3.0, "cfg_interval": (0.3, 1.0)}),
        ([picture], {"guidance_scale": 3.0, "image_guidance_scale": 1.5}),
    ):  # fmt: skip
        call: dict[str, Any] = {"width": 128, "height": 128, "seed": seed, "num_inference_steps": 4, **options}
        painted = [
            pipeline("a cat", images, output_type="latent", **call).images[0] for pipeline in (with_graphs, plain)
        ]
        assert (painted[0] - painted[1]).abs().max() <= (1e-5 if quantize == "none" else 0.02) * painted[1].abs().max()
    counts = with_graphs.service.runner.graphs
    assert counts.hits > 0
    assert counts.eager == 0
    assert [key.num_groups for key in sorted(graphs_of(with_graphs).keys)] == [1, 2, 4]


def test_a_lora_is_in_the_weights(tmp_path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    target = "language_model.model.layers.1.self_attn.q_proj_mot_gen"
    weight = neo_unify.load(ROOT / "dense", CONFIG).network.state_dict()[f"{target}.weight"]
    state = {"lora_up": torch.randn(len(weight), 2), "lora_down": torch.randn(2, weight.shape[1])}
    save_file({f"{target}.{name}.weight": x for name, x in state.items()}, tmp_path / "lora.safetensors")
    painted = []
    file = str(tmp_path / "lora.safetensors")
    for lora, choice in (((), "off"), ((file,), "off"), ((file,), "on")):
        config = replace(CONFIG, kv_cache_bytes=16 << 20, step_graphs=choice, lora=lora)
        pipeline = Pipeline(Service(neo_unify.load(ROOT / "dense", config), config))
        call: dict[str, Any] = {"width": 128, "height": 128, "seed": 1, "num_inference_steps": 2}
        painted.append(pipeline("a cat", output_type="latent", **call).images[0])
    assert torch.equal(painted[1], painted[2])
    assert (painted[0] - painted[1]).abs().max() > 0.01


def test_q1_two_requests_of_one_shape_share_nothing(checkpoint: Path, draw_image: DrawImage, seed: int) -> None:
    """They alternate on one graph, step by step, and each is what it is alone."""
    with_graphs, plain = pair(checkpoint, max_batch_rows=16)
    images = [references(draw_image, 1), references(draw_image, 2)]
    orders = []
    for pipeline in (with_graphs, plain):
        conditions = [
            make_conditions(pipeline, *of_one)[0] for of_one in zip(images, [["cat"], ["teapot"]], strict=True)
        ]
        both = [make(pipeline, condition, seed=seed % 1000 + i, steps=5) for i, condition in enumerate(conditions)]
        for order in both:
            pipeline.service.generation.submit(order)
        finish(pipeline, *both)
        orders.append(both)
    assert graphs_of(with_graphs).keys == (PassKey(16, 1),)
    assert with_graphs.service.runner.graphs.hits == 9
    for ours, theirs in zip(*orders, strict=True):
        assert torch.equal(ours.jobs[0].state, theirs.jobs[0].state)


class NothingRead(TorchDispatchMode):
    """Fails where a value is read back from the device, or decides how large something is."""

    READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "item", "is_nonzero", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert not name.startswith(self.READS), f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("quantize", ["none", "fp8"])
@pytest.mark.parametrize("step_graphs", ["on", "off"])
def test_a_step_reads_nothing_back(checkpoint: Path, seed: int, step_graphs: str, quantize: str) -> None:
    """So the host can prepare the next step while the device works, and a graph can hold it."""
    options: dict[str, Any] = {"step_graphs": step_graphs, "quantize": quantize, "kv_cache_bytes": 16 << 20}
    qwen = Pipeline.from_pretrained(checkpoint, **options)
    order = make(qwen, *make_conditions(qwen, [], ["cat", "teapot"]), seed=seed, steps=3)
    qwen.service.generation.submit(order)
    while order.step < 1:
        qwen.service.generation.turn()
    targets = order.jobs[0].targets()
    with NothingRead():
        qwen.service.runner.run((), targets)
    config = replace(CONFIG, **options)
    model = neo_unify.load(ROOT / "dense", config)
    cells = cell_places((2, 2))
    target = Target(torch.randn(4, 3072), (2, 2), torch.tensor(0.5))
    packed = Targets.of([target, target], [cells, cells], [1.0, 1.0], "cpu")
    with torch.inference_mode(), NothingRead():
        hidden = model.paint(torch.empty(0), packed, torch.ones(8, 16).to(torch.complex64), lambda layer, q, k, v: q)
        model.predict(hidden, packed)


def test_nothing_of_a_request_stays_in_the_buffers(checkpoint: Path, seed: int) -> None:
    """What a pass returned is the caller's own, and its places are not kept alive."""
    pipeline, _ = pair(checkpoint)
    order = make(pipeline, *make_conditions(pipeline, [], ["cat", "teapot"]), seed=seed, steps=3)
    pipeline.service.generation.submit(order)
    while order.step < 1:
        pipeline.service.generation.turn()
    owner = graphs_of(pipeline)
    with torch.inference_mode():
        velocities = owner.run(order.jobs[0].targets())
        assert velocities is not None
        before = [velocity.clone() for velocity in velocities]
        assert owner._buffers is not None
        owner._buffers.state.fill_(torch.nan)
        assert owner._hidden is not None
        owner._hidden.fill_(torch.nan)
    assert all(map(torch.equal, velocities, before))
    finish(pipeline, order)
    assert order.jobs[0].state.isfinite().all()
    places = [weakref.ref(place) for place in order.jobs[0].places.values()]
    del order, velocities
    gc.collect()
    assert [place() for place in places] == [None, None]


@pytest.mark.parametrize("attention", ["planned anew", "in buffers"])
def test_q17_q26_random_requests(checkpoint: Path, draw_image: DrawImage, attention: str, seed: int) -> None:
    """200 requests of random sizes, references, prompts, guidance and lengths: nearly every step is replayed, the key
    knows no length and no prompt, nothing grows, and pictures are those of passes without graphs.

    In buffers: with plans that have room, as on a GPU, walked in plain PyTorch.
    """
    generator = np.random.default_rng(seed)
    pipeline, plain = pair(checkpoint, kv_cache_bytes=4 << 20, kv_codec="fp32")
    images = references(draw_image, 2)
    owner, num_bytes = graphs_of(pipeline), []
    if attention == "in buffers":
        owner._attention = Planned(partial(PlannedPass, plan_walker))
        for one in (pipeline, plain):
            one.service.runner._prepare = partial(PlannedPass, plan_walker)  # so that sums are in the same order
    for index in range(200):
        width, height = (int(32 * generator.integers(1, 7)) for _ in range(2))
        call: dict[str, Any] = {
            "prompt": "cat " * int(generator.integers(1, 30)), "images": images[: int(generator.integers(0, 3))],
            "width": width, "height": height, "num_inference_steps": int(generator.integers(10, 16)),
            "true_cfg_scale": float(generator.choice([1.0, 3.0])), "negative_prompt": "", "reference_resolution": 64,
            "seed": index, "output_type": "latent",
        }  # fmt: skip
        ours = pipeline(**call).images[0]
        if index % 20 == 0:
            torch.testing.assert_close(ours, plain(**call).images[0], rtol=1e-5, atol=1e-5)
        num_bytes.append(owner.num_bytes)
    counts = owner.counts
    print(counts, owner.num_graphs)
    assert counts.hits > 0.95 * (counts.hits + counts.misses + counts.eager)
    assert counts.misses == owner.num_graphs
    assert len({key.prefix_units for key in owner.keys}) == 1
    assert len(set(num_bytes)) == 1
    assert 0 < num_bytes[0] < 4 << 20


def test_the_key_knows_no_prefix(checkpoint: Path, draw_image: DrawImage, seed: int) -> None:
    """Requests whose rows round up alike share one graph, however they are divided and whatever is before them; each
    is what it is without."""
    pipeline, plain = pair(checkpoint, kv_codec="fp32")
    owner = graphs_of(pipeline)
    owner._attention = Planned(partial(PlannedPass, plan_walker))
    images = references(draw_image, 3)
    for turn, (width, height, num_images) in enumerate([(96, 96, 0), (64, 128, 2), (160, 64, 3), (96, 96, 1)]):
        call: dict[str, Any] = {
            "width": width, "height": height, "num_inference_steps": 3, "true_cfg_scale": 3.0, "seed": seed + turn,
            "reference_resolution": 64, "output_type": "latent", "negative_prompt": "dog " * turn,
        }  # fmt: skip
        painted = [one("cat " * (5 * turn + 1), images[:num_images], **call).images[0] for one in (pipeline, plain)]
        torch.testing.assert_close(*painted, rtol=1e-4, atol=1e-4)
    assert len(owner.keys) == 2, owner.keys
    assert (owner.counts.misses, owner.counts.hits) == (2, 10)


@pytest.mark.parametrize("family", ["qwen", "neo"])
def test_u29_after_warm_up_nothing_is_captured(checkpoint: Path, family: str, seed: int) -> None:
    """Graphs of the usual sizes are there before the first request; warming up again changes nothing."""
    with_graphs, plain = pair(checkpoint if family == "qwen" else ROOT / "dense")
    grid, scale = ((4, 4), "true_cfg_scale") if family == "qwen" else ((2, 2), "guidance_scale")
    for _ in range(2):
        with_graphs.service.generation.warm_up([grid])
    counts = with_graphs.service.runner.graphs
    assert (counts.misses, counts.hits) == (2, 2)
    for guidance in (1.0, 3.0):
        call: dict[str, Any] = {scale: guidance, "width": 64, "height": 64, "seed": seed, "num_inference_steps": 2}
        if family == "qwen":
            call["negative_prompt"] = ""
        painted = [pipeline("cat", output_type="latent", **call).images[0] for pipeline in (with_graphs, plain)]
        torch.testing.assert_close(*painted, rtol=1e-5, atol=1e-5)
    assert counts.misses == 2


def test_graphs_are_bounded(checkpoint: Path, seed: int) -> None:
    """Three sizes in turn with room for two graphs: each is captured anew, and right."""
    with_graphs, plain = pair(checkpoint)
    owner = graphs_of(with_graphs)
    owner._max_graphs = 2
    for turn in range(6):
        side = (64, 128, 256)[turn % 3]
        call: dict[str, Any] = {"width": side, "height": side, "seed": seed + turn, "num_inference_steps": 2}
        painted = [pipeline("cat", output_type="latent", **call).images[0] for pipeline in (with_graphs, plain)]
        assert torch.equal(*painted)
        assert owner.num_graphs <= 2
    assert (owner.counts.misses, owner.counts.hits, owner.counts.evictions) == (6, 6, 4)


def test_passes_that_prefill_too_are_eager(checkpoint: Path, draw_image: DrawImage, seed: int) -> None:
    pipeline, _ = pair(checkpoint)
    running = make(pipeline, *make_conditions(pipeline, [], ["A red teapot"]), steps=8)
    pipeline.service.generation.submit(running)
    for _ in range(3):
        pipeline.service.generation.turn()
    edit = make(pipeline, *make_conditions(pipeline, references(draw_image, 1), ["cat"]), steps=2)
    pipeline.service.generation.submit(edit)
    finish(pipeline, running, edit)
    counts = pipeline.service.runner.graphs
    assert counts.eager == 2, "beside a reference, and beside the prompt"
    assert counts.hits + counts.misses + counts.eager <= 10


class AtTimesFull(Replanned):
    """Attention that at times has no room."""

    full = False

    def prefix_units(self, groups: tuple[RowGroup, ...]) -> int:
        if self.full:
            raise OutOfRoom("full")
        return 4


def test_passes_without_room_are_eager(checkpoint: Path, seed: int) -> None:
    """And the next with room is not."""
    with_graphs, plain = pair(checkpoint)
    owner = graphs_of(with_graphs)
    owner._attention = attention = AtTimesFull(with_graphs.service.runner._prepare)
    for turn in range(4):
        attention.full = turn == 2
        call: dict[str, Any] = {"width": 64, "height": 64, "seed": seed + turn, "num_inference_steps": 2}
        painted = [
            pipeline("cat", output_type="latent", num_images=2, **call).images for pipeline in (with_graphs, plain)
        ]
        assert all(map(torch.equal, *painted))
    assert owner.keys == (PassKey(32, 2, 4),)
    assert (owner.counts.misses, owner.counts.hits, owner.counts.eager) == (1, 5, 2)


def test_large_passes_are_eager(checkpoint: Path, seed: int) -> None:
    with_graphs, plain = pair(checkpoint, max_batch_rows=16)
    call: dict[str, Any] = {"width": 96, "height": 64, "seed": seed, "num_inference_steps": 2}
    painted = [pipeline("cat", output_type="latent", **call).images[0] for pipeline in (with_graphs, plain)]
    assert torch.equal(*painted)
    assert (with_graphs.service.runner.graphs.eager, with_graphs.service.runner.graphs.misses) == (2, 0)
    assert MAX_TARGETS == 64


def test_a_pass_that_breaks_leaves_no_trace(checkpoint: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """S13: the order fails; the next one of the same shape is right."""
    with_graphs, plain = pair(checkpoint)
    call: dict[str, Any] = {"width": 64, "height": 64, "num_inference_steps": 3, "output_type": "latent"}
    paint, broken = with_graphs.service.qwen.paint, [0, 1, 4]

    def fails(*arguments: Any) -> torch.Tensor:
        if broken and not broken.pop(0):
            raise torch.OutOfMemoryError("injected")
        return paint(*arguments)

    monkeypatch.setattr(with_graphs.service.qwen, "paint", fails)
    with pytest.raises(Exception, match="out of memory"):
        with_graphs("cat", seed=seed, **call)
    painted = [pipeline("teapot", seed=seed, **call).images[0] for pipeline in (with_graphs, plain)]
    assert torch.equal(*painted)


@given(st.integers(1, 1 << 20))
def test_row_counts_round_up_a_little(num_rows: int) -> None:
    to_a_step = partial(round_up, steps_an_octave=STEPS_AN_OCTAVE, smallest=SMALLEST_STEP)
    rounded = to_a_step(num_rows)
    assert rounded >= num_rows
    assert rounded - num_rows < max(num_rows / graphs.STEPS_AN_OCTAVE, graphs.SMALLEST_STEP)
    assert to_a_step(rounded) == rounded
    power = 1 << (num_rows - 1).bit_length()
    assert to_a_step(max(power, 16)) == max(power, 16)


def test_room_is_a_coarse_class() -> None:
    class Prefix:
        def __init__(self, *counts: int) -> None:
            self.extents = tuple((0, count) for count in counts)

    def units(*prefixes: Prefix) -> int:
        groups: Any = tuple(type("Group", (), {"prefix": prefix}) for prefix in prefixes)
        return Planned(lambda groups, room: None).prefix_units(groups)  # type: ignore[arg-type, return-value]

    whole = Prefix(128 * 256)
    assert units() == units(Prefix(1, 128, 129)) == units(whole) == units(whole, whole) == 256
    assert units(Prefix(128 * 256, 1)) == units(whole, Prefix(1)) == 1024
    with pytest.raises(OutOfRoom):
        units(Prefix(128 * 16384, 1))


@pytest.mark.parametrize(
    ("device", "backend", "capturable", "made"),
    [("cpu", "piecewise", True, {"auto": None, "on": Replanned}),
     ("cuda", "piecewise", True, {"auto": None, "on": BadConfig}),
     ("cuda", "triton", False, {"auto": None, "on": BadConfig}),
     ("cuda", "triton", True, {"auto": Planned, "on": Planned})],
)  # fmt: skip
def test_where_there_are_graphs(
    device: str, backend: str, capturable: bool, made: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never quietly without: ``on`` is refused where steps cannot be captured."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    painter: Any = type("Painter", (), {"capturable": capturable})()
    config = EngineConfig(device=device, attention_backend=backend)
    none: Any = None
    assert graphs.make_graphs(painter, none, none, replace(config, step_graphs="off")) is None
    for choice, want in made.items():
        chosen = replace(config, step_graphs=choice)
        if want is BadConfig:
            with pytest.raises(BadConfig, match="cannot be captured"):
                graphs.make_graphs(painter, none, none, chosen)
            continue
        owner = graphs.make_graphs(painter, none, none, chosen)
        assert (None if owner is None else type(owner._attention)) == want
