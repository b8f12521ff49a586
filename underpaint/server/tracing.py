"""OpenTelemetry: a span for each request, and below it one for each stage of its work.

The code speaks to OpenTelemetry's interface, which does nothing until a tracer of its SDK is put in. No prompt, picture
or key is ever an attribute.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec

from opentelemetry.context import get_current
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from underpaint.errors import BadConfig

NAME = "underpaint"
TRACES_PATH = "/v1/traces"
INSIDE = {"prefill": "denoise"}
"""A stage that is told of at its end only -> the one with which it begins."""


def make_tracer(endpoint: str | None) -> Tracer:
    """A tracer that sends spans over OTLP/HTTP to ``endpoint``, the base URL of a collector; None leaves that to
    OpenTelemetry's own variables (``OTEL_EXPORTER_OTLP_ENDPOINT`` and others). Raises BadConfig."""
    if find_spec("opentelemetry.exporter") is None or find_spec("opentelemetry.sdk") is None:
        raise BadConfig("tracing needs more packages: pip install 'underpaint[tracing]'")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource({SERVICE_NAME: NAME}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource)
    target = endpoint and endpoint.rstrip("/") + TRACES_PATH
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=target)))
    return provider.get_tracer(NAME)


@contextmanager
def request_span(tracer: Tracer, method: str, headers: Mapping[str, str]) -> Iterator[Span]:
    """The span of a request, current inside. It goes on with the trace of the client, if that sent one."""
    parent = TraceContextTextMapPropagator().extract(headers)
    with tracer.start_as_current_span(
        method,
        context=parent,
        kind=SpanKind.SERVER,
        attributes={"http.request.method": method},
        # A message may quote what the client sent.
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        yield span


def tell(span: Span, method: str, endpoint: str, status: int, request: str) -> None:
    """What is known of a request when it has been answered."""
    span.update_name(f"{method} {endpoint}")
    span.set_attributes({"http.route": endpoint, "http.response.status_code": status, "underpaint.request.id": request})
    if status >= 500:
        span.set_status(StatusCode.ERROR)


class Stages:
    """The spans of one request's work, made when each stage is over. They stand below the span that was current when
    the request was accepted. Durations are the work's own; when they began is by the clock of who hears of it."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._parent = get_current()
        self._begun: dict[str, int] = {}
        self._running: set[str] = set()

    def enter(self, stage: str) -> None:
        """A stage begins, or goes on after one inside it."""
        if stage not in self._running:
            self._running.add(stage)
            self._begun[stage] = time.time_ns()

    def took(self, stage: str, seconds: float) -> None:
        """A stage is over."""
        self._running.discard(stage)
        nanoseconds = int(seconds * 1e9)
        start = self._begun.get(INSIDE.get(stage, stage), time.time_ns() - nanoseconds)
        span = self._tracer.start_span(stage, context=self._parent, start_time=start)
        span.end(start + nanoseconds)
