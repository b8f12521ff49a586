"""The command line: ``underpaint generate``, ``inspect``, ``bench``."""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from PIL import Image
from rich import box
from rich.console import Console
from rich.table import Table
from transformers.utils import logging as transformers_logging

from underpaint import bench, report
from underpaint.config import EngineConfig
from underpaint.errors import BadConfig, BadParameter, BadRequest, BadSize, UnderpaintError
from underpaint.models import registry
from underpaint.models.loading import locate
from underpaint.pipeline import Pipeline

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
    """Paint and edit pictures with Qwen-Image 2.1, from a prefix K/V cache."""


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Option(help="What to paint, or how to edit; may be empty.")],
    image: Annotated[list[Path] | None, typer.Option(help="A reference, up to 10; order matters.")] = None,
    negative_prompt: Annotated[str | None, typer.Option(help="What to guide away from.")] = None,
    true_cfg_scale: Annotated[float, typer.Option(help="Guidance; at most 1 is none.")] = 1.0,
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT; by default the last reference's ratio.")] = None,
    reference_resolution: Annotated[
        int | None, typer.Option(help="Side of the square whose area references are resized to.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps; by default the checkpoint's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Picture i has seed + i; random if not given.")] = None,
    n: Annotated[int, typer.Option("--n", help="Number of pictures.")] = 1,
    out: Annotated[Path, typer.Option("-o", "--out", help=".png or .webp; with --n, -1, -2, ... are added.")] = Path(
        "out.png"
    ),
    device: Device = "auto",
    dtype: Dtype = "auto",
    kv_codec: Annotated[str, typer.Option(help="How the prefix is stored: auto, bf16, fp8_v, fp8 ...")] = "auto",
    kv_cache_bytes: Annotated[int, typer.Option(help="Byte budget of the prefix cache; 0 is a share of memory.")] = 0,
) -> None:
    """Paint a picture, or edit references."""
    width, height = parse_size(size) if size else (None, None)
    paths = output_paths(out, n)
    pipeline = _load(model, device=device, dtype=dtype, kv_codec=kv_codec, kv_cache_bytes=kv_cache_bytes)
    painting = pipeline(
        prompt,
        image or [],
        negative_prompt=negative_prompt,
        true_cfg_scale=true_cfg_scale,
        width=width,
        height=height,
        num_inference_steps=steps,
        reference_resolution=reference_resolution,
        seed=seed,
        num_images=n,
    )
    for path, picture, used in zip(paths, painting.images, painting.seeds, strict=True):
        save(picture, path)
        print(f"{path}  {picture.width}x{picture.height}  seed {used}")
    seconds = "  ".join(f"{stage} {value:.2f} s" for stage, value in painting.stats.seconds.items())
    stats = painting.stats
    print(f"{stats.num_steps} steps  {seconds}  prefix rows {stats.rows_prefilled} new, {stats.rows_reused} reused")


@app.command()
def inspect(model: Model, as_json: AsJson = False) -> None:
    """Check a checkpoint and say what it needs, without loading it."""
    facts = report.describe(registry.inspect(locate(model)), EngineConfig())
    _print(facts, as_json)


@bench_app.command("prefix")
def bench_prefix(model: Model, device: Device = "auto", dtype: Dtype = "auto", as_json: AsJson = False) -> None:
    """Rows prefilled and K/V bytes for 1, 2 and 4 references with guidance: unshared, shared, and a second request."""
    _print(bench.prefix(_load(model, device=device, dtype=dtype)), as_json)


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
        except BaseException:
            os.unlink(file.name)
            raise


def _load(model: str, **options: Any) -> Pipeline:
    transformers_logging.disable_progress_bar()
    return Pipeline.from_pretrained(model, **options)


def _print(tables: report.Report, as_json: bool) -> None:
    if as_json:
        print(json.dumps(tables.as_json(), indent=2, ensure_ascii=False))
        return
    console = Console()
    for line in tables.notes:
        console.print(line, highlight=False)
    for table in tables.tables:
        shown = Table(*table.columns, title=table.title, title_justify="left", box=box.SIMPLE_HEAD)
        for row in table.rows:
            shown.add_row(*(report.cell(value) for value in row))
        console.print(shown)


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
