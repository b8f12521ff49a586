"""Arguments and options that several commands have, each with its one description."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(help="Checkpoint directory, or a Hugging Face id.", metavar="MODEL")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="auto (bfloat16 on a GPU, float32 on a CPU), or the name of a dtype.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Out = Annotated[Path, typer.Option("-o", "--out", help=".png or .webp; with --n, -1, -2, ... are added.")]
Size = Annotated[str | None, typer.Option(help="WIDTHxHEIGHT; by default the last reference's ratio.")]
Steps = Annotated[int | None, typer.Option(help="Denoising steps; by default the checkpoint's.")]
Seed = Annotated[int | None, typer.Option(help="Picture i has seed + i; random if not given.")]
Number = Annotated[int, typer.Option("--n", help="Number of pictures.")]
KvCodec = Annotated[str, typer.Option(help="How the prefix is stored: auto, bf16, fp8_v, fp8, fp8_tiles, fp16, fp32.")]
KvCacheBytes = Annotated[int, typer.Option(help="Byte budget of the prefix cache; 0 is a share of memory.")]
Offload = Annotated[str, typer.Option(help="Parts whose weights stay on the host: encoder, vae, dit, with commas.")]
Quantize = Annotated[str, typer.Option(help="none, or fp8: the linears of the blocks in e4m3.")]
Lora = Annotated[
    list[str] | None,
    typer.Option("--lora", metavar="FILE[=STRENGTH]", help="Fuse this LoRA into the weights at load; may be repeated."),
]
AttentionBackend = Annotated[
    str,
    typer.Option(
        help="auto, or the name of one; fp8 is e4m3 on Hopper, less exact and faster. What there is: underpaint doctor."
    ),
]
NegativePrompt = Annotated[str | None, typer.Option(help="Qwen-Image: what to guide away from.")]
TrueCfgScale = Annotated[float | None, typer.Option(help="Qwen-Image: guidance; at most 1 is none.")]
ReferenceResolution = Annotated[
    int | None, typer.Option(help="Qwen-Image: side of the square whose area references are resized to.")
]
GuidanceScale = Annotated[float | None, typer.Option(help="SenseNova-U1: guidance; at most 1 is none.")]
ImageGuidanceScale = Annotated[float | None, typer.Option(help="SenseNova-U1, edits: guidance by the pictures.")]
Think = Annotated[bool | None, typer.Option("--think", help="SenseNova-U1: think before painting.")]
References = Annotated[list[Path] | None, typer.Option("--image", help="A reference, up to 10; order matters.")]
