"""What Prometheus may read. Seconds and bytes; no ids in labels. Each server has a registry of its own."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from underpaint.server.supervisor import Supervised
from underpaint.server.vitals import Vitals

PREFIX = "underpaint"
SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counters of requests and of stages. ``stage_seconds`` stages: plan, encode, prefill, denoise, preview, decode,
    image_encode; talk for a whole answer."""

    def __init__(self, vitals: Callable[[], Vitals], workers: Sequence[Supervised] = ()) -> None:
        self.registry = CollectorRegistry()
        own = {"registry": self.registry, "namespace": PREFIX}
        self.requests = Counter("requests_total", "Requests answered", ("endpoint", "status"), **own)  # type: ignore[arg-type]
        self.queue_depth = Gauge("queue_depth", "Requests that wait for a thread", **own)  # type: ignore[arg-type]
        self.running = Gauge("running", "Requests at work", **own)  # type: ignore[arg-type]
        self.queue_seconds = Histogram("queue_seconds", "Time a request waited", buckets=SECONDS, **own)  # type: ignore[arg-type]
        self.stage_seconds = Histogram("stage_seconds", "Time a stage took", ("stage",), buckets=SECONDS, **own)  # type: ignore[arg-type]
        self.cancelled = Counter("cancelled_total", "Requests cancelled, or late", ("at",), **own)  # type: ignore[arg-type]
        self.pictures = Counter("pictures_total", "Pictures painted", **own)  # type: ignore[arg-type]
        self.registry.register(_OfEngines(vitals))
        if workers:
            self.registry.register(_OfWorkers(vitals, workers))

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)


class _OfEngines(Collector):
    """What the engines count themselves."""

    def __init__(self, vitals: Callable[[], Vitals]) -> None:
        self._vitals = vitals

    def collect(self) -> Iterator[Metric]:
        """See ``Collector``."""
        vitals = self._vitals()
        for name, text, value in (
            ("prefix_cache_hits", "Prefix units found in the cache", vitals.hits),
            ("prefix_cache_misses", "Prefix units that had to be filled", vitals.misses),
            ("prefix_cache_evictions", "Prefix units evicted", vitals.evictions),
            ("prefix_rows_prefilled", "Prefix rows computed by generation", vitals.rows_prefilled),
            ("rows_read", "Rows computed by understanding", vitals.rows_read),
            ("generation_passes", "Passes of the generation engine", vitals.passes),
            ("step_graph_hits", "Denoising passes replayed from a graph", vitals.graph_hits),
            ("step_graph_misses", "Denoising passes captured first", vitals.graph_misses),
            ("step_graph_eager", "Denoising passes that no graph could serve", vitals.graph_eager),
            ("step_graph_evictions", "Graphs given up for others", vitals.graph_evictions),
            ("decode_graph_steps", "Steps of text replayed from a graph", vitals.decode_graph_steps),
            ("decode_plain_steps", "Steps of text without a graph", vitals.decode_plain_steps),
        ):
            yield CounterMetricFamily(f"{PREFIX}_{name}", text, value=value)
        for name, text, value in (
            ("kv_bytes", "Bytes of pages in use", vitals.kv_bytes),
            ("kv_held_bytes", "Bytes of pages that requests hold to themselves", vitals.kv_held_bytes),
        ):
            yield GaugeMetricFamily(f"{PREFIX}_{name}", text, value=value)


class _OfWorkers(Collector):
    """Where other processes work: how they are, and what goes between them."""

    def __init__(self, vitals: Callable[[], Vitals], workers: Sequence[Supervised]) -> None:
        self._vitals = vitals
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        """See ``Collector``."""
        restarts = CounterMetricFamily(f"{PREFIX}_worker_restarts", "Restarts of a worker", labels=("role",))
        silence = GaugeMetricFamily(
            f"{PREFIX}_worker_silence_seconds", "Time since a worker's last sign of life", labels=("role",)
        )
        up = GaugeMetricFamily(f"{PREFIX}_worker_up", "1 if a worker is up", labels=("role",))
        passes = CounterMetricFamily(f"{PREFIX}_worker_passes", "Passes that a worker painted in", labels=("role",))
        for worker in self._workers:
            restarts.add_metric((worker.name,), worker.num_restarts)
            silence.add_metric((worker.name,), worker.silence)
            up.add_metric((worker.name,), worker.is_up)
            passes.add_metric((worker.name,), worker.vitals.passes)
        yield from (restarts, silence, up, passes)
        vitals = self._vitals()
        for name, text, value in (
            ("kv_handovers", "Prefixes copied to the generation worker", vitals.handovers),
            ("kv_handover_bytes", "Bytes of prefixes copied", vitals.handover_bytes),
            ("kv_handover_seconds", "Time that copying prefixes took", vitals.handover_seconds),
        ):
            yield CounterMetricFamily(f"{PREFIX}_{name}", text, value=value)
        yield GaugeMetricFamily(
            f"{PREFIX}_handover_held_bytes", "Bytes of shared memory in use", value=vitals.handover_held_bytes
        )
