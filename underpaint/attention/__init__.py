"""Attention over a prefix in pages and the rows of the current pass; the backends behind ``attend``."""

from underpaint.attention.batch import Backend, Prefix, RowGroup
from underpaint.attention.piecewise import piecewise
from underpaint.attention.reference import reference

BACKENDS: dict[str, Backend] = {"reference": reference, "piecewise": piecewise}
"""By the names that ``EngineConfig.attention_backend`` takes."""

__all__ = ["BACKENDS", "Backend", "Prefix", "RowGroup", "piecewise", "reference"]
