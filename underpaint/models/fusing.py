"""Whether a network runs with fused kernels, and joining its linears so that one product does the work of several."""

import logging
from collections.abc import Sequence
from importlib.util import find_spec

from underpaint.models import fp8

log = logging.getLogger(__name__)


def can_fuse(device: str, head_dim: int) -> bool:
    """Whether the fused kernels serve heads of this size on this device; asked once, at load, and logged."""
    if not device.startswith("cuda"):
        return False
    if find_spec("triton") is None:
        log.warning("transformer: plain, since the fused kernels need the package triton, which is not installed")
        return False
    if head_dim < 16 or head_dim & (head_dim - 1):
        log.warning("transformer: plain, since the fused kernels need heads of a power of two, not %d", head_dim)
        return False
    log.info("transformer: fused kernels")
    return True


def join_in_place(linears: Sequence[fp8.Linear]) -> fp8.Linear:
    """One linear whose output is those of ``linears`` side by side.

    Their own weights become parts of its weights: the network keeps its names, and no more memory is taken.
    """
    joined = fp8.join(linears)
    start = 0
    for linear in linears:
        stop = start + linear.out_features
        for name, parameter in linear.named_parameters():
            parameter.data = getattr(joined, name).data[start:stop]
        start = stop
    return joined
