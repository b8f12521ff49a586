"""What the engines of a process count: for metrics, and as a sign of life."""

from msgspec import Struct

from underpaint.generation.runner import Runner
from underpaint.kv.tree import PrefixTree
from underpaint.service import Service
from underpaint.understanding.engine import UnderstandingEngine


class Vitals(Struct, frozen=True):
    """Numbers that the engines keep anyway, so reading them needs no lock. ``handovers``: prefixes copied to another
    process. Held bytes are what requests hold now: of pages, and of the memory for what is handed over. Graphs: see
    ``graphs.GraphCounts`` for denoising steps, ``decoding.Decoder`` for steps of text."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    rows_prefilled: int = 0
    rows_read: int = 0
    passes: int = 0
    graph_hits: int = 0
    graph_misses: int = 0
    graph_eager: int = 0
    graph_evictions: int = 0
    decode_graph_steps: int = 0
    decode_plain_steps: int = 0
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
    reads = of_reading(service.understanding) if service.understanding else Vitals()
    pages = of_pages(service.tree) if service.has_pages else Vitals()
    paints = of_runner(service.runner) if service.generates else Vitals()
    return reads + pages + paints


def of_reading(engine: UnderstandingEngine) -> Vitals:
    """Of an engine that reads and writes text; its passes that read have no graphs."""
    decoder = engine.decoder
    graph, plain = (decoder.graph_steps, decoder.plain_steps) if decoder is not None else (0, 0)
    return Vitals(rows_read=engine.rows_read, decode_graph_steps=graph, decode_plain_steps=plain)


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
    graphs = runner.graphs
    return Vitals(
        rows_prefilled=runner.rows_prefilled,
        passes=runner.passes,
        graph_hits=graphs.hits,
        graph_misses=graphs.misses,
        graph_eager=graphs.eager,
        graph_evictions=graphs.evictions,
    )
