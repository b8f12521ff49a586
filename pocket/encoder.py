"""The text encoder on batches of one fixed geometry, for training.

The class of transformers looks at grids and lengths on the host in every forward pass. Here every sequence of a task
has its images at the same places, so positions and masks are made once, and a step can be captured as a CUDA graph.
The weights and the arithmetic are those of `Qwen3VLForConditionalGeneration`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3VLForConditionalGeneration
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLTextDecoderLayer,
    Qwen3VLVisionBlock,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_vision,
)
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids


@dataclass(frozen=True)
class EncoderBatch:
    """Sequences of one task. ``token_ids`` (B, tokens), padded at the end; ``patches`` (B * images, patches, values);
    ``slots`` (image tokens of a sequence,) where its images stand; ``cos``, ``sin`` (tokens, head_dim)."""

    token_ids: Tensor
    patches: Tensor
    slots: Tensor
    cos: Tensor
    sin: Tensor


def multimodal_positions(is_image: Sequence[bool], side: int) -> Tensor:
    """(3, tokens) rotary positions of Qwen3-VL for square images of `side` x `side` tokens.

    Text stands at p on all three axes; an image stands at p in time, counts rows and columns from p, and moves p on by
    its side.
    """
    positions: list[tuple[int, int, int]] = []
    position, token = 0, 0
    while token < len(is_image):
        if is_image[token]:
            positions += [(position, position + y, position + x) for y in range(side) for x in range(side)]
            position, token = position + side, token + side * side
        else:
            positions.append((position, position, position))
            position, token = position + 1, token + 1
    return torch.tensor(positions).T


def patchify(pictures: Tensor, patch: int, merge: int) -> Tensor:
    """(B, 3, H, W) in [-1, 1] -> (B, patches, 3 * 2 * patch * patch) in the order of Qwen's image processor.

    Patches that are merged into one token follow each other; the two frames of a patch are the same picture.
    """
    count, channels, height, width = pictures.shape
    rows, columns = height // patch // merge, width // patch // merge
    x = pictures.reshape(count, channels, rows, merge, patch, columns, merge, patch)
    x = x.permute(0, 2, 5, 3, 6, 1, 4, 7)  # B, row, column, row in merge, column in merge, channel, y, x
    x = x[:, :, :, :, :, :, None].expand(-1, -1, -1, -1, -1, -1, 2, -1, -1)
    return x.reshape(count, rows * columns * merge * merge, channels * 2 * patch * patch)


class BatchEncoder(nn.Module):
    """Hidden states before the final norm, for a list of batches whose rows share every linear layer."""

    grid_index: Tensor
    grid_weight: Tensor
    vision_cos: Tensor
    vision_sin: Tensor

    def __init__(self, model: Qwen3VLForConditionalGeneration, grid: int) -> None:
        """`grid`: patches a side of every image."""
        super().__init__()
        self.model = model
        model.model.language_model.norm.requires_grad_(False)  # never applied
        vision = model.model.visual
        shape = torch.tensor([[1, grid, grid]])
        merge = vision.config.spatial_merge_size
        index, weight = get_vision_interpolation_indices_and_weights(
            shape,
            num_grid_per_side=vision.num_grid_per_side,
            mode=vision.interpolation_mode,
            align_corners=vision.interpolation_align_corners,
            spatial_merge_size=merge,
            kwargs={},
        )
        cos, sin = vision.rotary_pos_emb(torch.zeros(1), get_vision_position_ids(shape, merge, kwargs={}))
        self.register_buffer("grid_index", index, persistent=False)
        self.register_buffer("grid_weight", weight, persistent=False)
        self.register_buffer("vision_cos", cos, persistent=False)
        self.register_buffer("vision_sin", sin, persistent=False)

    def forward(self, batches: list[EncoderBatch]) -> list[Tensor]:
        """For each batch (B, tokens, width)."""
        language = self.model.model.language_model
        features = self._vision(torch.cat([batch.patches for batch in batches]))
        per_batch = [len(batch.patches) for batch in batches]
        inputs, *deepstack = (
            [self._in_place(part, batch) for part, batch in zip(feature.split(per_batch), batches, strict=True)]
            for feature in features
        )
        hidden = []
        for batch, image in zip(batches, inputs, strict=True):
            embedded = language.embed_tokens(batch.token_ids)
            hidden.append(embedded if image is None else embedded.index_copy(1, batch.slots, image))
        for index, layer in enumerate(language.layers):
            hidden = _decoder_layer(layer, hidden, batches)
            if index < len(deepstack):
                hidden = [
                    x if image is None else x.index_add(1, batch.slots, image)
                    for x, image, batch in zip(hidden, deepstack[index], batches, strict=True)
                ]
        return hidden

    @staticmethod
    def _in_place(features: Tensor, batch: EncoderBatch) -> Tensor | None:
        """(images, tokens, width) -> (B, image tokens of a sequence, width), None without images."""
        if len(batch.slots) == 0:
            return None
        return features.reshape(len(batch.token_ids), len(batch.slots), features.shape[-1])

    def _vision(self, patches: Tensor) -> list[Tensor]:
        """The merged features of (images, patches, values), then those for the first decoder layers (deepstack)."""
        vision = self.model.model.visual
        merged_shape = (len(patches), patches.shape[1] // vision.spatial_merge_unit)
        weight = vision.patch_embed.proj.weight
        # A convolution whose stride is its kernel is a linear layer on patches.
        x = F.linear(patches, weight.flatten(1), vision.patch_embed.proj.bias)
        position = (vision.pos_embed(self.grid_index) * self.grid_weight[:, :, None].to(x)).sum(1)
        x = x + position
        merged = []
        for index, block in enumerate(vision.blocks):
            x = _vision_block(block, x, self.vision_cos, self.vision_sin)
            if index in vision.deepstack_visual_indexes:
                merger = vision.deepstack_merger_list[vision.deepstack_visual_indexes.index(index)]
                merged.append(merger(x.flatten(0, 1)).unflatten(0, merged_shape))
        return [vision.merger(x.flatten(0, 1)).unflatten(0, merged_shape), *merged]


def _vision_block(block: Qwen3VLVisionBlock, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    attention = block.attn
    qkv = attention.qkv(block.norm1(x)).unflatten(-1, (3, attention.num_heads, -1))
    q, k, v = qkv.unbind(2)
    q, k = apply_rotary_pos_emb_vision(q, k, cos, sin)
    seen = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    x = x + attention.proj(seen.transpose(1, 2).flatten(2))
    return x + block.mlp(block.norm2(x))


def _decoder_layer(layer: Qwen3VLTextDecoderLayer, hidden: list[Tensor], batches: list[EncoderBatch]) -> list[Tensor]:
    """Linear layers see the rows of all batches at once, attention each batch for itself."""
    attention = layer.self_attn
    shapes = [x.shape[:2] for x in hidden]
    sizes = [count * length for count, length in shapes]
    rows = torch.cat([x.flatten(0, 1) for x in hidden])
    normed = layer.input_layernorm(rows)
    q = attention.q_norm(attention.q_proj(normed).unflatten(-1, (-1, attention.head_dim)))
    k = attention.k_norm(attention.k_proj(normed).unflatten(-1, (-1, attention.head_dim)))
    v = attention.v_proj(normed).unflatten(-1, (-1, attention.head_dim))
    seen = []
    for shape, batch, *qkv in zip(shapes, batches, q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
        query, key, value = (x.unflatten(0, shape).transpose(1, 2) for x in qkv)
        query, key = apply_rotary_pos_emb(query, key, batch.cos.to(query), batch.sin.to(query), unsqueeze_dim=0)
        # Padding is at the end, so no real token sees it.
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        seen.append(out.transpose(1, 2).flatten(2).flatten(0, 1))
    rows = rows + attention.o_proj(torch.cat(seen))
    rows = rows + layer.mlp(layer.post_attention_layernorm(rows))
    return [x.unflatten(0, shape) for x, shape in zip(rows.split(sizes), shapes, strict=True)]
