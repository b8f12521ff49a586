"""diffusers' Qwen-Image 2.1 transformer beside ours, on the same weights and the same sequences.

Its own prefix cache is used: the first step runs the whole sequence and keeps the prefix, the others read it. One call
a guidance branch, as its pipeline does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import QwenImage21Transformer2DModel
from diffusers.models.transformers.transformer_qwenimage21 import (
    QwenImage21KVCache,
    QwenImage21Rope,
    QwenImage21TemporalTimesteps,
)
from torch import Tensor

from underpaint.layout import Grid
from underpaint.models.painter import Condition
from underpaint.models.qwen_image21 import Condition as QwenCondition
from underpaint.models.qwen_image21.transformer import ROTARY_THETA, TIMESTEP_CHANNELS, QwenImage21Transformer

CUDNN = "_native_cudnn"
TOKENS_A_SLOT = 4
"""The encoder has one place for 2 x 2 latent tokens."""


@dataclass(frozen=True, eq=False)
class Branch:
    """What one call takes, see diffusers. ``img_mask`` (1, slots) marks images in the encoder's sequence."""

    hidden_states: Tensor
    encoder_hidden_states: Tensor
    img_shapes: list[list[tuple[int, int, int]]]
    img_mask: Tensor
    timestep: Tensor


class Diffusers:
    """``compiled``: each block compiled as a region, once for all shapes, with cuDNN's attention."""

    def __init__(self, transformer: QwenImage21Transformer, compiled: bool) -> None:
        self.name = "diffusers, compiled" if compiled else "diffusers, eager"
        with torch.device("meta"):
            theirs = QwenImage21Transformer2DModel(**_config_of(transformer))
        # Tables that are no buffers, and were made on the meta device too.
        theirs.time_text_embed.time_proj = QwenImage21TemporalTimesteps(timestep_dim=TIMESTEP_CHANNELS)
        theirs.pos_embed = QwenImage21Rope(theta=ROTARY_THETA, axes_dim=list(transformer.config.axes_dims_rope))
        theirs.load_state_dict(transformer.state_dict(), strict=True, assign=True)
        self._transformer = theirs.eval().requires_grad_(False)
        if compiled:
            theirs.set_attention_backend(CUDNN)
            theirs.compile_repeated_blocks(dynamic=True)
        self._branches: list[tuple[Branch, QwenImage21KVCache]] = []

    def begin(self, conditions: Sequence[Condition], state: Tensor, grid: Grid, sigma: float) -> None:
        """The first step: prefixes are computed and kept."""
        layers = len(self._transformer.transformer_blocks)
        branches = [_branch(condition, state, grid, sigma) for condition in conditions]
        self._branches = [(branch, QwenImage21KVCache(layers)) for branch in branches]
        self._run("extract")

    def step(self) -> list[Tensor]:
        """Any further step; the velocity of each branch."""
        return self._run("cached")

    def end(self) -> None:
        self._branches = []

    def _run(self, mode: str) -> list[Tensor]:
        rows = [
            self._transformer(**vars(branch), kv_cache=cache, kv_cache_mode=mode, return_dict=False)[0]
            for branch, cache in self._branches
        ]
        return [x[0, -_target_rows(branch) :] for x, (branch, _) in zip(rows, self._branches, strict=True)]


def _target_rows(branch: Branch) -> int:
    _, height, width = branch.img_shapes[0][-1]
    return height * width


def _config_of(transformer: QwenImage21Transformer) -> dict[str, Any]:
    return {**vars(transformer.config), "causal_condition": True}


def _branch(condition: Condition, state: Tensor, grid: Grid, sigma: float) -> Branch:
    """Text in order, and empty places where images go."""
    assert isinstance(condition, QwenCondition)
    text = iter(condition.text.split([s.stop - s.start for s in condition.layout.segments if s.kind == "text"]))
    parts, mask = [], []
    for segment in condition.layout.segments:
        if segment.kind == "text":
            parts.append(next(text))
            mask += [False] * len(parts[-1])
        else:
            slots = (segment.stop - segment.start) // TOKENS_A_SLOT
            parts.append(condition.text.new_zeros(slots, condition.text.shape[1]))
            mask += [True] * slots
    mask += [True] * (len(state) // TOKENS_A_SLOT)
    grids = [segment.grid for segment in condition.layout.images if segment.grid] + [grid]
    return Branch(
        torch.cat([*condition.latents, state])[None],
        torch.cat(parts)[None],
        [[(1, *g) for g in grids]],
        torch.tensor([mask], device=state.device),
        torch.full((1,), sigma, device=state.device, dtype=state.dtype),
    )
