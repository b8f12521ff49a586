"""The blocks of Qwen-Image 2.1 with fused kernels: the same modules and weights, read fewer times.

Rows are rounded where the plain modules round them. Modulation stays a table of a line a timestep, which the kernels
look up for each row. Where the linears are in e4m3, what they read is quantised by the kernel that makes it; only
attention's output is quantised by itself. Works for inference only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from underpaint.attention.batch import ProductAttend
from underpaint.kernels.head_form import HeadForm
from underpaint.kernels.linear import feed_forward, multiply
from underpaint.kernels.norm_modulate import gate_norm_modulate, gate_norm_modulate_quantised
from underpaint.models.fp8 import Fp8Linear
from underpaint.models.fusing import join_in_place
from underpaint.models.qwen_image21.transformer import FP16_MAX, Block, Modulation, TransformerConfig


@dataclass(frozen=True, eq=False)
class FusedBlock:
    """The linears of a block. ``qkv`` gives the heads of q, of k and of v, ``gate_up`` the gate and what it gates."""

    qkv: nn.Module
    form: HeadForm
    out: nn.Module
    gate_up: nn.Module
    down: nn.Module


class FusedBlocks:
    """In the place of the blocks, whose linears it joins: see ``join_in_place``."""

    def __init__(self, blocks: Sequence[nn.Module], config: TransformerConfig) -> None:
        self._config = config
        self._blocks = [_fuse(block) for block in blocks]
        quantised = any(isinstance(block.qkv, Fp8Linear) for block in self._blocks)
        self._modulate = gate_norm_modulate_quantised if quantised else gate_norm_modulate

    def __call__(
        self, rows: Tensor, modulation: Modulation, group: Tensor | None, rotary: Tensor, attend: ProductAttend
    ) -> Tensor:
        """(rows, hidden_size) through all blocks. ``modulation``: a line a timestep; ``group``: (rows,) int64, the line
        of each row, None: the first."""
        config = self._config
        heads, head_dim, eps = config.num_attention_heads, config.attention_head_dim, config.eps
        limit = FP16_MAX if rows.dtype == torch.float16 else torch.inf
        rows, delta, gate = rows.contiguous(), None, None
        for layer, block in enumerate(self._blocks):
            rows, normed = self._modulate(rows, delta, gate, modulation.scale1, group, eps, limit)
            qkv = multiply(block.qkv, normed).unflatten(-1, (-1, head_dim))
            delta = multiply(block.out, attend.finish(layer, qkv, heads, block.form, rotary).flatten(-2))
            rows, normed = self._modulate(rows, delta, modulation.gate1, modulation.scale2, group, eps)
            delta, gate = feed_forward(block.gate_up, block.down, normed), modulation.gate2
        return gate_norm_modulate(rows, delta, gate, None, group, eps, limit)[0]


def _fuse(block: nn.Module) -> FusedBlock:
    assert isinstance(block, Block)
    attention, feed_forward = block.attn, block.img_mlp
    weights = torch.stack([attention.norm_q.weight, attention.norm_k.weight])
    return FusedBlock(
        qkv=join_in_place([attention.to_q, attention.to_k, attention.to_v]),
        form=HeadForm.of(weights, attention.norm_q.eps, adjacent=True),
        out=attention.to_out[0],
        gate_up=join_in_place([feed_forward.gate_layer, feed_forward.proj]),
        down=feed_forward.out,
    )
