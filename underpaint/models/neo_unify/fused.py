"""The transformer of NEO-Unify with fused kernels: the same modules and weights, read fewer times.

Rows are rounded where the plain modules round them. A layer is five products and attention, and between them one kernel
each: residual sum and norm; norm, rotary embedding and pages of a row's heads; the gate. Works for inference only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from underpaint.kernels.experts import combine, expert_linear, make_tiles, route
from underpaint.kernels.head_form import HeadForm
from underpaint.kernels.kv_pack import kv_pack
from underpaint.kernels.linear import feed_forward, multiply
from underpaint.kernels.norm_modulate import add_rms_norm, add_rms_norm_quantised
from underpaint.kernels.quantised_rows import QuantisedRows
from underpaint.models.fp8 import Fp8Linear, Linear
from underpaint.models.fusing import join_in_place
from underpaint.models.neo_unify.config import LanguageConfig
from underpaint.models.neo_unify.transformer import Attention, Body, Experts, Layer, RoleRows, SwiGLU
from underpaint.models.painter import PackedAttend
from underpaint.models.rms_norm import RMSNorm
from underpaint.models.roles import Role

FeedForward = Callable[[Any], Tensor]
"""Of rows as its norm gives them."""
Norm = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | QuantisedRows]]
"""Of a stream and what is to be added to it: the sum, and its norm as the next linear reads it."""


@dataclass(frozen=True, eq=False)
class RolePart:
    """What one role has of a layer. ``qkv`` gives the heads of q, of k and of v."""

    attention_norm: Norm
    qkv: nn.Module
    form: HeadForm
    out: nn.Module
    feed_forward_norm: Norm
    feed_forward: FeedForward


class FusedBody:
    """In the place of ``Body``, whose linears it joins: see ``join_in_place``."""

    def __init__(self, body: Body, config: LanguageConfig, roles: list[Role]) -> None:
        self._config = config
        self._layers = [{role: _role_part(layer, role) for role in roles} for layer in body["layers"].children()]
        self._norms = {role: _rms_norm(body[f"norm{role.value}"]) for role in roles}

    @property
    def capturable(self) -> bool:
        return not any(isinstance(p.feed_forward, Experts) for parts in self._layers for p in parts.values())

    def __call__(self, rows: RoleRows, rotary: Tensor, attend: PackedAttend) -> dict[Role, Tensor]:
        """See ``Body``."""
        streams = {role: _Stream(x.contiguous()) for role, x in rows.items()}
        for layer, parts in enumerate(self._layers):
            self._attend(layer, parts, streams, rotary, attend)
            for role, stream in streams.items():
                stream.delta = parts[role].feed_forward(stream.normed(parts[role].feed_forward_norm))
        return {role: stream.finish(self._norms[role]) for role, stream in streams.items()}

    @staticmethod
    def multiply(linear: nn.Module, x: Tensor) -> Tensor:
        """Of a linear outside the layers, without bias."""
        return multiply(linear, x)

    def _attend(
        self,
        layer: int,
        parts: dict[Role, RolePart],
        streams: "dict[Role, _Stream]",
        rotary: Tensor,
        attend: PackedAttend,
    ) -> None:
        """Of all rows at once; the product of each role is written into its rows of one tensor."""
        config = self._config
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        first = next(iter(streams.values())).rows
        qkv = first.new_empty(len(rotary), (heads + 2 * kv_heads) * head_dim)
        kept = attend.kept(layer)
        start = 0
        for role, stream in streams.items():
            stop = start + len(stream.rows)
            multiply(parts[role].qkv, stream.normed(parts[role].attention_norm), out=qkv[start:stop])
            own = qkv[start:stop].unflatten(-1, (-1, head_dim))
            kv_pack(own, kv_heads, parts[role].form, rotary[start:stop], kept.behind(start) if kept else None)
            start = stop
        q, k, v = qkv.unflatten(-1, (-1, head_dim)).split([heads, kv_heads, kv_heads], dim=1)
        mixed = attend.packed(layer, q, k, v).flatten(-2).split([len(stream.rows) for stream in streams.values()])
        for (role, stream), x in zip(streams.items(), mixed, strict=True):
            stream.delta = multiply(parts[role].out, x)


class _Stream:
    """The residual stream of one role: ``rows``, and a ``delta`` that the next norm adds."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self.delta: Tensor | None = None

    def normed(self, norm: Norm) -> Tensor | QuantisedRows:
        self.rows, normed = norm(self.rows, self.delta)
        self.delta = None
        return normed

    def finish(self, norm: RMSNorm) -> Tensor:
        return add_rms_norm(self.rows, self.delta, norm.weight, norm.eps)[1]


def _role_part(layer: nn.Module, role: Role) -> RolePart:
    assert isinstance(layer, Layer)
    attention = layer["self_attn"]
    assert isinstance(attention, Attention)
    norms = [[_rms_norm(attention[f"{name}_norm{part}{role.value}"]) for part in ("", "_hw")] for name in "qk"]
    weight = torch.stack([torch.cat([norm.weight.data for norm in pair]) for pair in norms])
    qkv = join_in_place([_linear(attention[f"{name}_proj{role.value}"]) for name in "qkv"])
    mlp = layer[f"mlp{role.value}"]
    return RolePart(
        attention_norm=_norm(layer[f"input_layernorm{role.value}"], isinstance(qkv, Fp8Linear)),
        qkv=qkv,
        form=HeadForm.of(weight, norms[0][0].eps, adjacent=False),
        out=attention[f"o_proj{role.value}"],
        feed_forward_norm=_norm(
            layer[f"post_attention_layernorm{role.value}"],
            isinstance(mlp, SwiGLU) and isinstance(mlp.gate_proj, Fp8Linear),
        ),
        feed_forward=_feed_forward(mlp),
    )


def _norm(module: nn.Module, quantised: bool) -> Norm:
    """``quantised``: as a linear in e4m3 reads it; routers read plain rows."""
    norm = _rms_norm(module)
    return partial(add_rms_norm_quantised if quantised else add_rms_norm, weight=norm.weight, eps=norm.eps)


def _rms_norm(module: nn.Module) -> RMSNorm:
    assert isinstance(module, RMSNorm)
    return module


def _linear(module: nn.Module) -> Linear:
    assert isinstance(module, Linear)
    return module


class FusedExperts:
    """In the place of ``Experts``, which documents what it computes; nothing is looked at on the host."""

    def __init__(self, module: Experts) -> None:
        units = [unit for unit in module.experts.children() if isinstance(unit, SwiGLU)]
        self._config = module.config
        self._router = module.gate
        self._gate_up = _stack_in_place([[unit.gate_proj.weight, unit.up_proj.weight] for unit in units])
        self._down = _stack_in_place([[unit.down_proj.weight] for unit in units])

    def __call__(self, x: Tensor) -> Tensor:
        config = self._config
        chosen, weights = route(multiply(self._router, x), config.num_chosen, config.renormalise)
        tiles = make_tiles(chosen, config.num_experts)
        inner = expert_linear(x, self._gate_up, tiles, gated=True)
        return combine(expert_linear(inner, self._down, tiles, scale=weights), len(x))


def _stack_in_place(groups: Sequence[Sequence[Tensor]]) -> Tensor:
    """(groups, outputs, inputs): the weights of each group below each other. As in ``join_in_place`` they become parts
    of it themselves."""
    outputs = [len(weight) for weight in groups[0]]
    stacked = groups[0][0].data.new_empty(len(groups), sum(outputs), groups[0][0].shape[1])
    for group, whole in zip(groups, stacked, strict=True):
        for weight, part in zip(group, whole.split(outputs), strict=True):
            weight.data = part.copy_(weight.data)
    return stacked


def _feed_forward(module: nn.Module) -> FeedForward:
    if isinstance(module, Experts):
        # Weights in e4m3 have a product of their own, which is not grouped.
        quantised = any(isinstance(part, Fp8Linear) for part in module.modules())
        return module if quantised else FusedExperts(module)
    assert isinstance(module, SwiGLU)
    gate_up, down = join_in_place([module.gate_proj, module.up_proj]), module.down_proj
    return partial(feed_forward, gate_up, down)
