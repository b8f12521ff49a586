"""Fused transformers under Triton's interpreter, against the plain ones on the same weights."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from interpreter import interpreted  # noqa: F401 - a fixture for all
from neo_unify.cases import CONFIG, PAGE_ROWS, TOLERANCE, difference, golden
from torch import Tensor

from underpaint.attention import RowGroup, piecewise
from underpaint.kernels.tiles import Ints
from underpaint.kv.codec import CODECS
from underpaint.kv.keeping import KeepingAttention
from underpaint.kv.pool import CacheShape, PagePool, Run, View
from underpaint.kv.tile_codec import find_codec
from underpaint.layout import Grid, Layout
from underpaint.models import fp8
from underpaint.models.neo_unify import load
from underpaint.models.neo_unify.flow import draw_noise
from underpaint.models.neo_unify.transformer import Experts
from underpaint.models.painter import Target
from underpaint.models.qwen_image21.transformer import QwenImage21Transformer, TransformerConfig, rotary_table
from underpaint.models.random import randomise
from underpaint.understanding.decoding import Decoder, DecodeRow

FP8_TOLERANCE = 0.05
"""Rows that differ in the last bit may be rounded to another e4m3 value, 1/16 away."""
CLEAR = 0.05
"""By how much the logit of the last expert that is chosen must lead, or such a rounding may choose another."""


class Passes:
    """A pool, and passes of a prefix of some rows and other rows behind it."""

    def __init__(self, shape: CacheShape, codec: str = "fp32") -> None:
        stored_as = find_codec(codec)
        self.pool = PagePool(shape, stored_as, 40 * shape.page_bytes(stored_as, PAGE_ROWS), "cpu", PAGE_ROWS)
        self.run = self.pool.allocate(30)
        for layer in range(shape.num_layers):
            for plane in (self.pool.stored(layer).k, self.pool.stored(layer).v):
                plane.zero_()

    def attend(self, layout: Layout, start: int, stop: int, kept: bool) -> KeepingAttention:
        view = View(self.pool, (Run(self.run.pages, start),))
        group = RowGroup.of(layout, stop, 0, view, "cpu")
        slots = self.pool.slots((self.run,))[start:stop] if kept else self.pool.slots(())
        return KeepingAttention(self.pool, slots, lambda q, k, v, layer: piecewise(q, k, v, (group,), layer))

    def contents(self) -> Tensor:
        layers = range(self.pool.shape.num_layers)
        return torch.stack([torch.stack(self.pool.read(n, self.pool.slots((self.run,)))) for n in layers])


@pytest.mark.parametrize(
    ("variant", "parts", "quantize"),
    [("dense", (7, (2, 3), 9, (2, 4)), "none"), ("moe", (3, (1, 2), 2, (1, 2)), "none"),
     ("dense", (7, (2, 3), 9, (2, 4)), "fp8"), ("moe", (3, (1, 2), 2, (1, 2)), "fp8")],
)  # fmt: skip
@torch.inference_mode()
def test_neo_unify(variant: str, parts: tuple[int | Grid, ...], quantize: str, seed: int) -> None:
    """Text and pictures read, a picture painted behind them, and both in one pass; the state dict keeps its names."""
    config = replace(CONFIG, quantize=quantize)
    plain, fused = (load(golden(variant).root, config) for _ in range(2))
    names = {name: x.clone() for name, x in fused.network.state_dict().items()}
    fused.network.fuse()
    state = fused.network.state_dict()
    assert state.keys() == names.keys()
    assert all(torch.equal(state[name].float(), x.float()) for name, x in names.items())
    layout = Layout.of(parts)
    last = layout.images[-1]
    start, stop, grid = last.start, last.stop, last.grid
    assert grid is not None
    generator = torch.Generator().manual_seed(seed)
    leads = watch_experts(plain.network)

    def run(model: Any, rows: Tensor, target: Target) -> list[Tensor]:
        passes = Passes(model.cache_shape)
        read = rows[:start]
        out = [model.network.understand(read, model.rotary(layout, 0, start), passes.attend(layout, 0, start, True))]
        painted = model.run(
            rows[:0], [target], model.rotary(layout, start, stop), passes.attend(layout, start, stop, False)
        )
        both = model.run(read, [target], model.rotary(layout, 0, stop), passes.attend(layout, 0, stop, False))
        return [*out, *painted, *both, model.network.logits(out[0][-1:]), passes.contents()]

    for _ in range(200):
        rows = torch.randn(stop, plain.config.language.hidden_size, generator=generator)
        target = Target(draw_noise(generator, grid, 1.0, torch.float32), grid, torch.tensor(0.3))
        leads.clear()
        want = run(plain, rows, target)
        if quantize == "none" or min(leads, default=CLEAR) >= CLEAR:
            break
    else:
        pytest.fail("no rows whose experts are clear")
    for ours, theirs in zip(run(fused, rows, target), want, strict=True):
        assert difference(ours, theirs) < (TOLERANCE if quantize == "none" else FP8_TOLERANCE)


def watch_experts(network: torch.nn.Module) -> list[float]:
    """From now on, by how much the last expert chosen led the first one that was not, at least, in each layer."""
    leads: list[float] = []

    def note(num_chosen: int, gate: torch.nn.Module, inputs: Any, logits: Tensor) -> None:
        best = logits.float().topk(num_chosen + 1).values
        leads.append((best[:, -2] - best[:, -1]).min().item())

    for module in network.modules():
        if isinstance(module, Experts):
            module.gate.register_forward_hook(partial(note, module.config.num_chosen))
    return leads


@pytest.mark.parametrize(
    ("variant", "lengths", "num_steps"), [("dense", [1, 33, 70], 3), ("moe", [1, 33, 70], 2), ("pixelhead", [33], 1)]
)
@torch.inference_mode()
def test_decoding_steps(variant: str, lengths: list[int], num_steps: int, seed: int) -> None:
    """Sequences of unlike lengths, or one alone, go on for some tokens, with both networks."""
    plain, fused = golden(variant).model, load(golden(variant).root, CONFIG)
    fused.network.fuse()
    generator = torch.Generator().manual_seed(seed)
    shape = plain.cache_shape
    content = torch.randn(shape.num_layers, 2, sum(lengths), shape.num_heads, shape.head_dim, generator=generator)
    results = []
    for model in (plain, fused):
        pool = PagePool(shape, CODECS["fp32"], 40 * PAGE_ROWS * shape.row_bytes(CODECS["fp32"]), "cpu", PAGE_ROWS)
        runs = [pool.allocate(length + num_steps) for length in lengths]
        at = torch.cat([pool.slots((run,))[:length] for run, length in zip(runs, lengths, strict=True)])
        for layer in range(shape.num_layers):
            pool.write(layer, at, *content[layer])
        decoder = Decoder(model, pool)
        for step in range(num_steps):
            rows = [
                DecodeRow(5 + step, n + step, pages(run, n + step + 1)) for run, n in zip(runs, lengths, strict=True)
            ]
            results.append(decoder.step(rows)[0].clone())
    for ours, theirs in zip(results[num_steps:], results[:num_steps], strict=True):
        assert difference(ours, theirs) < TOLERANCE


def pages(run: Run, num_rows: int) -> Ints:
    counts = [min(PAGE_ROWS, num_rows - i * PAGE_ROWS) for i in range(-(-num_rows // PAGE_ROWS))]
    return np.array([(run.pages[i] * PAGE_ROWS, count) for i, count in enumerate(counts)], np.int32)


@pytest.mark.parametrize("codec", ["fp32", "fp8_tiles"])
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("timesteps", [1, 3])
@torch.inference_mode()
def test_qwen_image(timesteps: int, quantised: bool, codec: str, seed: int) -> None:
    """A prefix, then rows behind it, of one timestep or of several."""
    config = TransformerConfig(
        in_channels=8, out_channels=8, num_layers=3, attention_head_dim=32, num_attention_heads=3, context_in_dim=16,
        axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    grid: Grid = (2, 6)
    layout = Layout.of([5, (2, 2), 9, grid])
    positions = torch.randint(-9, 50, (30, 3), generator=generator)
    rotary = rotary_table(positions, config.axes_dims_rope)
    rows = torch.randn(30, config.hidden_size, generator=generator)
    levels = torch.tensor([0.9, 0.4, 0.1])[:timesteps]
    index = None if timesteps == 1 else torch.randint(0, timesteps + 1, (12,), generator=generator)
    results = []
    transformer = QwenImage21Transformer(config)
    randomise(transformer, seed)
    if quantised:
        transformer = in_e4m3(transformer)
    for _ in range(2):
        passes = Passes(CacheShape(config.num_layers, config.num_attention_heads, 32, torch.float32), codec)
        transformer.prefill(rows[:18], rotary[:18], passes.attend(layout, 0, 18, True))
        painted = transformer(rows[18:], rotary[18:], levels, index, passes.attend(layout, 18, 30, False))
        results.append([painted, passes.contents()])
        transformer.fuse()
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert difference(ours, theirs) < (TOLERANCE if codec == "fp32" and not quantised else FP8_TOLERANCE)


def in_e4m3(plain: QwenImage21Transformer) -> QwenImage21Transformer:
    """The same with its block linears quantised."""
    with torch.device("meta"):
        network = QwenImage21Transformer(plain.config)
    fp8.prepare(network, "transformer_blocks")
    wanted = network.state_dict()
    state: dict[str, Tensor] = {}
    for name, x in plain.state_dict().items():
        state |= fp8.settle(name, x, wanted[name], x.dtype)
    network.load_state_dict(state, assign=True)
    return network
