"""The diffusion transformer of Qwen-Image 2.1, in plain PyTorch, for inference and for training.

It works on packed rows: the rows of any number of sequences one after another, shape (rows, channels). What a row
sees is decided by ``attend``, where it stands by ``rotary``, and which timestep it has by ``row_timestep``; so the
same code runs the prefill of a prefix, a denoising step, a mixture of both, and a training batch.

Text and reference rows are modulated at t = 0, which makes their hidden states, and so their keys and values,
independent of the step: they are prefilled once.

Module names equal the tensor names of the released checkpoint. Arithmetic follows diffusers 0.42.1
(``QwenImage21Transformer2DModel``), including where it rounds.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from underpaint.attention.batch import ProductAttend
from underpaint.models.painter import Attend
from underpaint.models.rms_norm import RMSNorm

if TYPE_CHECKING:
    from underpaint.models.qwen_image21.fused import FusedBlocks

NUM_TIMESTEPS = 1000
"""A timestep in [0, 1] is embedded as a number in [0, 1000]."""
TIMESTEP_CHANNELS = 256
ROTARY_THETA = 10000.0
FP16_MAX = 65504.0


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes, named as in the checkpoint's ``transformer/config.json``; the defaults are the released 7B."""

    in_channels: int = 64
    out_channels: int = 64
    num_layers: int = 32
    attention_head_dim: int = 128
    num_attention_heads: int = 32
    context_in_dim: int = 4096
    mlp_ratio: int = 3
    axes_dims_rope: tuple[int, int, int] = (16, 56, 56)
    eps: float = 1e-6

    @property
    def hidden_size(self) -> int:
        return self.num_attention_heads * self.attention_head_dim


@dataclass(frozen=True)
class Modulation:
    """Scales and gates of every block, (timesteps, channels) each; the gates have been through tanh."""

    scale1: Tensor
    gate1: Tensor
    scale2: Tensor
    gate2: Tensor

    def rows(self, row_timestep: Tensor | None) -> "Modulation":
        """One line a row, or the first line alone, to broadcast, when all rows share a timestep."""
        every = (self.scale1, self.gate1, self.scale2, self.gate2)
        return Modulation(*(_lines(x, row_timestep) for x in every))


def _lines(table: Tensor, row_timestep: Tensor | None) -> Tensor:
    return table[:1] if row_timestep is None else table[row_timestep]


def rotary_table(positions: Tensor, axes: tuple[int, ...], theta: float = ROTARY_THETA) -> Tensor:
    """(rows, len(axes)) integer positions -> (rows, sum(axes) / 2) complex64 rotations, computed on the CPU.

    No position is out of range. (diffusers reads a table of 8192 positive and 1024 negative positions: position 8192
    and beyond silently reads a negative one.) Product and sine are fp32, as the model was trained.
    """
    angles = []
    for axis, dim in enumerate(axes):
        frequencies = 1.0 / torch.pow(theta, torch.arange(0, dim, 2).to(torch.float32).div(dim))
        angles.append(torch.outer(positions[:, axis].cpu(), frequencies))
    angle = torch.cat(angles, dim=-1)
    return torch.polar(torch.ones_like(angle), angle)


def apply_rotary(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate adjacent pairs of channels of (rows, heads, head_dim) by (rows, head_dim / 2) complex64, in fp32."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotary[:, None]).flatten(-2).type_as(x)


def round_timestep(sigma: Tensor, dtype: torch.dtype) -> Tensor:
    """Sigma in [0, 1] -> the timestep the model reads, rounded as diffusers rounds it.

    The scheduler's timestep (sigma x 1000) is cast to the model's dtype before it is divided by 1000: in bf16 the
    grid above 512 is 4 units wide, and an unrounded timestep paints another image.
    """
    return (sigma.float() * NUM_TIMESTEPS).to(dtype) / NUM_TIMESTEPS


class ZeroCentredRMSNorm(nn.Module):
    """Root-mean-square norm whose checkpoint stores scale - 1; computed in fp32 throughout."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (self.weight.float() + 1)).type_as(x)


class TextProjection(nn.Module):
    """Hidden states of the text encoder (before its final norm) -> rows of the transformer."""

    def __init__(self, context_dim: int, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.text_norm = ZeroCentredRMSNorm(context_dim, eps)
        self.in_layer = nn.Linear(context_dim, hidden_size, bias=False)
        self.out_layer = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_layer(F.gelu(self.in_layer(self.text_norm(x)), approximate="tanh"))


class TimestepEmbedding(nn.Module):
    """Sinusoid of the timestep (cosines first), then two linear layers."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.timestep_embedder = nn.ModuleDict(
            {
                "linear_1": nn.Linear(TIMESTEP_CHANNELS, hidden_size, bias=False),
                "linear_2": nn.Linear(hidden_size, hidden_size, bias=False),
            }
        )

    def forward(self, timesteps: Tensor) -> Tensor:
        """(timesteps,) in [0, 1], in the model's dtype -> (timesteps, hidden_size)."""
        half = TIMESTEP_CHANNELS // 2
        exponent = torch.arange(half, dtype=torch.float32, device=timesteps.device) / half
        frequencies = torch.exp(-math.log(ROTARY_THETA) * exponent)
        angle = (NUM_TIMESTEPS * timesteps.float())[:, None] * frequencies
        sinusoid = torch.cat([angle.cos(), angle.sin()], dim=-1).to(timesteps.dtype)
        hidden = F.silu(self.timestep_embedder["linear_1"](sinusoid))
        return self.timestep_embedder["linear_2"](hidden)


class Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        inner = num_heads * head_dim
        self.head_dim = head_dim
        self.to_q = nn.Linear(dim, inner, bias=False)
        self.to_k = nn.Linear(dim, inner, bias=False)
        self.to_v = nn.Linear(dim, inner, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(inner, dim, bias=False)])
        self.norm_q = RMSNorm(head_dim, eps)
        self.norm_k = RMSNorm(head_dim, eps)

    def forward(self, x: Tensor, rotary: Tensor, layer: int, attend: Attend) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, self.head_dim)) for linear in (self.to_q, self.to_k, self.to_v))
        q = apply_rotary(self.norm_q(q).type_as(v), rotary)
        k = apply_rotary(self.norm_k(k).type_as(v), rotary)
        return self.to_out[0](attend(layer, q, k, v).flatten(-2))


class SwiGLU(nn.Module):
    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, inner, bias=False)
        self.gate_layer = nn.Linear(dim, inner, bias=False)
        self.out = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.silu(self.gate_layer(x)) * self.proj(x))


class Block(nn.Module):
    """Attention and feed-forward; it owns no modulation, one is shared by all blocks."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        dim = config.hidden_size
        self.img_norm1 = nn.LayerNorm(dim, eps=config.eps, elementwise_affine=False)
        self.attn = Attention(dim, config.num_attention_heads, config.attention_head_dim, config.eps)
        self.img_norm2 = nn.LayerNorm(dim, eps=config.eps, elementwise_affine=False)
        self.img_mlp = SwiGLU(dim, dim * config.mlp_ratio)

    def forward(self, x: Tensor, modulation: Modulation, rotary: Tensor, layer: int, attend: Attend) -> Tensor:
        attention = self.attn(self.img_norm1(x) * (1 + modulation.scale1), rotary, layer, attend)
        x = x + modulation.gate1 * attention
        x = x + modulation.gate2 * self.img_mlp(self.img_norm2(x) * (1 + modulation.scale2))
        return x.clip(-FP16_MAX, FP16_MAX) if x.dtype == torch.float16 else x


class OutputNorm(nn.Module):
    """Final norm with a scale from the timestep, and no shift."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim, bias=False)
        self.norm = nn.LayerNorm(dim, eps=eps, elementwise_affine=False)

    def forward(self, x: Tensor, timestep_embedding: Tensor, row_timestep: Tensor | None) -> Tensor:
        scale = self.linear(F.silu(timestep_embedding))
        return self.norm(x) * (1 + _lines(scale, row_timestep))


class QwenImage21Transformer(nn.Module):
    """See the module docstring. ``prefill`` fills a prefix through ``attend``; ``forward`` also predicts velocity."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self._fused: FusedBlocks | None = None
        dim = config.hidden_size
        self.time_text_embed = TimestepEmbedding(dim)
        self.txt_in = TextProjection(config.context_in_dim, dim, config.eps)
        self.img_in = nn.Linear(config.in_channels, dim, bias=False)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 4 * dim, bias=False))
        self.transformer_blocks = nn.ModuleList([Block(config) for _ in range(config.num_layers)])
        self.norm_out = OutputNorm(dim, config.eps)
        self.proj_out = nn.Linear(dim, config.out_channels, bias=False)

    def fuse(self) -> None:
        """From now on passes run with fused kernels (``fused``), whose ``attend`` is a ``ProductAttend``. For inference
        on weights that are loaded; the names of the state dict stay."""
        from underpaint.models.qwen_image21.fused import FusedBlocks  # needs Triton

        self._fused = FusedBlocks(list(self.transformer_blocks), self.config)

    @property
    def fused(self) -> bool:
        return self._fused is not None

    def embed_timesteps(self, timesteps: Tensor) -> Tensor:
        """(timesteps,) -> (timesteps + 1, hidden_size); the last line is t = 0, as in diffusers.

        It rides along even when no row is at t = 0: with one line alone the products would be matrix-vector products,
        which sum in another order, and a job would differ from itself in company.
        """
        return self.time_text_embed(torch.cat([timesteps, timesteps.new_zeros(1)]))

    def modulate(self, timestep_embedding: Tensor) -> Modulation:
        """(timesteps, hidden_size) -> what every block applies, once a pass."""
        scale1, gate1, scale2, gate2 = self.modulation(timestep_embedding).chunk(4, dim=-1)
        return Modulation(scale1, gate1.tanh(), scale2, gate2.tanh())

    def _blocks(self, rows: Tensor, embedding: Tensor, index: Tensor | None, rotary: Tensor, attend: Attend) -> Tensor:
        if self._fused is not None:
            assert isinstance(attend, ProductAttend), "a fused transformer leaves it to attention to finish products"
            return self._fused(rows, self.modulate(embedding), index, rotary, attend)
        modulation = self.modulate(embedding).rows(index)
        for layer, block in enumerate(self.transformer_blocks):
            rows = block(rows, modulation, rotary, layer, attend)
        return rows

    def prefill(self, rows: Tensor, rotary: Tensor, attend: Attend) -> None:
        """Run prefix rows (rows, hidden_size) at t = 0; their keys and values reach the cache through ``attend``."""
        embedding = self.embed_timesteps(rows.new_zeros(1))
        self._blocks(rows, embedding, None, rotary, attend)

    def forward(
        self, rows: Tensor, rotary: Tensor, timesteps: Tensor, row_timestep: Tensor | None, attend: Attend
    ) -> Tensor:
        """Velocity (noise - image) of every row.

        ``rows``: (rows, hidden_size) from ``img_in`` (latents) and ``txt_in`` (text). ``rotary``: (rows, head_dim / 2)
        complex64. ``timesteps``: (timesteps,) in [0, 1], see ``round_timestep``. ``row_timestep``: (rows,) int64
        index into ``timesteps`` (one past its end: t = 0), or None when all rows are at the first. Returns
        (rows, out_channels).
        """
        embedding = self.embed_timesteps(timesteps.to(rows.dtype))
        rows = self._blocks(rows, embedding, row_timestep, rotary, attend)
        return self.proj_out(self.norm_out(rows, embedding, row_timestep))
