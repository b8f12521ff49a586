"""Linear layers on the fused path: one row by ``skinny_linear``, more by the library's product.

On an H200 the library reads the weights of a step of 32 rows at 3.6 TB/s, where a copy moves 4.2. A product of one row
can do without tensor cores, and ours begins to read its weights while the kernel before it still runs.
"""

import torch
from torch import Tensor, nn

from underpaint.kernels.skinny_linear import skinny_linear
from underpaint.kernels.swiglu import swiglu

SKINNY_ROWS = 1
"""Up to here ``skinny_linear`` is taken."""


def multiply(linear: nn.Module, x: Tensor, out: Tensor | None = None) -> Tensor:
    """``linear(x)`` for (rows, in_features), without bias, into ``out`` if there is one.

    A module that is not ``nn.Linear`` (weights in e4m3) has a product of its own.
    """
    if not isinstance(linear, nn.Linear):
        return linear(x) if out is None else out.copy_(linear(x))
    if len(x) <= SKINNY_ROWS:
        return skinny_linear(x, linear.weight, out=out)
    return torch.mm(x, linear.weight.mT) if out is None else torch.mm(x, linear.weight.mT, out=out)


def multiply_gated(linear: nn.Module, x: Tensor) -> Tensor:
    """``silu(gate) * up`` where ``linear`` gives the channels of both, the gate's first."""
    if isinstance(linear, nn.Linear) and len(x) <= SKINNY_ROWS:
        return skinny_linear(x, linear.weight, gated=True)
    return swiglu(multiply(linear, x))
