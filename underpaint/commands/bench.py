"""``underpaint bench``, but for the load on a server."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from underpaint.commands.arguments import AsJson, Device, Dtype, KvCodec, Model, Quantize, References, Steps
from underpaint.commands.load import load
from underpaint.commands.output import print_report
from underpaint.commands.pictures import parse_size
from underpaint.errors import BadConfig


def attention(
    table: Annotated[list[str] | None, typer.Option("--table", help="One of them; may be repeated.")] = None,
    lightllm: Annotated[Path | None, typer.Option(help="LightLLM's context_attention_fwd_neo.py, a peer.")] = None,
    flex: Annotated[bool, typer.Option("--flex", help="FlexAttention too, which is compiled for every shape.")] = False,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Directory for attention.md, .json, .svg.")] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Attention on the shapes of the models and of LightLLM's public benchmark, beside its peers."""
    from underpaint.bench.attention import TABLES, write
    from underpaint.bench.attention import attention as measure
    from underpaint.config import EngineConfig, resolve

    for name in table or ():
        if name not in TABLES:
            raise BadConfig(f"table is {name!r}; it must be one of {', '.join(TABLES)}")
    if lightllm is not None and not lightllm.is_file():
        raise BadConfig(f"{lightllm}: there is no file")
    where = resolve(EngineConfig(device=device)).device
    measured, results = measure(where, lightllm, flex, table or (), lambda result: print(result, file=sys.stderr))
    if out is not None:
        write(out, measured, results)
    print_report(measured, as_json)


def checkpoint(
    out: Annotated[Path, typer.Argument(help="The directory to write; it must not exist.", metavar="OUT")],
    device: Device = "auto",
) -> None:
    """Write a full-size SenseNova-U1 8B with random weights: a server with it is as fast as with the real ones."""
    from underpaint.bench.scenes import NEO
    from underpaint.config import EngineConfig, resolve
    from underpaint.models.random import write_random_neo

    write_random_neo(NEO, out, resolve(EngineConfig(device=device)).device)
    print(out)


def prefix(model: Model, device: Device = "auto", dtype: Dtype = "auto", as_json: AsJson = False) -> None:
    """Rows prefilled and K/V bytes for 1, 2 and 4 references with guidance: unshared, shared, and a second request."""
    from underpaint.bench.prefix import prefix as measure
    from underpaint.pipeline import Pipeline

    print_report(measure(Pipeline(load(model, device=device, dtype=dtype))), as_json)


def step(
    random: Annotated[bool, typer.Option("--random", help="With random weights; there is no other way yet.")] = False,
    family: Annotated[str, typer.Option(help="qwen or neo.")] = "qwen",
    size: Annotated[list[int] | None, typer.Option(help="Side in pixels; may be repeated. 1024.")] = None,
    references: Annotated[list[int] | None, typer.Option(help="How many; may be repeated. 0, 1 and 2.")] = None,
    guided: Annotated[bool, typer.Option("--guided", help="Two branches.")] = False,
    quantize: Annotated[
        list[str] | None, typer.Option(help="none, or fp8: the linears of the blocks in e4m3; may be repeated. none.")
    ] = None,
    kv_codec: Annotated[
        list[str] | None,
        typer.Option(help="How prefixes are stored; may be repeated, fp8_tiles is for attention fp8 only. auto."),
    ] = None,
    attention: Annotated[
        list[str] | None, typer.Option(help="Attention backend of ours; may be repeated. auto.")
    ] = None,
    read_graphs: Annotated[str, typer.Option(help="Whether short reads are captured: auto, on or off.")] = "auto",
    peers: Annotated[bool, typer.Option(help="Measure those that can be imported too.")] = True,
    peer: Annotated[
        list[str] | None, typer.Option(help="Of diffusers: eager or compiled; may be repeated. Both.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps a point.")] = 30,
    budget: Annotated[float, typer.Option(help="Seconds; what is not begun by then is left out, and named.")] = 270.0,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Directory for step.md, .json, .svg.")] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Steps and first steps of a full-size model with random weights, beside the limit and peers in the same run."""
    from underpaint.bench.step import PEERS, Plan, write
    from underpaint.bench.step import step as measure

    if not random:
        raise BadConfig("bench step measures models with random weights: say --random")
    plan = Plan(
        family, tuple(size or (1024,)), tuple(references or (0, 1, 2)), guided, tuple(quantize or ("none",)),
        tuple(kv_codec or ("auto",)), tuple(attention or ("auto",)), read_graphs, tuple(peer or PEERS) if peers else (),
        steps, budget,
    )  # fmt: skip
    report, results = measure(plan, device)
    if out is not None:
        write(out, report, results)
    print_report(report, as_json)


def requests(
    random: Annotated[bool, typer.Option("--random", help="With random weights; there is no other way yet.")] = False,
    table: Annotated[
        list[str] | None, typer.Option("--table", help="together, fidelity or memory; may be repeated; all three.")
    ] = None,
    family: Annotated[str, typer.Option(help="qwen or neo.")] = "qwen",
    size: Annotated[int | None, typer.Option(help="Side in pixels; 512, and up to 1024 for random requests.")] = None,
    steps: Annotated[int, typer.Option(help="Of a picture; random requests have up to twice as many.")] = 8,
    requests: Annotated[int, typer.Option(help="How many random ones.")] = 200,
    quantize: Quantize = "none",
    kv_codec: KvCodec = "auto",
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Directory for requests.md and .json.")] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Unlike requests together and one after another, fp8 beside plain, and whether memory is flat over many."""
    from underpaint.bench.requests import TABLES, Plan
    from underpaint.bench.requests import requests as measure
    from underpaint.bench.results import write

    if not random:
        raise BadConfig("bench requests measures models with random weights: say --random")
    plan = Plan(family, tuple(table or TABLES), quantize, kv_codec, size, steps, requests)
    report = measure(plan, device)
    if out is not None:
        write(out, "requests", report)
    print_report(report, as_json)


def image(
    model: Annotated[str | None, typer.Argument(help="Checkpoint directory, or a Hugging Face id.")] = None,
    random: Annotated[bool, typer.Option("--random", help="A SenseNova-U1 8B with random weights instead.")] = False,
    image: References = None,
    prompt: Annotated[str, typer.Option(help="What to paint, or how to edit.")] = "a red teapot on a wooden table",
    size: Annotated[str, typer.Option(help="WIDTHxHEIGHT.")] = "1024x1024",
    steps: Steps = None,
    pictures: Annotated[int, typer.Option(help="How many, one after another.")] = 10,
    warm_up: Annotated[bool, typer.Option(help="Let the engine capture graphs first, as a server does.")] = True,
    quantize: Quantize = "none",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Whole pictures: seconds by stage, and whether the first is slower than those after it."""
    from underpaint.bench.image import Wish, random_pipeline
    from underpaint.bench.image import image as measure
    from underpaint.images import read_image
    from underpaint.pipeline import Pipeline

    if random == (model is not None):
        raise BadConfig("bench image needs a MODEL, or --random, and not both")
    references = tuple(read_image(path, str(path)) for path in image or [])
    pipeline = Pipeline(load(model, device=device, quantize=quantize)) if model else random_pipeline(device, quantize)
    print_report(measure(pipeline, Wish(prompt, references, parse_size(size), steps), pictures, warm_up), as_json)


def understand(
    check: Annotated[bool, typer.Option("--check", help="Compare with the plain path in fp32 instead.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Show kernels and host functions instead.")] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Decode and prefill of a full-size SenseNova-U1 with random weights, beside the limits of the machine."""
    from underpaint.bench import profile as profiling
    from underpaint.bench import understand
    from underpaint.config import EngineConfig, resolve

    where = resolve(EngineConfig(device=device)).device
    measure = understand.check if check else profiling.profile if profile else understand.understand
    print_report(measure(where), as_json)


def handover(
    devices: Annotated[
        str, typer.Option(help="Understanding's and generation's: auto, cpu, or GPUs, as 0 or 0,1.")
    ] = "auto",
    way: Annotated[
        list[str] | None, typer.Option("--way", help="shm, ipc or colocate; may be repeated; by default all there are.")
    ] = None,
    rows: Annotated[int | None, typer.Option(help="Rows of the prefix; by default a 2048x2048 reference's.")] = None,
    check: Annotated[bool, typer.Option("--check", help="See that nothing is lost or left behind instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """How fast a SenseNova-U1 prefix gets from one process to another, beside the bandwidth of pinned memory."""
    from underpaint.bench.handover import handover as measure
    from underpaint.bench.handover_check import check as check_handover

    print_report(check_handover(devices) if check else measure(devices, way or (), rows), as_json)


def kernels(
    tiles: Annotated[bool, typer.Option("--tiles", help="Linear layers by tile instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """The fused kernels on this machine's GPU: right, and how close to its memory's limit."""
    import torch

    if not torch.cuda.is_available() or find_spec("triton") is None:
        raise BadConfig("the kernels need a CUDA device and the package triton")
    from underpaint.bench.kernels import kernels as measure

    print_report(measure(tiles), as_json)
