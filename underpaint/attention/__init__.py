"""Attention over a prefix in pages and the rows of the current pass; the backends behind ``attend``."""

from underpaint.attention.batch import AttendPass, Backend, Prefix, Prepare, RowGroup, each_layer
from underpaint.attention.choice import choose, settle
from underpaint.attention.piecewise import piecewise
from underpaint.attention.reference import reference

BACKENDS: dict[str, Backend] = {"reference": reference, "piecewise": piecewise}
"""Those that run everywhere."""

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
    "settle",
]
