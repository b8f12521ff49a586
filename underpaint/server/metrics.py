"""What Prometheus may read. Seconds and bytes; no ids in labels. Each server has a registry of its own."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from underpaint.service import Service

PREFIX = "underpaint"
SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counters of requests and of stages. ``stage_seconds`` stages: plan, encode, prefill, denoise, preview, decode,
    image_encode; talk for a whole answer."""

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()
        own = {"registry": self.registry, "namespace": PREFIX}
        self.requests = Counter("requests_total", "Requests answered", ("endpoint", "status"), **own)  # type: ignore[arg-type]
        self.queue_depth = Gauge("queue_depth", "Requests that wait for a thread", **own)  # type: ignore[arg-type]
        self.running = Gauge("running", "Requests at work", **own)  # type: ignore[arg-type]
        self.queue_seconds = Histogram("queue_seconds", "Time a request waited", buckets=SECONDS, **own)  # type: ignore[arg-type]
        self.stage_seconds = Histogram("stage_seconds", "Time a stage took", ("stage",), buckets=SECONDS, **own)  # type: ignore[arg-type]
        self.cancelled = Counter("cancelled_total", "Requests cancelled, or late", ("at",), **own)  # type: ignore[arg-type]
        self.pictures = Counter("pictures_total", "Pictures painted", **own)  # type: ignore[arg-type]
        self.registry.register(_OfEngines(service))

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)


class _OfEngines(Collector):
    """Reads counters that the engines keep anyway; whole numbers, so no lock is needed."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        service = self._service
        for name, text, value in (
            ("prefix_cache_hits", "Prefix units found in the cache", service.tree.hits),
            ("prefix_cache_misses", "Prefix units that had to be filled", service.tree.misses),
            ("prefix_cache_evictions", "Prefix units evicted", service.tree.evictions),
            ("prefix_rows_prefilled", "Prefix rows computed", service.runner.rows_prefilled),
            ("generation_passes", "Passes of the generation engine", service.runner.passes),
        ):
            yield CounterMetricFamily(f"{PREFIX}_{name}", text, value=value)
        yield GaugeMetricFamily(f"{PREFIX}_kv_bytes", "Bytes of pages in use", value=service.pool.used_bytes)
