"""Linear layers on the fused path: one row by ``skinny_linear``, more by the library's product.

On an H200 the library reads the weights of a step of 32 rows at 3.6 TB/s, where a copy moves 4.2. A product of one row
can do without tensor cores, and ours begins to read its weights while the kernel before it still runs.
"""

import torch
from torch import Tensor, nn

from underpaint.kernels.quantised_rows import QuantisedRows
from underpaint.kernels.skinny_linear import skinny_linear
from underpaint.kernels.swiglu import swiglu, swiglu_quantised

SKINNY_ROWS = 1
"""Up to here ``skinny_linear`` is taken."""


def multiply(linear: nn.Module, x: Tensor | QuantisedRows, out: Tensor | None = None) -> Tensor:
    """``linear(x)`` for (rows, in_features), without bias, into ``out`` if there is one.

    A module that is not ``nn.Linear`` (weights in e4m3) has a product of its own, and it alone takes quantised rows.
    """
    if not isinstance(linear, nn.Linear):
        return linear(x) if out is None else out.copy_(linear(x))
    assert isinstance(x, Tensor)
    if len(x) <= SKINNY_ROWS:
        return skinny_linear(x, linear.weight, out=out)
    return torch.mm(x, linear.weight.mT) if out is None else torch.mm(x, linear.weight.mT, out=out)


def feed_forward(gate_up: nn.Module, down: nn.Module, x: Tensor | QuantisedRows) -> Tensor:
    """``down(silu(gate) * up)`` where ``gate_up`` gives the channels of both, the gate's first."""
    if not isinstance(down, nn.Linear):
        return multiply(down, swiglu_quantised(multiply(gate_up, x)))
    if isinstance(gate_up, nn.Linear) and isinstance(x, Tensor) and len(x) <= SKINNY_ROWS:
        return multiply(down, skinny_linear(x, gate_up.weight, gated=True))
    return multiply(down, swiglu(multiply(gate_up, x)))
