"""``underpaint serve`` and ``underpaint bench serve``."""

import os
import secrets
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from underpaint.commands.arguments import (
    AsJson,
    AttentionBackend,
    Device,
    Dtype,
    KvCacheBytes,
    KvCodec,
    Lora,
    Model,
    Offload,
    Quantize,
    Steps,
)
from underpaint.commands.option_file import ConfigFile
from underpaint.commands.output import print_report
from underpaint.errors import BadConfig

OTLP_VARIABLES = frozenset({"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"})
LIMITS, OPERATION, PROCESSES = "Limits", "Operation", "Processes"


def serve(
    model: Model,
    config_file: Annotated[Path | None, ConfigFile] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at.")] = 8000,
    name: Annotated[str | None, typer.Option(help="What clients call the model; by default its directory.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="UNDERPAINT_API_KEY", help="Clients must send it as a bearer token.")
    ] = None,
    allowed_media_domain: Annotated[
        list[str] | None,
        typer.Option(help="Fetch pictures by https URL from here: example.com, *.example.com. May be repeated."),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            help="single: one process. colocate: understanding and generation in two processes on one device. "
            "separate: on a device each; the default where there are two.",
            rich_help_panel=PROCESSES,
        ),
    ] = None,
    understand_devices: Annotated[
        str | None, typer.Option(help="Number of the CUDA device that understands.", rich_help_panel=PROCESSES)
    ] = None,
    generate_devices: Annotated[
        str | None,
        typer.Option(
            help="Number of the CUDA device that generates; of several, as 1,2: a process for each.",
            rich_help_panel=PROCESSES,
        ),
    ] = None,
    understand_memory: Annotated[
        int | None, typer.Option(help="Like --kv-cache-bytes, where understanding runs.", rich_help_panel=PROCESSES)
    ] = None,
    generate_memory: Annotated[
        int | None, typer.Option(help="Like --kv-cache-bytes, where generation runs.", rich_help_panel=PROCESSES)
    ] = None,
    handover: Annotated[
        str | None,
        typer.Option(
            help="separate: shm copies pages through pinned shared memory (the default), ipc from GPU to GPU.",
            rich_help_panel=PROCESSES,
        ),
    ] = None,
    handover_memory: Annotated[
        int | None,
        typer.Option(help="Bytes of shared memory each way; by default up to 4 GiB.", rich_help_panel=PROCESSES),
    ] = None,
    max_running: Annotated[int, typer.Option(help="Paintings worked at once.", rich_help_panel=LIMITS)] = 8,
    max_talking: Annotated[int, typer.Option(help="Answers in text worked at once.", rich_help_panel=LIMITS)] = 32,
    max_waiting: Annotated[
        int, typer.Option(help="Requests that may wait, of either; more are refused for now.", rich_help_panel=LIMITS)
    ] = 64,
    timeout: Annotated[
        float, typer.Option(help="Seconds a request may take, waiting included.", rich_help_panel=LIMITS)
    ] = 600.0,
    max_steps: Annotated[int, typer.Option(help="Most denoising steps.", rich_help_panel=LIMITS)] = 1000,
    max_output_pixels: Annotated[int, typer.Option(help="Largest picture painted.", rich_help_panel=LIMITS)] = 1 << 24,
    max_image_bytes: Annotated[int, typer.Option(help="Largest picture taken.", rich_help_panel=LIMITS)] = 50 << 20,
    round_sizes: Annotated[
        bool,
        typer.Option("--round-sizes", help="Paint the next smaller legal size, not refuse.", rich_help_panel=LIMITS),
    ] = False,
    warmup_timeout: Annotated[
        float, typer.Option(help="Seconds until a server that is not ready ends.", rich_help_panel=OPERATION)
    ] = 300.0,
    drain: Annotated[
        float, typer.Option(help="Seconds that requests have to end after SIGTERM.", rich_help_panel=OPERATION)
    ] = 30.0,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            help="Send traces to this OpenTelemetry collector, such as http://localhost:4318. OpenTelemetry's own "
            "variables do the same.",
            rich_help_panel=OPERATION,
        ),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    kv_codec: KvCodec = "auto",
    kv_cache_bytes: KvCacheBytes = 0,
    quantize: Quantize = "none",
    offload: Offload = "",
    lora: Lora = None,
    attention_backend: AttentionBackend = "auto",
) -> None:
    """Serve OpenAI's HTTP API and a web page. Options may also stand in a file, see --config."""
    if find_spec("fastapi") is None:
        raise BadConfig("serving needs more packages: pip install 'underpaint[server]'")
    from underpaint.server import ServerConfig
    from underpaint.server.plan import Spread
    from underpaint.server.serve import default_id
    from underpaint.server.serve import serve as run
    from underpaint.server.tracing import make_tracer

    config = ServerConfig(
        name or default_id(model),
        api_key=api_key,
        allowed_media_domains=tuple(allowed_media_domain or ()),
        max_running=max_running,
        max_talking=max_talking,
        max_waiting=max_waiting,
        timeout_seconds=timeout,
        max_steps=max_steps,
        max_output_pixels=max_output_pixels,
        max_image_bytes=max_image_bytes,
        round_sizes=round_sizes,
        warmup_seconds=warmup_timeout,
        drain_seconds=drain,
    )
    options: dict[str, Any] = {
        "device": device, "dtype": dtype, "kv_codec": kv_codec, "kv_cache_bytes": kv_cache_bytes, "offload": offload,
        "attention_backend": attention_backend, "lora": lora,
    }  # fmt: skip
    traces = otlp_endpoint is not None or not OTLP_VARIABLES.isdisjoint(os.environ)
    tracer = make_tracer(otlp_endpoint) if traces else None
    processes: dict[str, Any] = {"mode": mode, "handover": handover}  # make_plan refuses other modes and ways
    spread = Spread(
        understand_devices=understand_devices,
        generate_devices=generate_devices,
        understand_memory=understand_memory,
        generate_memory=generate_memory,
        handover_memory=handover_memory,
        **processes,
    )
    sys.exit(
        run(model, host=host, port=port, config=config, tracer=tracer, spread=spread, quantize=quantize, **options)
    )


def bench_serve(
    url: Annotated[str, typer.Argument(help="The server, such as http://localhost:8000.", metavar="URL")],
    requests: Annotated[int, typer.Option(help="How many to send.")] = 100,
    rate: Annotated[float | None, typer.Option(help="Requests a second, at random times (open loop).")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Clients that ask one after another (closed loop).")] = None,
    text: Annotated[float, typer.Option(help="Weight of questions, answered in text.")] = 0.0,
    paint: Annotated[float, typer.Option(help="Weight of paintings.")] = 1.0,
    edit: Annotated[float, typer.Option(help="Weight of edits.")] = 0.0,
    size: Annotated[str, typer.Option(help="WIDTHxHEIGHT of pictures, or auto.")] = "auto",
    steps: Steps = None,
    n: Annotated[int, typer.Option("--n", help="Pictures a request.")] = 1,
    previews: Annotated[int, typer.Option(help="Previews a picture.")] = 1,
    max_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 64,
    references: Annotated[int, typer.Option(help="Pictures that the edits share.")] = 4,
    references_per_edit: Annotated[int, typer.Option(help="Of those, how many an edit takes.")] = 1,
    reference_side: Annotated[int, typer.Option(help="Their width and height.")] = 512,
    cancel: Annotated[float, typer.Option(help="Share of requests whose client leaves, 0 to 1.")] = 0.0,
    cancel_within: Annotated[float, typer.Option(help="Seconds within which it leaves.")] = 1.0,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the server.")] = 600.0,
    seed: Annotated[int | None, typer.Option(help="Of everything that is drawn; random if not given.")] = None,
    model: Annotated[str | None, typer.Option(help="Name of the model, where the server wants one.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="UNDERPAINT_API_KEY", help="Sent as a bearer token.")] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="OpenAI's fields only, no streams: for other servers.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """How a running server answers under load; ours, or another with OpenAI's API."""
    if find_spec("httpx") is None:
        raise BadConfig("this needs more packages: pip install 'underpaint[server]'")
    from underpaint.bench.serve import Kind, Load
    from underpaint.bench.serve import serve as run

    load = Load(
        url.rstrip("/"), {Kind.TEXT: text, Kind.PAINT: paint, Kind.EDIT: edit}, requests, rate,
        concurrency if rate is not None else concurrency or 1, secrets.randbits(32) if seed is None else seed,
        size, steps, n, previews, max_tokens, references, references_per_edit, reference_side, cancel, cancel_within,
        timeout, model, api_key, plain,
    )  # fmt: skip
    print_report(run(load), as_json)
