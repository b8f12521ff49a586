"""Measurements, one module a question; each returns a report that prints as tables or JSON."""

from underpaint.bench.codec import codec
from underpaint.bench.handover import handover
from underpaint.bench.prefix import prefix

__all__ = ["codec", "handover", "prefix"]
