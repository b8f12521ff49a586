"""Attention over a prefix in pages and the rows of the current pass; the backends behind ``attend``."""

from importlib.util import find_spec

from underpaint.attention.batch import AttendPass, Backend, Prefix, Prepare, RowGroup, each_layer
from underpaint.attention.piecewise import piecewise
from underpaint.attention.reference import reference
from underpaint.errors import BadConfig

BACKENDS: dict[str, Backend] = {"reference": reference, "piecewise": piecewise}
"""Those that run everywhere."""


def choose(name: str, device: str) -> Prepare:
    """The backend that ``EngineConfig.attention_backend`` names. Raises BadConfig where it cannot run."""
    if name in BACKENDS:
        return each_layer(BACKENDS[name])
    assert name == "triton"
    if not device.startswith("cuda"):
        raise BadConfig(f"attention_backend triton needs a CUDA device, not {device}")
    if find_spec("triton") is None:
        raise BadConfig("attention_backend triton needs the package triton, which is not installed")
    from underpaint.attention.triton import prepare

    return prepare


__all__ = [
    "BACKENDS",
    "AttendPass",
    "Backend",
    "Prefix",
    "Prepare",
    "RowGroup",
    "choose",
    "each_layer",
    "piecewise",
    "reference",
]
