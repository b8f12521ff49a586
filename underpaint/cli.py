"""The command line: ``underpaint generate``, ``edit``, ``chat``, ``serve``, ``inspect``, ``quantize``, ``bench``."""

import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from PIL import Image
from transformers.utils import logging as transformers_logging

from underpaint import bench, report
from underpaint.chat import Chat, PaintingOptions, TextPart
from underpaint.commands.arguments import (
    AsJson,
    Device,
    Dtype,
    GuidanceScale,
    ImageGuidanceScale,
    KvCacheBytes,
    KvCodec,
    Model,
    NegativePrompt,
    Number,
    Offload,
    Out,
    Quantize,
    ReferenceResolution,
    References,
    Seed,
    Size,
    Steps,
    Think,
    TrueCfgScale,
)
from underpaint.commands.output import print_report
from underpaint.commands.serve import bench_serve, serve
from underpaint.config import EngineConfig, resolve
from underpaint.errors import BadConfig, BadParameter, BadRequest, BadSize, UnderpaintError
from underpaint.images import read_image
from underpaint.models import registry
from underpaint.models.loading import locate
from underpaint.models.neo_unify import LoraSpec
from underpaint.models.quantised import write_quantised
from underpaint.pipeline import Pipeline, load_service
from underpaint.service import Service

OUTPUT_SUFFIXES = (".png", ".webp")  # formats that keep alpha

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
bench_app = typer.Typer(no_args_is_help=True, help="Measurements; each prints its table, and JSON with --json.")
app.add_typer(bench_app, name="bench")
app.command()(serve)
bench_app.command("serve")(bench_serve)


@app.callback()
def about() -> None:
    """Paint and edit with Qwen-Image 2.1 or SenseNova-U1, and talk with the latter, from a prefix K/V cache."""


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Option(help="What to paint, or how to edit; may be empty.")],
    image: References = None,
    out: Out = Path("out.png"),
    size: Size = None,
    steps: Steps = None,
    seed: Seed = None,
    n: Number = 1,
    negative_prompt: NegativePrompt = None,
    true_cfg_scale: TrueCfgScale = None,
    reference_resolution: ReferenceResolution = None,
    guidance_scale: GuidanceScale = None,
    image_guidance_scale: ImageGuidanceScale = None,
    think: Think = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    kv_codec: KvCodec = "auto",
    kv_cache_bytes: KvCacheBytes = 0,
    quantize: Quantize = "none",
    offload: Offload = "",
) -> None:
    """Paint a picture, or edit references."""
    width, height = parse_size(size) if size else (None, None)
    paths = output_paths(out, n)
    options = {"device": device, "dtype": dtype, "kv_codec": kv_codec, "kv_cache_bytes": kv_cache_bytes}
    pipeline = Pipeline(_load(model, quantize=quantize, offload=offload, **options))
    painting = pipeline(
        prompt,
        image or [],
        width=width,
        height=height,
        num_inference_steps=steps,
        seed=seed,
        num_images=n,
        negative_prompt=negative_prompt,
        true_cfg_scale=true_cfg_scale,
        reference_resolution=reference_resolution,
        guidance_scale=guidance_scale,
        image_guidance_scale=image_guidance_scale,
        think=think,
    )
    for path, picture, used in zip(paths, painting.images, painting.seeds, strict=True):
        save(picture, path)
        print(f"{path}  {picture.width}x{picture.height}  seed {used}")
    seconds = "  ".join(f"{stage} {value:.2f} s" for stage, value in painting.stats.seconds.items())
    stats = painting.stats
    print(f"{stats.num_steps} steps  {seconds}  prefix rows {stats.rows_prefilled} new, {stats.rows_reused} reused")


@app.command()
def edit(
    model: Model,
    image: Annotated[list[Path], typer.Argument(help="The pictures to edit, in order.", metavar="IMAGE...")],
    prompt: Annotated[str, typer.Option(help="How to edit.")],
    out: Out = Path("out.png"),
    size: Size = None,
    steps: Steps = None,
    seed: Seed = None,
    n: Number = 1,
    negative_prompt: NegativePrompt = None,
    true_cfg_scale: TrueCfgScale = None,
    reference_resolution: ReferenceResolution = None,
    guidance_scale: GuidanceScale = None,
    image_guidance_scale: ImageGuidanceScale = None,
    think: Think = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    kv_codec: KvCodec = "auto",
    kv_cache_bytes: KvCacheBytes = 0,
    quantize: Quantize = "none",
    offload: Offload = "",
) -> None:
    """Edit pictures: ``generate`` with the references first."""
    generate(**locals())


@app.command()
def chat(
    model: Model,
    image: Annotated[list[Path] | None, typer.Option("--image", help="A picture for the first message.")] = None,
    say: Annotated[
        list[str] | None, typer.Option("--say", help="Say this instead of reading from the terminal; may be repeated.")
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="Where pictures go; -1, -2, ... are added.")] = Path(
        "picture.png"
    ),
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT of painted pictures.")] = None,
    steps: Steps = None,
    max_pictures: Annotated[int, typer.Option(help="Pictures an answer may have, up to 10; 0 is text only.")] = 10,
    max_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 1024,
    temperature: Annotated[float, typer.Option(help="0 is the likeliest token every time.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Of the noise and the tokens; random if not given.")] = None,
    think: Annotated[bool, typer.Option("--think", help="Think before answering.")] = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    kv_codec: KvCodec = "auto",
    kv_cache_bytes: KvCacheBytes = 0,
    quantize: Quantize = "none",
    offload: Offload = "",
) -> None:
    """Talk with a SenseNova-U1. Text streams; pictures are saved and named. An empty line or Ctrl-D ends it."""
    output_paths(out, 1)
    painting = PaintingOptions(num_inference_steps=steps, sizes=(parse_size(size),) if size else ())
    options = {"device": device, "dtype": dtype, "kv_codec": kv_codec, "kv_cache_bytes": kv_cache_bytes}
    dialogue = Chat(_load(model, quantize=quantize, offload=offload, **options))
    images: list[Path] = list(image or [])
    num_saved = 0
    for text in say or iter(_ask, ""):
        parts = dialogue.send(
            text, images, max_pictures=max_pictures, painting=painting, seed=seed, think=think,
            max_tokens=max_tokens, temperature=temperature,
        )  # fmt: skip
        images = []
        for part in parts:
            if isinstance(part, TextPart):
                print(f"\033[2m{part.text}\033[0m" if part.thought and sys.stdout.isatty() else part.text, end="")
            else:
                num_saved += 1
                path = out.with_stem(f"{out.stem}-{num_saved}")
                save(part.image, path)
                print(f"[{path}  {part.image.width}x{part.image.height}]", end="")
            sys.stdout.flush()
        print()


def _ask() -> str:
    """A line from the terminal, empty at its end."""
    try:
        return input("> ").strip()
    except EOFError:
        return ""


@app.command()
def inspect(
    model: Model,
    card: Annotated[str | None, typer.Option(help="Say what a GPU with so much memory holds, as in 24GiB.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check a checkpoint and say what it needs, without loading it."""
    checkpoint = registry.inspect(locate(model))
    if card is None:
        print_report(report.describe(checkpoint, EngineConfig()), as_json)
    else:
        print_report(report.on_card(checkpoint, report.parse_bytes(card), EngineConfig()), as_json)


@app.command()
def doctor(
    model: Annotated[str | None, typer.Argument(help="A checkpoint to check too.", metavar="[MODEL]")] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """What this machine has, what would be used of it, and why not the rest. Status 1 if something keeps it from
    working."""
    from underpaint.doctor import examine

    found, problems = examine(device, locate(model) if model else None)
    print_report(found, as_json)
    if problems:
        sys.exit(1)


@app.command()
def quantize(
    model: Model,
    out: Annotated[Path, typer.Argument(help="The directory to write; it must not exist.", metavar="OUT")],
    lora: Annotated[
        list[Path] | None, typer.Option("--lora", help="SenseNova-U1: fuse this LoRA first; may be repeated.")
    ] = None,
) -> None:
    """Write a checkpoint with the linears of its blocks in e4m3, which then loads like any other."""
    write_quantised(locate(model), out, [LoraSpec(path) for path in lora or []])
    before, after = (registry.num_bytes(registry.inspect(root)) for root in (locate(model), out))
    print(f"{out}  {report.cell(report.Bytes(before))} -> {report.cell(report.Bytes(after))}")


@bench_app.command("attention")
def bench_attention(
    table: Annotated[list[str] | None, typer.Option("--table", help="One of them; may be repeated.")] = None,
    lightllm: Annotated[Path | None, typer.Option(help="LightLLM's context_attention_fwd_neo.py, a peer.")] = None,
    flex: Annotated[bool, typer.Option("--flex", help="FlexAttention too, which is compiled for every shape.")] = False,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Directory for attention.md, .json, .svg.")] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Attention on the shapes of the models and of LightLLM's public benchmark, beside its peers."""
    from underpaint.bench.attention import TABLES, attention, write

    for name in table or ():
        if name not in TABLES:
            raise BadConfig(f"table is {name!r}; it must be one of {', '.join(TABLES)}")
    if lightllm is not None and not lightllm.is_file():
        raise BadConfig(f"{lightllm}: there is no file")
    where = resolve(EngineConfig(device=device)).device
    measured, results = attention(where, lightllm, flex, table or (), lambda result: print(result, file=sys.stderr))
    print_report(measured, as_json)
    if out is not None:
        write(out, measured, results)


@bench_app.command("prefix")
def bench_prefix(model: Model, device: Device = "auto", dtype: Dtype = "auto", as_json: AsJson = False) -> None:
    """Rows prefilled and K/V bytes for 1, 2 and 4 references with guidance: unshared, shared, and a second request."""
    print_report(bench.prefix(Pipeline(_load(model, device=device, dtype=dtype))), as_json)


@bench_app.command("step")
def bench_step(
    random: Annotated[bool, typer.Option("--random", help="With random weights; there is no other way yet.")] = False,
    family: Annotated[str, typer.Option(help="qwen or neo.")] = "qwen",
    size: Annotated[list[int] | None, typer.Option(help="Side in pixels; may be repeated. 1024.")] = None,
    references: Annotated[list[int] | None, typer.Option(help="How many; may be repeated. 0, 1 and 2.")] = None,
    guided: Annotated[bool, typer.Option("--guided", help="Two branches.")] = False,
    quantize: Quantize = "none",
    kv_codec: KvCodec = "auto",
    attention: Annotated[str | None, typer.Option(help="Attention backend of ours.")] = None,
    peers: Annotated[bool, typer.Option(help="Measure those that can be imported too.")] = True,
    steps: Annotated[int, typer.Option(help="Steps a point.")] = 30,
    budget: Annotated[float, typer.Option(help="Seconds; what is not begun by then is left out, and named.")] = 270.0,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Steps and first steps of a full-size model with random weights, beside the limit and peers in the same run."""
    from underpaint.bench.step import Plan, step

    if not random:
        raise BadConfig("bench step measures models with random weights: say --random")
    plan = Plan(
        family, tuple(size or (1024,)), tuple(references or (0, 1, 2)), guided, quantize, kv_codec, attention, peers,
        steps, budget,
    )  # fmt: skip
    print_report(step(plan, device), as_json)


@bench_app.command("image")
def bench_image(
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
    from underpaint.bench.image import image as run

    if random == (model is not None):
        raise BadConfig("bench image needs a MODEL, or --random, and not both")
    references = tuple(read_image(path, str(path)) for path in image or [])
    pipeline = Pipeline(_load(model, device=device, quantize=quantize)) if model else random_pipeline(device, quantize)
    print_report(run(pipeline, Wish(prompt, references, parse_size(size), steps), pictures, warm_up), as_json)


@bench_app.command("understand")
def bench_understand(
    check: Annotated[bool, typer.Option("--check", help="Compare with the plain path in fp32 instead.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Show kernels and host functions instead.")] = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Decode and prefill of a full-size SenseNova-U1 with random weights, beside the limits of the machine."""
    from underpaint.bench import profile as profiling
    from underpaint.bench import understand

    where = resolve(EngineConfig(device=device)).device
    measure = understand.check if check else profiling.profile if profile else understand.understand
    print_report(measure(where), as_json)


@bench_app.command("handover")
def bench_handover(
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
    from underpaint.bench.handover_check import check as check_handover

    print_report(check_handover(devices) if check else bench.handover(devices, way or (), rows), as_json)


@bench_app.command("kernels")
def bench_kernels(
    tiles: Annotated[bool, typer.Option("--tiles", help="Linear layers by tile instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """The fused kernels on this machine's GPU: right, and how close to its memory's limit."""
    if not torch.cuda.is_available() or find_spec("triton") is None:
        raise BadConfig("the kernels need a CUDA device and the package triton")
    from underpaint.bench.kernels import kernels

    print_report(kernels(tiles), as_json)


def parse_size(text: str) -> tuple[int, int]:
    """``WIDTHxHEIGHT`` in pixels. Raises BadSize."""
    width, _, height = text.lower().partition("x")
    if not (width.isdecimal() and height.isdecimal()):
        raise BadSize(f"size {text!r} must be WIDTHxHEIGHT, for example 1024x768", param="size")
    return int(width), int(height)


def output_paths(out: Path, n: int) -> list[Path]:
    """Where ``n`` pictures go. Raises BadParameter before any work if they cannot be written there."""
    if out.suffix.lower() not in OUTPUT_SUFFIXES:
        raise BadParameter(f"{out}: pictures have alpha; use a name that ends in .png or .webp", param="out")
    if not out.parent.is_dir():
        raise BadParameter(f"{out}: there is no directory {out.parent}", param="out")
    if not os.access(out.parent, os.W_OK):
        raise BadParameter(f"{out}: the directory {out.parent} cannot be written to", param="out")
    if n <= 1:
        return [out]
    return [out.with_stem(f"{out.stem}-{i}") for i in range(1, n + 1)]


def save(picture: Image.Image, path: Path) -> None:
    """Write a picture whole or not at all: into a file beside it, which then takes its name."""
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=path.suffix, delete=False) as file:
        try:
            picture.save(file, lossless=True)  # for WebP; PNG is always lossless
            file.close()
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except OSError as error:
            os.unlink(file.name)
            raise BadParameter(f"{path} cannot be written: {error}", param="out") from error
        except BaseException:
            os.unlink(file.name)
            raise


def _load(model: str, **options: Any) -> Service:
    transformers_logging.disable_progress_bar()
    return load_service(model, options)


def main() -> None:
    """Entry point: a user's mistake is one sentence on stderr and status 2, another failure of ours status 1."""
    try:
        app(standalone_mode=True)
    except UnderpaintError as error:
        print(f"underpaint: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, BadRequest | BadConfig) else 1)
    except KeyboardInterrupt:
        print("underpaint: interrupted, nothing was written", file=sys.stderr)
        sys.exit(130)
