"""The transformer of NEO-Unify: one stack of layers with two sets of weights, in plain PyTorch.

Rows of text and of pictures that are read go through the understanding weights, rows of a picture that is being
painted through the generation weights (``_mot_gen``); both meet in attention, where the second read the keys and
values of the first. It works on packed rows: the rows of any number of sequences one after another, shape
(rows, channels), first those of one role and then those of the other. What a row sees is decided by ``attend``, where
it stands by ``rotary``. So prefill, decoding, reading a picture back and denoising are the same code, alone or mixed.

Module names equal the tensor names of the released checkpoints. A network for one role has that role's modules only.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from underpaint.models.neo_unify.config import FeedForward, LanguageConfig
from underpaint.models.painter import Attend
from underpaint.models.rms_norm import RMSNorm
from underpaint.models.roles import Role

RoleRows = Mapping[Role, Tensor]
"""(rows, channels) by role, in the order in which they stand in the pass."""


def rotary_table(positions: Tensor, config: LanguageConfig) -> Tensor:
    """(rows, 3) integer positions (t, height, width) -> (rows, head_dim / 2) complex64 rotations, on the CPU.

    Half of a head turns with t, a quarter with each of the others, at frequencies theta ** (-2 i / channels) of that
    part. Computed, not looked up, so no position is out of range; on the CPU, because devices round sine differently.
    """
    thetas = (config.rope_theta, config.rope_theta_hw, config.rope_theta_hw)
    angles = []
    for axis, (theta, dim) in enumerate(zip(thetas, config.rotary_axes, strict=True)):
        frequencies = 1.0 / torch.pow(theta, torch.arange(0, dim, 2).to(torch.float32).div(dim))
        angles.append(torch.outer(positions[:, axis].cpu().to(torch.float32), frequencies))
    angle = torch.cat(angles, dim=-1)
    return torch.polar(torch.ones_like(angle), angle)


def apply_rotary(x: Tensor, rotary: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Rotate (rows, heads, head_dim) by (rows, head_dim / 2) complex64, in fp32.

    Within the channels of each axis, the pairs are the first half against the second.
    """
    turned = []
    turns = rotary[:, None].split([dim // 2 for dim in axes], dim=-1)
    for part, turn in zip(x.float().split(axes, dim=-1), turns, strict=True):
        first, second = part.chunk(2, dim=-1)
        turned += [first * turn.real - second * turn.imag, second * turn.real + first * turn.imag]
    return torch.cat(turned, dim=-1).type_as(x)


class Attention(nn.ModuleDict):
    """Grouped-query attention; projections and norms by role, under the released names."""

    def __init__(self, config: LanguageConfig, roles: Sequence[Role]) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.axes = config.rotary_axes
        query, shared = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        for role in roles:
            for name, width in (("q", query), ("k", shared), ("v", shared)):
                self[f"{name}_proj{role.value}"] = nn.Linear(config.hidden_size, width, bias=False)
            self[f"o_proj{role.value}"] = nn.Linear(query, config.hidden_size, bias=False)
            for name in ("q_norm", "k_norm", "q_norm_hw", "k_norm_hw"):
                self[f"{name}{role.value}"] = RMSNorm(config.head_dim // 2, config.rms_norm_eps)

    def forward(self, rows: RoleRows, rotary: Tensor, layer: int, attend: Attend) -> dict[Role, Tensor]:
        projected = [self._project(role, x) for role, x in rows.items()]
        q, k, v = (_pack(parts) for parts in zip(*projected, strict=True))
        q, k = apply_rotary(q, rotary, self.axes), apply_rotary(k, rotary, self.axes)
        mixed = attend(layer, q, k, v).flatten(-2).split([len(x) for x in rows.values()])
        return {role: self[f"o_proj{role.value}"](x) for role, x in zip(rows, mixed, strict=True)}

    def _project(self, role: Role, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self[f"{name}_proj{role.value}"](x).unflatten(-1, (-1, self.head_dim)) for name in "qkv")
        return self._norm("q", role, q), self._norm("k", role, k), v

    def _norm(self, name: str, role: Role, x: Tensor) -> Tensor:
        """The channels that turn with t have a norm of their own; those of height and width share one."""
        t, hw = x.chunk(2, dim=-1)
        return torch.cat([self[f"{name}_norm{role.value}"](t), self[f"{name}_norm_hw{role.value}"](hw)], dim=-1)


class SwiGLU(nn.Module):
    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, width, bias=False)
        self.up_proj = nn.Linear(dim, width, bias=False)
        self.down_proj = nn.Linear(width, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """A mixture of feed-forward units: a router picks a few for every row and weighs what they say."""

    def __init__(self, dim: int, config: FeedForward) -> None:
        super().__init__()
        self.config = config
        self.gate = nn.Linear(dim, config.num_experts, bias=False)
        self.experts = nn.ModuleList([SwiGLU(dim, config.width) for _ in range(config.num_experts)])

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the experts of every row, (rows, num_chosen) each. Probabilities are fp32."""
        weights, chosen = self.gate(x).float().softmax(dim=-1).topk(self.config.num_chosen, dim=-1)
        if self.config.renormalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.type_as(x), chosen

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.route(x)
        out = torch.zeros_like(x)
        # In ascending order, so that the sum of a row does not depend on the other rows.
        for number in chosen.unique(sorted=True).tolist():
            row, place = torch.where(chosen == number)
            out.index_add_(0, row, self.experts[number](x[row]) * weights[row, place, None])
        return out


class Layer(nn.ModuleDict):
    """Attention and feed-forward, pre-norm."""

    def __init__(self, config: LanguageConfig, roles: Sequence[Role]) -> None:
        super().__init__()
        self["self_attn"] = Attention(config, roles)
        for role in roles:
            for name in ("input_layernorm", "post_attention_layernorm"):
                self[f"{name}{role.value}"] = RMSNorm(config.hidden_size, config.rms_norm_eps)
            ff = config.feed_forward(role)
            self[f"mlp{role.value}"] = (
                Experts(config.hidden_size, ff) if ff.num_experts else SwiGLU(config.hidden_size, ff.width)
            )

    def forward(self, rows: RoleRows, rotary: Tensor, layer: int, attend: Attend) -> dict[Role, Tensor]:
        normed = {role: self[f"input_layernorm{role.value}"](x) for role, x in rows.items()}
        attention = self["self_attn"](normed, rotary, layer, attend)
        return {role: self._feed_forward(role, x + attention[role]) for role, x in rows.items()}

    def _feed_forward(self, role: Role, x: Tensor) -> Tensor:
        return x + self[f"mlp{role.value}"](self[f"post_attention_layernorm{role.value}"](x))


class Body(nn.ModuleDict):
    """Token embedding, layers and final norms; only understanding has an embedding."""

    def __init__(self, config: LanguageConfig, roles: Sequence[Role]) -> None:
        super().__init__()
        self["layers"] = nn.ModuleList([Layer(config, roles) for _ in range(config.num_hidden_layers)])
        for role in roles:
            self[f"norm{role.value}"] = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if Role.UNDERSTAND in roles:
            self["embed_tokens"] = nn.Embedding(config.vocab_size, config.hidden_size)

    def forward(self, rows: RoleRows, rotary: Tensor, attend: Attend) -> dict[Role, Tensor]:
        for layer, module in enumerate(self["layers"].children()):
            rows = module(rows, rotary, layer, attend)
        return {role: self[f"norm{role.value}"](x) for role, x in rows.items()}


class LanguageModel(nn.Module):
    """The body and, for understanding, the head that predicts tokens."""

    def __init__(self, config: LanguageConfig, roles: frozenset[Role]) -> None:
        super().__init__()
        # In a fixed order: a set has none of its own.
        self.model = Body(config, [role for role in Role if role in roles])
        if Role.UNDERSTAND in roles:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)


def _pack(parts: tuple[Tensor, ...]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
