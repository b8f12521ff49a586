"""Spans of requests and of the stages of their work, in the memory of the test."""

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from server.conftest import client_of
from server.test_fetch import RED
from server.test_options import Serve
from server.test_options import serve as serve
from server.tools import ENGINE, PAINT, _model, data_url
from underpaint.server import ServerConfig, create_site
from underpaint.server.logs import make_log
from underpaint.server.tracing import make_tracer
from underpaint.service import Service

STAGES = ("queued", "plan", "encode", "denoise", "prefill", "decode", "image_encode")
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traced(spans: InMemorySpanExporter) -> Iterator[Callable[[Path], TestClient]]:
    """A client of a server that traces into ``spans``; the warm-up is not among them."""
    opened = []

    def begin(root: Path) -> TestClient:
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(spans))
        service = Service(_model(root), ENGINE)
        config = ServerConfig("tiny", api_key="hidden")
        site = create_site(service, config, make_log(io.StringIO()), provider.get_tracer("test"))
        opened.append(client_of(site))
        client = opened[-1].__enter__()
        client.headers["Authorization"] = "Bearer hidden"
        spans.clear()
        return client

    yield begin
    for each in opened:
        each.__exit__(None, None, None)


def by_name(spans: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in spans.get_finished_spans()}


def test_a_request_and_its_stages(
    traced: Callable[[Path], TestClient], spans: InMemorySpanExporter, painter_root: Path
) -> None:
    client = traced(painter_root)
    response = client.post("/v1/images/generations", json=PAINT, headers={"traceparent": CALLER})
    found = by_name(spans)
    request = found.pop("POST /v1/images/generations")
    assert request.kind is SpanKind.SERVER
    assert request.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/images/generations",
        "http.response.status_code": 200,
        "underpaint.request.id": response.headers["x-request-id"],
    }
    assert request.parent is not None
    assert f"{request.context.trace_id:032x}" in CALLER
    assert f"{request.parent.span_id:016x}" in CALLER
    assert set(found) == set(STAGES)
    for span in found.values():
        assert span.parent is not None
        assert span.parent.span_id == request.context.span_id
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time <= span.end_time
    assert found["prefill"].start_time == found["denoise"].start_time
    order = [found[name].start_time or 0 for name in ("queued", "plan", "encode", "denoise", "decode", "image_encode")]
    assert order == sorted(order)


def test_a_stage_that_goes_on_after_another_is_one_span(
    traced: Callable[[Path], TestClient], spans: InMemorySpanExporter, painter_root: Path
) -> None:
    body = {**PAINT, "num_inference_steps": 8, "partial_images": 2, "stream": True}
    traced(painter_root).post("/v1/images/generations", json=body)
    names = [span.name for span in spans.get_finished_spans()]
    assert names.count("denoise") == 1
    assert names.count("preview") == 2
    assert names.index("denoise") > names.index("preview", names.index("preview") + 1), "it ends after both"
    found = by_name(spans)
    assert (found["denoise"].start_time or 0) < (found["preview"].start_time or 0)


def test_refusals_are_spans_and_health_is_not(
    traced: Callable[[Path], TestClient], spans: InMemorySpanExporter, painter_root: Path
) -> None:
    client = traced(painter_root)
    client.get("/health/ready")
    client.get("/metrics")
    assert spans.get_finished_spans() == ()
    client.post("/v1/images/generations", json={**PAINT, "n": 0})
    client.get("/v1/nothing")
    client.get("/v1/models", headers={"Authorization": "Bearer wrong"})
    told = [(span.name, (span.attributes or {})["http.response.status_code"]) for span in spans.get_finished_spans()]
    assert told == [("POST /v1/images/generations", 400), ("GET other", 404), ("GET other", 401)]


def test_a_fault_of_the_server_is_an_error(
    traced: Callable[[Path], TestClient],
    spans: InMemorySpanExporter,
    painter_root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = traced(painter_root)

    def broken(*_: object) -> None:
        raise RuntimeError("a secret teapot")

    monkeypatch.setattr("underpaint.server.images.read_body", broken)
    assert client.post("/v1/images/generations", json=PAINT).status_code == 500
    assert by_name(spans)["POST /v1/images/generations"].status.status_code is StatusCode.ERROR
    assert 'requests_total{endpoint="/v1/images/generations",status="500"} 1.0' in client.get("/metrics").text
    assert "secret" not in "".join(span.to_json() for span in spans.get_finished_spans())


def test_no_prompt_picture_or_key_is_traced(
    traced: Callable[[Path], TestClient], spans: InMemorySpanExporter, painter_root: Path
) -> None:
    picture = data_url(RED)
    body = {**PAINT, "prompt": "a secret teapot", "images": [{"image_url": picture}]}
    assert traced(painter_root).post("/v1/images/edits", json=body).status_code == 200
    told = "".join(span.to_json() for span in spans.get_finished_spans())
    assert "denoise" in told
    for secret in ("secret", "hidden", picture[-60:]):
        assert secret not in told


def test_an_answer_is_traced(
    traced: Callable[[Path], TestClient], spans: InMemorySpanExporter, talker_root: Path
) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    assert traced(talker_root).post("/v1/chat/completions", json=body).status_code == 200
    assert set(by_name(spans)) == {"POST /v1/chat/completions", "queued", "plan", "talk"}


def test_tracing_that_is_not_installed_is_one_sentence(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("underpaint.server.tracing.find_spec", lambda name: None)
    assert serve("model")[1]["tracer"] is None
    for arguments, variable in ((("--otlp-endpoint", "http://localhost:4318"), None), ((), "http://localhost:4318")):
        if variable:
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", variable)
        assert serve("model", *arguments) == (2, {})
        assert capsys.readouterr().err == (
            "underpaint: tracing needs more packages: pip install 'underpaint[tracing]'\n"
        )


def test_spans_are_sent_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag is the base URL of a collector; the standard variables work as OpenTelemetry says."""

    monkeypatch.setenv("OTEL_SERVICE_NAME", "studio")
    for endpoint, variable, expected in (
        ("http://one:4318/", None, "http://one:4318/v1/traces"),
        (None, "http://two:4318", "http://two:4318/v1/traces"),
    ):
        if variable:
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", variable)
        tracer = make_tracer(endpoint)
        provider = tracer.span_processor._span_processors[0]  # type: ignore[attr-defined]
        assert provider._batch_processor._exporter._endpoint == expected
        assert tracer.resource.attributes["service.name"] == "studio"  # type: ignore[attr-defined]
