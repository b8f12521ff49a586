"""The command line: ``underpaint generate``, ``edit``, ``chat``, ``serve``, ``inspect``, ``bench``."""

import json
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from PIL import Image
from rich.console import Console
from transformers.utils import logging as transformers_logging

from underpaint import bench, report
from underpaint.chat import Chat, PaintingOptions, TextPart
from underpaint.config import EngineConfig
from underpaint.errors import BadConfig, BadParameter, BadRequest, BadSize, UnderpaintError
from underpaint.models import registry
from underpaint.models.loading import locate
from underpaint.pipeline import Pipeline, load_service
from underpaint.service import Service

OUTPUT_SUFFIXES = (".png", ".webp")  # formats that keep alpha

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
bench_app = typer.Typer(no_args_is_help=True, help="Measurements; each prints its table, and JSON with --json.")
app.add_typer(bench_app, name="bench")

Model = Annotated[str, typer.Argument(help="Checkpoint directory, or a Hugging Face id.", metavar="MODEL")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="auto (bfloat16 on a GPU, float32 on a CPU), or the name of a dtype.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.callback()
def about() -> None:
    """Paint and edit with Qwen-Image 2.1 or SenseNova-U1, and talk with the latter, from a prefix K/V cache."""


Out = Annotated[Path, typer.Option("-o", "--out", help=".png or .webp; with --n, -1, -2, ... are added.")]
Size = Annotated[str | None, typer.Option(help="WIDTHxHEIGHT; by default the last reference's ratio.")]
Steps = Annotated[int | None, typer.Option(help="Denoising steps; by default the checkpoint's.")]
Seed = Annotated[int | None, typer.Option(help="Picture i has seed + i; random if not given.")]
Number = Annotated[int, typer.Option("--n", help="Number of pictures.")]
KvCodec = Annotated[str, typer.Option(help="How the prefix is stored: auto, bf16, fp8_v, fp8, fp16, fp32.")]
KvCacheBytes = Annotated[int, typer.Option(help="Byte budget of the prefix cache; 0 is a share of memory.")]
NegativePrompt = Annotated[str | None, typer.Option(help="Qwen-Image: what to guide away from.")]
TrueCfgScale = Annotated[float | None, typer.Option(help="Qwen-Image: guidance; at most 1 is none.")]
ReferenceResolution = Annotated[
    int | None, typer.Option(help="Qwen-Image: side of the square whose area references are resized to.")
]
GuidanceScale = Annotated[float | None, typer.Option(help="SenseNova-U1: guidance; at most 1 is none.")]
ImageGuidanceScale = Annotated[float | None, typer.Option(help="SenseNova-U1, edits: guidance by the pictures.")]
Think = Annotated[bool | None, typer.Option("--think", help="SenseNova-U1: think before painting.")]
References = Annotated[list[Path] | None, typer.Option("--image", help="A reference, up to 10; order matters.")]


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
) -> None:
    """Paint a picture, or edit references."""
    width, height = parse_size(size) if size else (None, None)
    paths = output_paths(out, n)
    pipeline = Pipeline(_load(model, device=device, dtype=dtype, kv_codec=kv_codec, kv_cache_bytes=kv_cache_bytes))
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
) -> None:
    """Talk with a SenseNova-U1. Text streams; pictures are saved and named. An empty line or Ctrl-D ends it."""
    output_paths(out, 1)
    painting = PaintingOptions(num_inference_steps=steps, sizes=(parse_size(size),) if size else ())
    dialogue = Chat(_load(model, device=device, dtype=dtype, kv_codec=kv_codec, kv_cache_bytes=kv_cache_bytes))
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


@app.command()
def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at.")] = 8000,
    name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Clients must send it as a bearer token.")] = None,
    max_waiting: Annotated[int, typer.Option(help="Requests that may wait; more are refused for now.")] = 64,
    timeout: Annotated[float, typer.Option(help="Seconds a request may take, waiting included.")] = 600.0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    kv_codec: KvCodec = "auto",
    kv_cache_bytes: KvCacheBytes = 0,
) -> None:
    """Serve OpenAI's HTTP API and a web page."""
    if find_spec("fastapi") is None:
        raise BadConfig("serving needs more packages: pip install 'underpaint[server]'")
    from underpaint.server import ServerConfig
    from underpaint.server.serve import default_id
    from underpaint.server.serve import serve as run

    config = ServerConfig(name or default_id(model), api_key=api_key, max_waiting=max_waiting, timeout_seconds=timeout)
    options = {"device": device, "dtype": dtype, "kv_codec": kv_codec, "kv_cache_bytes": kv_cache_bytes}
    sys.exit(run(model, host=host, port=port, config=config, **options))


def _ask() -> str:
    """A line from the terminal, empty at its end."""
    try:
        return input("> ").strip()
    except EOFError:
        return ""


@app.command()
def inspect(model: Model, as_json: AsJson = False) -> None:
    """Check a checkpoint and say what it needs, without loading it."""
    facts = report.describe(registry.inspect(locate(model)), EngineConfig())
    _print(facts, as_json)


@bench_app.command("prefix")
def bench_prefix(model: Model, device: Device = "auto", dtype: Dtype = "auto", as_json: AsJson = False) -> None:
    """Rows prefilled and K/V bytes for 1, 2 and 4 references with guidance: unshared, shared, and a second request."""
    _print(bench.prefix(Pipeline(_load(model, device=device, dtype=dtype))), as_json)


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


def _print(tables: report.Report, as_json: bool) -> None:
    if as_json:
        print(json.dumps(tables.as_json(), indent=2, ensure_ascii=False))
        return
    report.show(tables, Console())


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
