"""The golden checkpoints, loaded once, and the requests of their cases."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from underpaint.attention import Backend, each_layer, piecewise
from underpaint.config import EngineConfig
from underpaint.images import read_image
from underpaint.kv.codec import CODECS
from underpaint.kv.pool import PagePool
from underpaint.models.neo_unify import EditGuidance, NeoUnify, PaintGuidance, Passage, Picture, load
from underpaint.models.neo_unify.driver import Driver, PaintOptions
from underpaint.models.neo_unify.prompt import painting_branches
from underpaint.models.neo_unify.vision import PixelBounds, read_picture, reference_bounds
from underpaint.sampling.guidance import Branch

VARIANTS = ("dense", "moe", "pixelhead")
TOLERANCE = 1e-5
CONFIG = EngineConfig(device="cpu", dtype="float32", kv_codec="fp32")
ROOT = Path(__file__).parent / "golden"
PAGE_ROWS = 16


@dataclass(frozen=True, eq=False)
class Golden:
    """One variant: its model, and what the reference implementation did with it."""

    root: Path
    model: NeoUnify
    facts: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def cases(self) -> dict[str, Any]:
        return self.facts["cases"]

    def image(self, name: str) -> Image.Image:
        return read_image(self.root / name, name)

    def references(self, case: Mapping[str, Any]) -> list[Picture]:
        names = case.get("images", [])
        return [read_picture(self.image(name), reference_bounds(len(names))) for name in names]

    def passages(self, case: Mapping[str, Any]) -> dict[Branch, Passage]:
        think = case.get("think_mode", False)
        return painting_branches(self.model.tokenizer, case["prompt"], self.references(case), think)


@cache
def golden(variant: str) -> Golden:
    root = ROOT / variant
    facts = json.loads((root / "golden.json").read_text(encoding="utf-8"))
    with torch.inference_mode(False):  # whoever asks first, all may change the weights
        return Golden(root, load(root, CONFIG), facts, load_file(root / "golden.safetensors"))


def options_of(case: Mapping[str, Any], size: tuple[int, int] | None = None) -> PaintOptions:
    """How a case paints; it is an edit if it has a scale for pictures."""
    scale, norm = case["cfg_scale"], case["cfg_norm"]
    guidance: PaintGuidance | EditGuidance
    if "img_cfg_scale" in case:
        guidance = EditGuidance(scale, case["img_cfg_scale"], norm)
    else:
        low, high = case.get("cfg_interval", (0.0, 1.0))
        guidance = PaintGuidance(scale, norm, (low, high))
    width, height = size or case["image_size"]
    return PaintOptions((width, height), case["num_steps"], guidance, case["timestep_shift"])


def cases_of(kinds: tuple[str, ...]) -> list[tuple[str, str]]:
    """(variant, case) for every case whose name begins with one of ``kinds``."""
    names = {variant: json.loads((ROOT / variant / "golden.json").read_text())["cases"] for variant in VARIANTS}
    return [(variant, name) for variant in VARIANTS for name in names[variant] if name.startswith(kinds)]


def make_driver(model: NeoUnify, backend: Backend = piecewise) -> tuple[Driver, PagePool]:
    codec = CODECS["fp32" if model.dtype == torch.float32 else "bf16"]
    pool = PagePool(model.cache_shape, codec, 16 << 20, "cpu", PAGE_ROWS)
    return Driver(model, pool, each_layer(backend)), pool


def small_pictures(draw_image: Callable[..., Image.Image]) -> list[Picture]:
    """Two pictures of a few cells."""
    sizes = [(64, 96), (96, 32)]
    return [read_picture(draw_image(*size), PixelBounds(0, 1 << 20)) for size in sizes]


def generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def text_of(part: tuple[int, ...] | Picture) -> tuple[int, ...]:
    assert isinstance(part, tuple)
    return part


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Of the largest, relative to the largest."""
    assert ours.shape == theirs.shape, f"{tuple(ours.shape)} against {tuple(theirs.shape)}"
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()
