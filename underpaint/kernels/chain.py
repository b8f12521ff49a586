"""Small kernels one close behind the other: programmatic dependent launch, from compute capability 9.0 on.

A *chained* kernel may come onto the processors as soon as every program of the one before it is on them and has called
``let_next_begin``. It does what depends on nothing, such as reading weights, waits in ``wait_for_previous`` until all
that was launched before it is done and visible, and only then touches what others wrote or read. A program that touches
nothing of the kind need not wait, but one program of every chained kernel must: a kernel that is done vouches for those
before it.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

CHAINABLE = (9, 0)
"""The first compute capability with programmatic dependent launch."""
LINE_BITS = tl.constexpr(8 * 128)
"""Of the second-level cache."""


@triton.jit
def wait_for_previous(CHAINED: tl.constexpr):  # type: ignore[no-untyped-def]
    if CHAINED:
        gdc_wait()


@triton.jit
def let_next_begin(CHAINED: tl.constexpr):  # type: ignore[no-untyped-def]
    if CHAINED:
        gdc_launch_dependents()


@triton.jit
def bring_near(pointer):  # type: ignore[no-untyped-def]
    """Ask for the lines at ``pointer``, of any shape, to be brought to the second-level cache. Nothing waits for them,
    and what others write there meanwhile is not missed. In chained kernels only: the interpreter cannot do it."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointer], dtype=tl.int32, is_pure=False, pack=1
    )


def chained(x: Tensor) -> dict[str, Any]:
    """Launch options of a chained kernel on the device of ``x``."""
    return {"CHAINED": True, "launch_pdl": True} if x.is_cuda and _chainable(x.device) else {"CHAINED": False}


@cache
def _chainable(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= CHAINABLE
