"""What a K/V codec costs in quality and saves in bytes: PSNR of the same pictures against ``bf16``."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from underpaint.pipeline import Pipeline
from underpaint.report import Bytes, Report, Table, machine

CODEC_NAMES = ("bf16", "fp8_v", "fp8", "fp8_tiles")


@dataclass(frozen=True, eq=False)
class Sample:
    """One picture to paint."""

    prompt: str
    images: tuple[Image.Image, ...]
    seed: int


def codec(model: str | Path, samples: Sequence[Sample], device: str, progress: Callable[[], object]) -> Report:
    """Paint every sample with each codec, always with the attention that reads them all; ``progress`` is called after
    each picture."""
    rows: list[tuple[str | int | float, ...]] = []
    truth: list[Tensor] = []
    plain_bytes = 0
    for name in CODEC_NAMES:
        pipeline = Pipeline.from_pretrained(model, device=device, kv_codec=name, attention_backend="piecewise")
        pictures = []
        for sample in samples:
            painting = pipeline(sample.prompt, sample.images, seed=sample.seed, output_type="pt", progress=False)
            pictures.append(painting.images[0].cpu())
            progress()
        row_bytes = pipeline.service.pool.page_bytes // pipeline.service.pool.page_rows
        if name == "bf16":
            truth, plain_bytes = pictures, row_bytes
            rows.append((name, Bytes(row_bytes), 1.0, "reference", "reference"))
            continue
        values = sorted(psnr(a, b) for a, b in zip(pictures, truth, strict=True))
        median, worst = values[len(values) // 2], values[0]
        rows.append((name, Bytes(row_bytes), row_bytes / plain_bytes, f"{median:.1f} dB", f"{worst:.1f} dB"))
    columns = ("codec", "a row", "of bf16", "PSNR, median", "PSNR, worst")
    return Report((machine(device),), (Table(f"K/V codecs, {len(samples)} pictures", columns, rows),))


def psnr(a: Tensor, b: Tensor) -> float:
    """Peak signal-to-noise ratio in dB of two RGBA pictures in [0, 1], colour premultiplied by alpha (colour under
    transparency is not seen)."""
    a, b = premultiplied(a), premultiplied(b)
    error = (a - b).square().mean().item()
    return math.inf if error == 0 else -10 * math.log10(error)


def premultiplied(picture: Tensor) -> Tensor:
    """(4, height, width) with colour times alpha."""
    return torch.cat([picture[:3] * picture[3:], picture[3:]])
