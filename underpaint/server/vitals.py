"""What the engines of a process count: for metrics, and as a sign of life."""

from msgspec import Struct

from underpaint.generation.runner import Runner
from underpaint.kv.tree import PrefixTree
from underpaint.service import Service


class Vitals(Struct, frozen=True):
    """Numbers that the engines keep anyway, so reading them needs no lock. ``handovers``: prefixes copied to another
    process. Held bytes are what requests hold now: of pages, and of the memory for what is handed over."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    rows_prefilled: int = 0
    rows_read: int = 0
    passes: int = 0
    kv_bytes: int = 0
    kv_held_bytes: int = 0
    handover_held_bytes: int = 0
    handovers: int = 0
    handover_bytes: int = 0
    handover_seconds: float = 0.0

    def __add__(self, other: "Vitals") -> "Vitals":
        """Of two processes together."""
        return Vitals(*(getattr(self, name) + getattr(other, name) for name in self.__struct_fields__))


def vitals_of(service: Service) -> Vitals:
    """Of the engines that this process has."""
    reads = service.understanding.rows_read if service.understanding else 0
    pages = of_pages(service.tree) if service.has_pages else Vitals()
    paints = of_runner(service.runner) if service.generates else Vitals()
    return Vitals(rows_read=reads) + pages + paints


def of_pages(tree: PrefixTree) -> Vitals:
    used = tree.pool.used_bytes
    return Vitals(
        hits=tree.hits,
        misses=tree.misses,
        evictions=tree.evictions,
        kv_bytes=used,
        kv_held_bytes=max(used - tree.used_bytes, 0),
    )


def of_runner(runner: Runner) -> Vitals:
    return Vitals(rows_prefilled=runner.rows_prefilled, passes=runner.passes)
