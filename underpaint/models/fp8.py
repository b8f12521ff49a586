"""Block linears in e4m3: weights with one fp32 scale an output row, activations quantised row by row as they come.

The linears of the blocks are nearly all of a model's arithmetic. Embeddings, heads, routers and modulation stay as they
are: they are small, and what they round is seen at once. On a CPU the products are emulated: the same roundings, summed
in fp32, at no gain in speed.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from underpaint.config import EngineConfig, check_fp8
from underpaint.errors import CheckpointError
from underpaint.kernels.quantised_rows import QuantisedRows
from underpaint.kv.codec import E4M3, quantise

log = logging.getLogger(__name__)

SIZE_MULTIPLE = 16
"""Both sides of a weight are multiples of this, as ``torch._scaled_mm`` needs."""
ROUTER = ".gate"
"""Ends the name of what chooses the experts of a row."""
SCALE = "_scale"
"""Ends the name of the scales of a weight, which are stored beside it."""


class Fp8Linear(nn.Module):
    """``nn.Linear`` without bias. ``weight``: (out_features, in_features) e4m3, ``weight_scale``: (out_features,)."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=E4M3), requires_grad=False)
        self.weight_scale = nn.Parameter(torch.empty(out_features), requires_grad=False)

    def forward(self, x: Tensor | QuantisedRows) -> Tensor:
        """(rows, in_features) -> (rows, out_features), in the dtype of ``x``."""
        if isinstance(x, QuantisedRows):
            return self.multiply(x.values, x.scale, x.dtype)
        return self.multiply(*quantise_rows(x), x.dtype)

    def multiply(self, x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """The same for rows that are e4m3 already, with ``scale`` (rows,). On a GPU ``dtype`` is bfloat16.

        Fast accumulation: partial sums are kept in the tensor cores' own registers, with fewer bits than fp32.
        """
        if not x.is_cuda:
            return (x.float() @ self.weight.float().T * scale[:, None] * self.weight_scale).to(dtype)
        return torch._scaled_mm(
            x, self.weight.T, scale[:, None], self.weight_scale[None], out_dtype=dtype, use_fast_accum=True
        )


Linear = nn.Linear | Fp8Linear


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, channels) -> e4m3 of the same shape, and fp32 scales (rows,)."""
    if not x.is_cuda:
        return quantise(x)
    from underpaint.kernels.quantise import quantise_rows as on_gpu  # needs Triton, which torch brings on a GPU

    return on_gpu(x)


def block_linears(network: nn.Module, blocks: str) -> list[str]:
    """Names of the linears below ``blocks``, which is where the blocks of a network are; routers are none of them."""
    return [
        name
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and name.startswith(f"{blocks}.") and not name.endswith(ROUTER)
    ]


def wanted(config: EngineConfig, stored: bool) -> bool:
    """Whether to load with blocks in e4m3: asked for, or ``stored`` so. Raises BadConfig where that cannot run."""
    if config.quantize != "fp8" and not stored:
        return False
    check_fp8(config)
    if config.device == "cpu":
        log.warning("fp8 is emulated on the CPU: its roundings, at no gain in speed")
    return True


def prepare(network: nn.Module, blocks: str) -> None:
    """Put an ``Fp8Linear`` in the place of every linear of the blocks of a network on the meta device.

    Raises CheckpointError for a linear that cannot be one.
    """
    for name in block_linears(network, blocks):
        linear = network.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        if linear.bias is not None or linear.in_features % SIZE_MULTIPLE or linear.out_features % SIZE_MULTIPLE:
            raise CheckpointError(
                f"{name} is {linear.out_features} x {linear.in_features}{'' if linear.bias is None else ' with a bias'}"
                f"; fp8 needs multiples of {SIZE_MULTIPLE}, and no bias"
            )
        parent, _, last = name.rpartition(".")
        with torch.device("meta"):
            setattr(network.get_submodule(parent), last, Fp8Linear(linear.in_features, linear.out_features))


def settle(name: str, tensor: Tensor, wanted: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """What ``tensor``, called ``name`` in a checkpoint, becomes in a network: ``wanted`` is what stands there.

    A weight that the network wants in e4m3 is quantised unless it is already; scales stay fp32; the rest is cast.
    """
    if wanted.dtype != E4M3:
        return {name: tensor if name.endswith(SCALE) else tensor.to(dtype)}
    if tensor.dtype == E4M3:
        return {name: tensor}
    weight, scale = quantise(tensor)
    return {name: weight, name + SCALE: scale}


def bytes_of(name: str, wanted: Tensor, dtype: torch.dtype) -> int:
    """Of what ``settle`` makes for one tensor of a network."""
    kept = wanted.dtype == E4M3 or name.endswith(SCALE)
    return wanted.numel() * (wanted.dtype if kept else dtype).itemsize


def join(linears: Sequence[Linear]) -> Linear:
    """One linear whose output is those of ``linears`` side by side. A scale belongs to one output row, so weights in
    e4m3 are joined as they are."""
    first = linears[0]
    out_features = sum(linear.out_features for linear in linears)
    with torch.device("meta"):
        joined: Linear
        if isinstance(first, Fp8Linear):
            joined = Fp8Linear(first.in_features, out_features)
        else:
            joined = nn.Linear(first.in_features, out_features, bias=False)
    parts = [linear.state_dict() for linear in linears]
    state = {name: _concatenated([part[name] for part in parts]) for name in parts[0]}
    joined.load_state_dict(state, strict=True, assign=True)
    return joined.requires_grad_(False)


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    """Along the first dimension; e4m3 as bytes, because not every device concatenates float8."""
    if parts[0].dtype != E4M3:
        return torch.cat(list(parts))
    return torch.cat([part.view(torch.uint8) for part in parts]).view(E4M3)
