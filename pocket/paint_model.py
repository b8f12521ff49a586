"""Text encoder and transformer as one function for training: prompts, references and noisy targets to velocities.

A prefix (text and references) does not depend on the target or its timestep, so each prefix serves several targets
with different noise: the same split into a prefix pass and a target pass as when the engine paints.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3VLForConditionalGeneration

from pocket.build import LATENT_SIDE, VISION_PATCH
from pocket.encoder import BatchEncoder, EncoderBatch, multimodal_positions, patchify
from pocket.scenes import CANVAS
from pocket.tokenizer import IMAGE_TOKEN, SYSTEM_TURN, full_prompt
from underpaint.layout import Grid, Layout, qwen_positions
from underpaint.models.qwen_image21.transformer import (
    Modulation,
    QwenImage21Transformer,
    rotary_table,
    round_timestep,
)

VISION_MERGE = 2
VISION_SIDE = CANVAS // VISION_PATCH // VISION_MERGE  # image tokens a side
TARGET_GRID = (LATENT_SIDE, LATENT_SIDE)
TARGET_ROWS = LATENT_SIDE * LATENT_SIDE


@dataclass(frozen=True)
class TaskGeometry:
    """What all sequences of a task (so many references, tokens padded at the end) have in common.

    ``parts``: the prefix in order, a (start, stop) range of encoder tokens for text and None for a reference.
    ``slots``: encoder tokens of the images. ``cos``, ``sin``: the encoder's rotary embedding, (tokens, head_dim).
    ``prefix_rotary``: (prefix rows, head_dim / 2). ``prefix_mask``: (prefix rows, prefix rows), True is visible.
    ``text_row``: (prefix rows,) the encoder token of a row, -1 for a reference's. ``target_rotary``: the target's
    rotary embedding by the number of real tokens, (padded tokens + 1, target rows, head_dim / 2).
    """

    num_references: int
    num_tokens: int
    parts: tuple[tuple[int, int] | None, ...]
    slots: Tensor
    cos: Tensor
    sin: Tensor
    prefix_rotary: Tensor
    prefix_mask: Tensor
    text_row: Tensor
    target_rotary: Tensor


def _parts(is_image: Sequence[bool], start: int) -> tuple[tuple[int, int] | None, ...]:
    """The tokens from `start` on as runs of text and images."""
    parts: list[tuple[int, int] | None] = []
    token = start
    while token < len(is_image):
        if is_image[token]:
            parts.append(None)
            token += VISION_SIDE * VISION_SIDE
            continue
        stop = token
        while stop < len(is_image) and not is_image[stop]:
            stop += 1
        parts.append((token, stop))
        token = stop
    return tuple(parts)


def _layout(parts: Sequence[tuple[int, int] | None], num_tokens: int) -> Layout:
    """The layout of a sequence of which only the first `num_tokens` encoder tokens are real."""
    sizes: list[int | Grid] = []
    for part in parts:
        sizes.append(TARGET_GRID if part is None else max(min(part[1], num_tokens) - part[0], 0))
    return Layout.of(sizes)


def task_geometry(
    tokenizer: PreTrainedTokenizerFast,
    encoder: Qwen3VLForConditionalGeneration,
    axes: tuple[int, int, int],
    num_references: int,
    num_tokens: int,
) -> TaskGeometry:
    """The geometry of a task whose sequences are padded to `num_tokens` encoder tokens."""
    image_token = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    ids = tokenizer(full_prompt("", num_references, VISION_SIDE * VISION_SIDE)).input_ids
    shortest = len(ids)
    is_image = [token == image_token for token in ids] + [False] * (num_tokens - shortest)
    parts = _parts(is_image, start=len(tokenizer(SYSTEM_TURN).input_ids))
    positions = multimodal_positions(is_image, VISION_SIDE)
    cos, sin = encoder.model.language_model.rotary_emb(torch.zeros(1), positions[:, None])
    prefix = _layout(parts, num_tokens)
    mask = torch.arange(prefix.num_rows)[None, :] < prefix.visible_stop()[:, None]
    targets = []
    for real in range(num_tokens + 1):
        layout = _layout(parts, max(real, shortest)).with_image(TARGET_GRID)
        targets.append(rotary_table(qwen_positions(layout)[-TARGET_ROWS:], axes))
    rows = [torch.full((TARGET_ROWS,), -1) if part is None else torch.arange(*part) for part in parts]
    return TaskGeometry(
        num_references=num_references,
        num_tokens=num_tokens,
        parts=parts,
        slots=torch.tensor(is_image).nonzero()[:, 0],
        cos=cos[0],
        sin=sin[0],
        prefix_rotary=rotary_table(qwen_positions(prefix), axes),
        prefix_mask=mask,
        text_row=torch.cat(rows),
        target_rotary=torch.stack(targets),
    )


def move_geometry(geometry: TaskGeometry, device: torch.device) -> TaskGeometry:
    """The same geometry with its tensors on `device`."""
    return replace(
        geometry,
        slots=geometry.slots.to(device),
        cos=geometry.cos.to(device),
        sin=geometry.sin.to(device),
        prefix_rotary=geometry.prefix_rotary.to(device),
        prefix_mask=geometry.prefix_mask.to(device),
        text_row=geometry.text_row.to(device),
        target_rotary=geometry.target_rotary.to(device),
    )


@dataclass(frozen=True)
class TaskBatch:
    """Sequences of one task, and for each prefix `K` targets.

    ``token_ids`` (B, tokens); ``lengths`` (B,) real tokens; ``references`` (B, references, 3, CANVAS, CANVAS) in
    [-1, 1], on white; ``reference_latents`` (B, references, rows, channels); ``noisy`` (B, K, rows, channels);
    ``timesteps`` (B, K).
    """

    token_ids: Tensor
    lengths: Tensor
    references: Tensor
    reference_latents: Tensor
    noisy: Tensor
    timesteps: Tensor


class PaintModel(nn.Module):
    """The weights of the encoder and the transformer; `forward` predicts the velocity of every target."""

    def __init__(
        self,
        encoder: Qwen3VLForConditionalGeneration,
        transformer: QwenImage21Transformer,
        geometries: Sequence[TaskGeometry],
    ) -> None:
        super().__init__()
        self.encoder = BatchEncoder(encoder, VISION_SIDE * VISION_MERGE)
        self.transformer = transformer
        self.geometries = tuple(geometries)

    def forward(self, batches: Sequence[TaskBatch]) -> list[Tensor]:
        """One batch a geometry, in order -> velocities, each of the shape of its ``noisy``."""
        prefixes = self._prefixes(batches)
        passes = [_TaskPass(geometry, batch) for geometry, batch in zip(self.geometries, batches, strict=True)]
        return self._paint(prefixes, passes, batches)

    def _prefixes(self, batches: Sequence[TaskBatch]) -> list[Tensor]:
        """(B, prefix rows, hidden_size) for each batch."""
        inputs = []
        for geometry, batch in zip(self.geometries, batches, strict=True):
            patches = patchify(batch.references.flatten(0, 1), VISION_PATCH, VISION_MERGE)
            inputs.append(EncoderBatch(batch.token_ids, patches, geometry.slots, geometry.cos, geometry.sin))
        prefixes = []
        for geometry, batch, hidden in zip(self.geometries, batches, self.encoder(inputs), strict=True):
            images = iter(self.transformer.img_in(batch.reference_latents).unbind(1))
            pieces = [
                next(images) if part is None else self.transformer.txt_in(hidden[:, part[0] : part[1]])
                for part in geometry.parts
            ]
            prefixes.append(torch.cat(pieces, dim=1))
        return prefixes

    def _paint(self, prefixes: list[Tensor], passes: list["_TaskPass"], batches: Sequence[TaskBatch]) -> list[Tensor]:
        """Prefix rows and target rows go through each block one after the other, as two streams."""
        model = self.transformer
        prefix = torch.cat([x.flatten(0, 1) for x in prefixes])
        prefix_rotary = torch.cat([p.prefix_rotary for p in passes])
        targets = torch.cat([model.img_in(batch.noisy).flatten(0, 2) for batch in batches])
        target_rotary = torch.cat([p.target_rotary for p in passes])
        still = model.modulate(model.time_text_embed(prefix.new_zeros(1)))
        timesteps = round_timestep(torch.cat([batch.timesteps.flatten() for batch in batches]), targets.dtype)
        embedding = model.time_text_embed(timesteps.to(targets.dtype))
        moving = model.modulate(embedding)
        spread = Modulation(*(_per_row(x) for x in (moving.scale1, moving.gate1, moving.scale2, moving.gate2)))
        attend = _StreamAttention(passes)
        for layer, block in enumerate(model.transformer_blocks):
            prefix = block(prefix, still, prefix_rotary, layer, attend.prefix)
            targets = block(targets, spread, target_rotary, layer, attend.targets)
        scale = _per_row(model.norm_out.linear(F.silu(embedding)))
        velocity = model.proj_out(model.norm_out.norm(targets) * (1 + scale))
        sizes = [batch.noisy.shape[:3].numel() for batch in batches]
        return [x.reshape(batch.noisy.shape) for x, batch in zip(velocity.split(sizes), batches, strict=True)]


def _per_row(x: Tensor) -> Tensor:
    """(targets, channels) -> (targets * TARGET_ROWS, channels)."""
    return x[:, None].expand(-1, TARGET_ROWS, -1).flatten(0, 1)


class _TaskPass:
    """Rotary embeddings and masks of one batch of a task."""

    def __init__(self, geometry: TaskGeometry, batch: TaskBatch) -> None:
        self.count, self.copies = batch.noisy.shape[:2]
        self.prefix_rows = len(geometry.prefix_rotary)
        self.prefix_mask = geometry.prefix_mask
        self.prefix_rotary = geometry.prefix_rotary.expand(self.count, -1, -1).flatten(0, 1)
        rotary = geometry.target_rotary[batch.lengths]
        self.target_rotary = rotary[:, None].expand(-1, self.copies, -1, -1).flatten(0, 2)
        real = geometry.text_row < batch.lengths[:, None]  # a padded text row is no key of a target
        real = F.pad(real, (0, TARGET_ROWS), value=True)
        visible = torch.zeros(real.shape, device=real.device, dtype=batch.noisy.dtype)
        visible = visible.masked_fill(~real, float("-inf"))
        keys = real.shape[1]
        self.target_mask = visible[:, None, None, None].expand(-1, self.copies, 1, TARGET_ROWS, keys).flatten(0, 1)


class _StreamAttention:
    """Attention of the two streams; the prefix's keys and values of a layer wait for the targets of that layer."""

    def __init__(self, passes: list[_TaskPass]) -> None:
        self._passes = passes
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def prefix(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The `attend` of the prefix rows of all tasks."""
        sizes = [p.count * p.prefix_rows for p in self._passes]
        shapes = [(p.count, p.prefix_rows) for p in self._passes]
        queries, self._keys, self._values = (
            [part.unflatten(0, shape) for part, shape in zip(x.split(sizes), shapes, strict=True)] for x in (q, k, v)
        )
        out = []
        for p, query, key, value in zip(self._passes, queries, self._keys, self._values, strict=True):
            query, key, value = (x.transpose(1, 2) for x in (query, key, value))
            seen = F.scaled_dot_product_attention(query, key, value, attn_mask=p.prefix_mask)
            out.append(seen.transpose(1, 2).flatten(0, 1))
        return torch.cat(out)

    def targets(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The `attend` of the target rows of all tasks: their prefix and themselves."""
        sizes = [p.count * p.copies * TARGET_ROWS for p in self._passes]
        out = []
        for index, p in enumerate(self._passes):
            shape = (p.count * p.copies, TARGET_ROWS)
            query, key, value = (x.split(sizes)[index].unflatten(0, shape).transpose(1, 2) for x in (q, k, v))
            key, value = (
                torch.cat([_repeated(kept[index], p.copies), own], dim=2)
                for kept, own in ((self._keys, key), (self._values, value))
            )
            seen = F.scaled_dot_product_attention(query, key, value, attn_mask=p.target_mask)
            out.append(seen.transpose(1, 2).flatten(0, 1))
        return torch.cat(out)


def _repeated(kept: Tensor, copies: int) -> Tensor:
    """(B, rows, heads, channels) of prefixes -> (B * copies, heads, rows, channels)."""
    return kept.transpose(1, 2)[:, None].expand(-1, copies, -1, -1, -1).flatten(0, 1)
