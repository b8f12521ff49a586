"""The two passes through the transformer: prefill fills prefixes, step predicts velocities. Both take packed rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from underpaint.attention import Backend, RowGroup
from underpaint.kv.pool import PagePool, Run, View
from underpaint.layout import Layout
from underpaint.models.qwen_image21 import Condition, QwenImage21
from underpaint.models.qwen_image21.transformer import round_timestep


@dataclass(frozen=True, eq=False)
class Chunk:
    """Rows of a prefix to prefill: from the end of ``prefix`` up to ``stop``; K and V go to ``run``."""

    condition: Condition
    prefix: View
    stop: int
    run: Run


@dataclass(frozen=True, eq=False)
class Branch:
    """One guidance variant of a job: what its target rows read. ``layout`` ends in the target, ``rotary`` is the
    target rows' (tokens, head_dim / 2) complex64."""

    view: View
    layout: Layout
    rotary: Tensor


@dataclass(frozen=True, eq=False)
class TargetRows:
    """One branch of one job in a step: ``latents`` (tokens, channels) at noise level ``sigma`` (0-dim fp32)."""

    branch: Branch
    latents: Tensor
    sigma: Tensor


class Runner:
    """Owns nothing but counters; weights, pages and the choice of attention are given."""

    def __init__(self, model: QwenImage21, pool: PagePool, backend: Backend, device: str) -> None:
        self.rows_prefilled = 0
        self._model = model
        self._pool = pool
        self._backend = backend
        self._device = device

    def branch(self, condition: Condition, view: View, grid: tuple[int, int]) -> Branch:
        """What a target on ``grid`` reads and where it stands behind a prefix."""
        layout = condition.layout.with_image(grid)
        return Branch(view, layout, self._model.rotary(layout, view.num_rows, layout.num_rows))

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[Chunk]) -> None:
        """One pass over all chunks; their keys and values are in their runs afterwards."""
        rows, rotary, groups = [], [], []
        first = 0
        for chunk in chunks:
            start, layout = chunk.prefix.num_rows, chunk.condition.layout
            rows.append(self._model.embed_prefix(chunk.condition, start, chunk.stop))
            rotary.append(self._model.rotary(layout, start, chunk.stop))
            groups.append(RowGroup.of(layout, chunk.stop, first, chunk.prefix, self._device))
            first += chunk.stop - start
        slots = self._pool.slots(chunk.run for chunk in chunks)
        packed = tuple(groups)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._pool.write(layer, slots, k, v)
            return self._backend(q, k, v, packed, layer)

        self._model.transformer.prefill(torch.cat(rows), torch.cat(rotary), attend)
        self.rows_prefilled += first

    @torch.inference_mode()
    def step(self, targets: Sequence[TargetRows]) -> list[Tensor]:
        """One pass over the rows of all targets: any sizes, prefixes and noise levels. Velocity of each, in order."""
        sizes = [len(target.latents) for target in targets]
        groups = []
        first = 0
        for target, size in zip(targets, sizes, strict=True):
            branch = target.branch
            groups.append(RowGroup.of(branch.layout, branch.layout.num_rows, first, branch.view, self._device))
            first += size
        packed = tuple(groups)
        latents = torch.cat([target.latents for target in targets])
        rows = self._model.transformer.img_in(latents)
        rotary = torch.cat([target.branch.rotary for target in targets])
        timesteps, row_timestep = self._timesteps(targets, sizes, rows.dtype)
        velocity = self._model.transformer(
            rows, rotary, timesteps, row_timestep, lambda layer, q, k, v: self._backend(q, k, v, packed, layer)
        )
        return list(velocity.split(sizes))

    def _timesteps(
        self, targets: Sequence[TargetRows], sizes: list[int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        timesteps = round_timestep(torch.stack([target.sigma for target in targets]), dtype).to(self._device)
        if bool((timesteps == timesteps[0]).all()):
            return timesteps[:1], None
        index = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        return timesteps, index.to(self._device)
