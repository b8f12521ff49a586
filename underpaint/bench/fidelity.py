"""What a cheaper way of computing does to pictures: PSNR and SSIM of the same pictures against plain bf16, and how many
are still right."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from underpaint.bench.codec import Sample, premultiplied, psnr
from underpaint.images import to_picture
from underpaint.pipeline import Pipeline
from underpaint.report import Report, Table, machine

Judge = Callable[[int, Any], bool]
"""Whether the picture of a sample, by its number, is right."""


@dataclass(frozen=True)
class Mode:
    """A way of computing: options of the engine beside plain bf16."""

    name: str
    options: dict[str, Any]


PLAIN = Mode("bf16", {})
MODES = (
    Mode("fp32", {"dtype": "float32"}),
    Mode("K/V fp8_v", {"kv_codec": "fp8_v"}),
    Mode("K/V fp8", {"kv_codec": "fp8"}),
    Mode("linears fp8", {"quantize": "fp8"}),
    Mode("linears fp8, K/V fp8_v", {"quantize": "fp8", "kv_codec": "fp8_v"}),
)
"""fp32 is no cheaper: its line says how far plain bf16 is from exact arithmetic itself."""
COLUMNS = ("mode", "PSNR, median", "PSNR, worst", "SSIM, median", "SSIM, worst", "right")


def fidelity(
    model: str | Path, samples: Sequence[Sample], judge: Judge, device: str, progress: Callable[[], object]
) -> Report:
    """Paint every sample in every mode; ``progress`` is called after each picture."""

    def paint(mode: Mode) -> tuple[list[Tensor], int]:
        pipeline = Pipeline.from_pretrained(model, **{"device": device, "dtype": "bfloat16", **mode.options})
        pictures = []
        for sample in samples:
            painting = pipeline(sample.prompt, sample.images, seed=sample.seed, output_type="pt", progress=False)
            pictures.append(painting.images[0].float().cpu())
            progress()
        return pictures, sum(judge(i, to_picture(picture)) for i, picture in enumerate(pictures))

    truth, num_right = paint(PLAIN)
    rows: list[tuple[str | int | float, ...]] = [(PLAIN.name, *["reference"] * 4, num_right)]
    for mode in MODES:
        pictures, num_right = paint(mode)
        distances = [psnr(a, b) for a, b in zip(pictures, truth, strict=True)]
        likeness = [ssim(a, b) for a, b in zip(pictures, truth, strict=True)]
        shown = (f"{median(distances):.1f} dB", f"{min(distances):.1f} dB", median(likeness), min(likeness))
        rows.append((mode.name, *shown, num_right))
    return Report((machine(device),), (Table(f"Against plain bf16, {len(samples)} pictures", COLUMNS, rows),))


def state_psnr(state: Tensor, plain: Tensor) -> float:
    """Peak signal-to-noise ratio in dB of states, which have no largest value: the peak counts as four standard
    deviations of ``plain``, as that of a picture whose values spread by a quarter of their range."""
    plain = plain.double()
    error = (state.double() - plain).square().mean().sqrt().item()
    return math.inf if error == 0 else 20 * math.log10(4 * plain.std().item() / error)


def ssim(a: Tensor, b: Tensor) -> float:
    """Structural similarity of two RGBA pictures in [0, 1], colour premultiplied by alpha: the mean over channels and
    places, with the window and constants of Wang et al. 2004 (Gaussian 11 x 11, sigma 1.5, 0.01, 0.03)."""
    a, b = (premultiplied(x)[:, None].double() for x in (a, b))
    line = torch.exp(-((torch.arange(11, dtype=torch.float64) - 5) ** 2) / (2 * 1.5**2))
    line = line / line.sum()
    window = torch.outer(line, line)[None, None]

    def mean(x: Tensor) -> Tensor:
        return F.conv2d(x, window)

    mean_a, mean_b = mean(a), mean(b)
    var_a, var_b, both = mean(a * a) - mean_a**2, mean(b * b) - mean_b**2, mean(a * b) - mean_a * mean_b
    light = (2 * mean_a * mean_b + 0.01**2) / (mean_a**2 + mean_b**2 + 0.01**2)
    return (light * (2 * both + 0.03**2) / (var_a + var_b + 0.03**2)).mean().item()
