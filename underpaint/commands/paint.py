"""``underpaint generate`` and ``underpaint edit``."""

from pathlib import Path
from typing import Annotated

import typer

from underpaint.commands.arguments import (
    AttentionBackend,
    Device,
    Dtype,
    GuidanceScale,
    ImageGuidanceScale,
    KvCacheBytes,
    KvCodec,
    Lora,
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
from underpaint.commands.load import load
from underpaint.commands.pictures import output_paths, parse_size, save


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
    lora: Lora = None,
    attention_backend: AttentionBackend = "auto",
) -> None:
    """Paint a picture, or edit references."""
    from underpaint.pipeline import Pipeline

    width, height = parse_size(size) if size else (None, None)
    paths = output_paths(out, n)
    options = {"device": device, "dtype": dtype, "kv_codec": kv_codec, "kv_cache_bytes": kv_cache_bytes}
    options["attention_backend"] = attention_backend
    pipeline = Pipeline(load(model, quantize=quantize, offload=offload, lora=lora, **options))
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
    lora: Lora = None,
    attention_backend: AttentionBackend = "auto",
) -> None:
    """Edit pictures: ``generate`` with the references first."""
    generate(**locals())
