"""One training pass through ``NeoUnifyNetwork`` for all tasks: text, pictures and noisy targets to logits and pixels.

All rows of a step are one call of the engine's transformer: understanding rows (the system message once, then the
lines of every task), and generation rows (the noisy targets). What differs from the engine is only what ``attend``
does: it works on rectangles with masks instead of pages, so that a step can be captured as a CUDA graph. Positions and
masks follow from the token ids on the device, without a look at their values on the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pocket.build_neo import GRID, NUM_CELLS, painting_noise_scale
from pocket.neo_pool import NeoTask
from pocket.scenes import CANVAS
from underpaint.layout import Grid
from underpaint.models.neo_unify.config import CELL, CELL_VALUES, Role
from underpaint.models.neo_unify.flow import ConvHead
from underpaint.models.neo_unify.network import NeoUnifyNetwork
from underpaint.models.neo_unify.transformer import rotary_table
from underpaint.models.neo_unify.vision import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    MERGE,
    CellEmbedding,
    to_patches,
)
from underpaint.models.painter import cell_places

MAX_POSITION = 1024  # of t; the longest sequence has under 400, as a picture is one step
BICUBIC = -0.5  # Pillow's parameter of the cubic


@dataclass(frozen=True)
class NeoBatch:
    """Sequences of one task. ``ids`` (B, rows) int64; ``system`` (B,) bool; ``read`` (B, read pictures, 3, CANVAS,
    CANVAS) in [0, 1]; ``stops`` (B, targets) int64, the rows that each target sees; ``noisy`` (B, targets, cells,
    3072) and ``times`` (B, targets) fp32. A task that does not paint has 0 targets."""

    task: NeoTask
    ids: Tensor
    system: Tensor
    read: Tensor
    stops: Tensor
    noisy: Tensor
    times: Tensor


@dataclass(frozen=True)
class Places:
    """Where the rows of lines stand: ``is_cell`` (B, rows) bool; ``cell`` the number of a cell among the line's, 0 for
    text; ``visible_stop`` the rule of ``layout``; ``positions`` (B, rows, 3) from the line's start."""

    is_cell: Tensor
    cell: Tensor
    visible_stop: Tensor
    positions: Tensor


def places_of(ids: Tensor, context: int, grid: Grid) -> Places:
    """The engine's ``Layout`` of (B, rows) token ids in which every picture has the size of ``grid``."""
    row = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    is_cell = ids == context
    before = F.pad(is_cell, (1, 0))[:, :-1]
    first = is_cell & ~before  # pictures never touch
    t = (~is_cell | first).cumsum(1) - 1
    begins = torch.where(first, row, 0).cummax(1).values
    within = torch.where(is_cell, row - begins, 0)
    stop = torch.where(is_cell, begins + grid[0] * grid[1], row + 1)
    cell = (is_cell.cumsum(1) - 1).clamp_min(0)
    return Places(is_cell, cell, stop, torch.stack([t, within // grid[1], within % grid[1]], dim=-1))


def upscaling(size: int, larger: int) -> Tensor:
    """(larger, size) weights of Pillow's bicubic enlargement along one side."""
    centre = (torch.arange(larger, dtype=torch.float64) + 0.5) * size / larger
    distance = (torch.arange(size, dtype=torch.float64)[None] + 0.5 - centre[:, None]).abs()
    near = ((BICUBIC + 2) * distance - (BICUBIC + 3)) * distance**2 + 1
    far = BICUBIC * (((distance - 5) * distance + 8) * distance - 4)
    weights = torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))
    return (weights / weights.sum(1, keepdim=True)).float()


def batched_cells(pictures: Tensor) -> Tensor:
    """(..., 3, height, width) -> (..., cells, 3072), see ``vision.to_cells``."""
    *lead, _, height, width = pictures.shape
    cells = pictures.reshape(-1, 3, height // CELL, CELL, width // CELL, CELL).permute(0, 2, 4, 3, 5, 1)
    return cells.reshape(*lead, -1, CELL_VALUES)


class NeoModel(nn.Module):
    """The network, and constants of all passes on its device: the system message, rotations, enlargement."""

    def __init__(
        self, network: NeoUnifyNetwork, system_ids: Sequence[int], context: int, grids: Sequence[Grid]
    ) -> None:
        super().__init__()
        self.network = network
        self.context = context
        self.num_system = len(system_ids)
        self.noise_scale = painting_noise_scale(network.config)
        language, vision = network.config.language, network.config.vision
        # Padded to a multiple of 8 rows, which nothing sees.
        padded = [*system_ids] + [system_ids[-1]] * (-len(system_ids) % 8)
        self._constant("system_ids", torch.tensor(padded))
        self._constant("rotations", rotary_table(torch.arange(MAX_POSITION)[:, None].expand(-1, 3), language))
        self._constant("mean", torch.tensor(IMAGENET_MEAN)[:, None, None])
        self._constant("std", torch.tensor(IMAGENET_STD)[:, None, None])
        for grid in {GRID, *grids}:
            width = vision.hidden_size
            self._constant(f"turns{grid}", patch_turns(grid, width, vision.rope_theta_vision))
            self._constant(f"places{grid}", F.pad(cell_places(grid), (1, 0)))
            self._constant(f"upscaling{grid}", upscaling(CANVAS, grid[0] * CELL))

    def _constant(self, name: str, value: Tensor) -> None:
        self.register_buffer(name, value, persistent=False)

    def constant(self, name: str) -> Tensor:
        """A tensor that training does not change."""
        return self.get_buffer(name)

    @cached_property
    def axes(self) -> tuple[int, int, int]:
        """Rotations of a head that belong to t, height and width."""
        t, height, width = self.network.config.language.rotary_axes
        return t // 2, height // 2, width // 2

    def forward(self, batches: Sequence[NeoBatch]) -> list[tuple[Tensor | None, Tensor]]:
        """For each batch: logits (B, rows, vocab_size) if its task talks, and predicted pixels (B, targets, cells,
        3072) in about [-1, 1]."""
        passes = [_TaskPass(self, batch) for batch in batches]
        system = self.constant("system_ids")
        at = torch.arange(len(system), device=system.device)
        rows = [self.network.embed_tokens(system)] + [self._embed(p, b) for p, b in zip(passes, batches, strict=True)]
        rotary = [self.rotary(F.pad(at[:, None], (0, 2)))] + [self.rotary(p.positions.flatten(0, 1)) for p in passes]
        painting = [(p, b) for p, b in zip(passes, batches, strict=True) if p.num_targets]
        by_role = {Role.UNDERSTAND: torch.cat(rows)}
        if painting:
            by_role[Role.GENERATE] = self._embed_targets([b for _, b in painting], rows[0].dtype)
            rotary += [self.rotary(p.target_positions.flatten(0, 2)) for p, _ in painting]
        attend = _RectangleAttention(passes, len(system))
        hidden = self.network(by_role, torch.cat(rotary), attend)
        return self._read_out(passes, batches, hidden)

    def rotary(self, positions: Tensor) -> Tensor:
        """(rows, 3) -> (rows, head_dim / 2) complex64."""
        parts = self.constant("rotations").split(self.axes, dim=-1)
        return torch.cat([part[positions[:, axis]] for axis, part in enumerate(parts)], dim=-1)

    def _embed(self, task: "_TaskPass", batch: NeoBatch) -> Tensor:
        """(B * rows, hidden_size): token embeddings, and cells in their places."""
        text = self.network.embed_tokens(batch.ids)
        if not batch.read.shape[1]:
            return text.flatten(0, 1)
        cells = self.read_cells(batch.read, batch.task.grid).to(text.dtype)
        turns = self.constant(f"turns{batch.task.grid}")
        embedded = embed_cells(self.network.vision_model, cells, turns).flatten(1, 2)
        index = task.places.cell[..., None].expand(-1, -1, embedded.shape[-1])
        return torch.where(task.places.is_cell[..., None], embedded.gather(1, index), text).flatten(0, 1)

    def read_cells(self, pictures: Tensor, grid: Grid) -> Tensor:
        """(..., 3, CANVAS, CANVAS) in [0, 1] -> (..., cells, 3072), enlarged to ``grid`` as Pillow does, normalised."""
        if grid != GRID:
            larger = self.constant(f"upscaling{grid}")
            # One side after the other, with whole values between 0 and 255 after each.
            pictures = _whole(_whole(pictures * 255 @ larger.T).transpose(-1, -2) @ larger.T).transpose(-1, -2) / 255
        return batched_cells((pictures - self.constant("mean")) / self.constant("std"))

    def _embed_targets(self, batches: Sequence[NeoBatch], dtype: torch.dtype) -> Tensor:
        """(targets * cells, hidden_size) of all batches."""
        parts = self.network.fm_modules
        cells = torch.cat([b.noisy.flatten(0, 1) for b in batches]).to(dtype)
        times = torch.cat([b.times.flatten() for b in batches])
        scale = self.noise_scale / self.network.config.flow.noise_scale_max_value
        level = parts["timestep_embedder"](times) + parts["noise_scale_embedder"](torch.full_like(times[:1], scale))
        rows = embed_cells(parts["vision_model_mot_gen"], cells, self.constant(f"turns{GRID}"))
        return (rows + level[:, None]).flatten(0, 1)

    def _read_out(
        self, passes: "Sequence[_TaskPass]", batches: Sequence[NeoBatch], hidden: dict[Role, Tensor]
    ) -> list[tuple[Tensor | None, Tensor]]:
        lines = hidden[Role.UNDERSTAND].split([len(self.constant("system_ids"))] + [p.num_lines_rows for p in passes])
        sizes = [p.num_target_rows for p in passes]
        if any(sizes):
            pixels = predict_pixels(self.network.fm_modules["fm_head"], hidden[Role.GENERATE]).split(sizes)
        else:
            pixels = tuple(b.noisy.flatten(0, 2) for b in batches)
        out = []
        for batch, line, cells in zip(batches, lines[1:], pixels, strict=True):
            logits = self.network.logits(line).unflatten(0, batch.ids.shape) if batch.task.talks else None
            out.append((logits, cells.reshape(batch.noisy.shape)))
        return out


def _whole(values: Tensor) -> Tensor:
    return (values + 0.5).floor().clamp(0, 255)


def patch_turns(grid: Grid, width: int, theta: float) -> Tensor:
    """(cells, 4, width / 2) complex64: how ``CellEmbedding`` turns the patches of a picture."""
    dim = width // 2
    inner = cell_places((MERGE, MERGE))
    at = (cell_places(grid)[:, None] * MERGE + inner).flip(-1).to(torch.float32)
    exponent = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    angle = (at[..., None] / torch.pow(theta, exponent)).flatten(-2)
    return torch.polar(torch.ones_like(angle), angle)


def embed_cells(module: nn.Module, cells: Tensor, turns: Tensor) -> Tensor:
    """``CellEmbedding`` for many pictures of one grid, (..., cells, 3072) -> (..., cells, hidden_size), with the
    turns given: the module makes them on the host, which a CUDA graph cannot."""
    assert isinstance(module, CellEmbedding)
    patch, dense = module.embeddings["patch_embedding"], module.embeddings["dense_embedding"]
    assert isinstance(patch, nn.Conv2d)
    assert isinstance(dense, nn.Conv2d)
    patches = to_patches(cells.flatten(0, -2)).unflatten(0, (-1, len(turns)))
    patches = F.gelu(F.linear(patches, patch.weight.flatten(1), patch.bias))
    pairs = torch.view_as_complex(patches.float().unflatten(-1, (-1, 2)))
    turned = torch.view_as_real(pairs * turns).flatten(-2).type_as(patches)
    merged = F.linear(turned.transpose(-1, -2).flatten(-2), dense.weight.flatten(1), dense.bias)
    return merged.reshape(*cells.shape[:-1], -1)


def predict_pixels(head: nn.Module, rows: Tensor) -> Tensor:
    """``ConvHead`` for many pictures of the scenes' size at once, (pictures * cells, hidden_size) -> (.., 3072)."""
    assert isinstance(head, ConvHead)
    image = rows.reshape(-1, NUM_CELLS, rows.shape[-1]).transpose(1, 2).unflatten(2, GRID)
    image = F.gelu(head.conv1(F.pixel_shuffle(image, 2)))
    pixels = F.pixel_shuffle(head.conv2(F.pixel_shuffle(image, 2)), 8)
    return batched_cells(pixels).flatten(0, 1)


class _TaskPass:
    """Positions and masks of one batch. Keys are the system message (if the task has it), the line, and for targets
    all targets of the line; masks are added to scores, (B, 1, queries, keys)."""

    def __init__(self, model: NeoModel, batch: NeoBatch) -> None:
        self.has_system = batch.task.has_system
        self.count, self.num_rows = batch.ids.shape
        self.num_targets = batch.noisy.shape[1]
        self.num_lines_rows = self.count * self.num_rows
        self.num_target_rows = self.count * self.num_targets * NUM_CELLS
        self.places = places_of(batch.ids, model.context, batch.task.grid)
        moved = batch.system[:, None] * model.num_system
        self.positions = self.places.positions + F.pad(moved[..., None], (0, 2))
        row = torch.arange(self.num_rows, device=batch.ids.device)
        dtype = model.network.language_model.lm_head.weight.dtype
        seen = [row < self.places.visible_stop[..., None]]
        if self.has_system:
            num_padded = len(model.constant("system_ids"))
            real = torch.arange(num_padded, device=row.device) < model.num_system
            system = batch.system[:, None] & real
            seen.insert(0, system[:, None].expand(-1, self.num_rows, -1))
        self.mask = _added(torch.cat(seen, dim=-1), dtype)
        if not self.num_targets:
            return
        seen = [row < batch.stops[..., None]]
        if self.has_system:
            seen.insert(0, system[:, None].expand(-1, self.num_targets, -1))
        own = torch.eye(self.num_targets, dtype=torch.bool, device=row.device).repeat_interleave(NUM_CELLS, dim=1)
        seen.append(own.expand(self.count, -1, -1))
        self.target_mask = _added(torch.cat(seen, dim=-1).repeat_interleave(NUM_CELLS, dim=1), dtype)
        # One t behind the last row that a target sees.
        last = self.positions[..., 0].gather(1, batch.stops - 1) + 1
        canvas = model.constant(f"places{GRID}").expand(self.count, self.num_targets, -1, -1)
        self.target_positions = canvas + F.pad(last[..., None, None], (0, 2))


def _added(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, -torch.inf)[:, None]


class _RectangleAttention:
    """``attend`` for a whole step: system message, lines of each task, targets of each task."""

    def __init__(self, passes: Sequence[_TaskPass], num_system: int) -> None:
        self._passes = passes
        self._sizes = [num_system] + [p.num_lines_rows for p in passes]
        self._counts = [1] + [p.count for p in passes]
        painting = [p for p in passes if p.num_targets]
        self._sizes += [p.num_target_rows for p in painting]
        self._counts += [p.count for p in painting]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(rows, heads, head_dim) queries and (rows, kv_heads, head_dim) keys and values -> (rows, heads, head_dim)."""
        group = q.shape[1] // k.shape[1]
        streams = zip(self._divide(q, 1), self._divide(k, group), self._divide(v, group), strict=True)
        query, *system = next(streams)
        out = [F.scaled_dot_product_attention(query, system[0], system[1], is_causal=True)]
        lines = []
        for p in self._passes:
            query, *own = next(streams)
            if p.has_system:
                own = [torch.cat([s.expand(p.count, -1, -1, -1), x], dim=2) for s, x in zip(system, own, strict=True)]
            lines.append(own)
            out.append(F.scaled_dot_product_attention(query, own[0], own[1], attn_mask=p.mask))
        for p, line in zip(self._passes, lines, strict=True):
            if p.num_targets:
                query, *own = next(streams)
                own = [torch.cat([before, x], dim=2) for before, x in zip(line, own, strict=True)]
                out.append(F.scaled_dot_product_attention(query, own[0], own[1], attn_mask=p.target_mask))
        return torch.cat([x.transpose(1, 2).flatten(0, 1) for x in out])

    def _divide(self, x: Tensor, spread: int) -> list[Tensor]:
        """The streams of (rows, heads, head_dim), each (B, heads * spread, rows of a line, head_dim)."""
        parts = zip(x.split(self._sizes), self._counts, strict=True)
        return [part.unflatten(0, (n, -1)).transpose(1, 2).repeat_interleave(spread, dim=1) for part, n in parts]
