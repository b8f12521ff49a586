"""``underpaint chat``."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from underpaint.commands.arguments import (
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
from underpaint.commands.load import load
from underpaint.commands.pictures import output_paths, parse_size, save
from underpaint.errors import BadParameter


def chat(
    model: Model,
    image: Annotated[list[Path] | None, typer.Option("--image", help="A picture for the first message.")] = None,
    say: Annotated[
        list[str] | None, typer.Option("--say", help="Say this instead of reading from the terminal; may be repeated.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Where pictures go; -1, -2, ... are added.", show_default="picture.png"),
    ] = None,
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
    lora: Lora = None,
    attention_backend: AttentionBackend = "auto",
) -> None:
    """Talk with a SenseNova-U1. Text streams; pictures are saved and named. An empty line or Ctrl-D ends it."""
    from underpaint.chat import AnswerOptions, Chat, PaintingOptions, TextPart

    if out is not None and max_pictures == 0:
        raise BadParameter("--out has no effect with --max-pictures 0", param="out")
    out = out or Path("picture.png")
    if max_pictures:
        output_paths(out, 1)
    answers: dict[str, Any] = {
        "painting": PaintingOptions(num_inference_steps=steps, sizes=() if size is None else (parse_size(size),)),
        "max_pictures": max_pictures, "seed": seed, "think": think, "max_tokens": max_tokens,
        "temperature": temperature,
    }  # fmt: skip
    AnswerOptions.of(**answers)  # refuses before the model is loaded
    options = {"device": device, "dtype": dtype, "kv_codec": kv_codec, "kv_cache_bytes": kv_cache_bytes}
    options["attention_backend"] = attention_backend
    dialogue = Chat(load(model, quantize=quantize, offload=offload, lora=lora, **options))
    images: list[Path] = list(image or [])
    num_saved = 0
    for text in say or iter(_ask, ""):
        parts = dialogue.send(text, images, **answers)
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
