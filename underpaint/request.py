"""A painting request: checked whole before any work begins. Every field is honoured or refused."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image
from torch import Tensor

from underpaint.errors import BadParameter, BadSize
from underpaint.images import ImageInput

OutputType = Literal["pil", "pt", "latent"]
OUTPUT_TYPES: tuple[OutputType, ...] = ("pil", "pt", "latent")
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, eq=False)
class PaintRequest:
    """What a caller asks for: ``prompts`` x ``num_images`` pictures, prompt by prompt, over shared ``images``.

    Picture i has the seed ``seed`` + i. None leaves a choice to the checkpoint. Building one checks everything that
    needs no model; raises BadRequest.
    """

    prompts: tuple[str, ...]
    images: tuple[ImageInput, ...]
    negative_prompt: str | None
    true_cfg_scale: float | None
    width: int | None
    height: int | None
    num_steps: int | None
    sigmas: tuple[float, ...] | None
    seed: int
    num_images: int
    latents: Tensor | None
    output_type: OutputType
    reference_resolution: int | None
    guidance_scale: float | None = None
    image_guidance_scale: float | None = None
    cfg_norm: str | None = None
    cfg_interval: tuple[float, float] | None = None
    timestep_shift: float | None = None
    think: bool | None = None
    max_think_tokens: int | None = None

    def __post_init__(self) -> None:
        if not self.prompts:
            raise BadParameter("prompt is an empty list; give at least one prompt", param="prompt")
        for prompt in self.prompts:
            if not isinstance(prompt, str):
                raise BadParameter(f"prompt must be text or a list of texts, not {prompt!r}", param="prompt")
        check_count("num_images", self.num_images)
        if self.num_steps is not None:
            check_count("num_inference_steps", self.num_steps)
            if self.sigmas is not None:
                raise BadParameter("give num_inference_steps or sigmas, not both", param="sigmas")
        self._check_guidance()
        self._check_unified()
        if not 0 <= check_int("seed", self.seed) <= MAX_SEED - self.num_pictures:
            raise BadParameter(f"seed must be from 0 to {MAX_SEED - self.num_pictures}", param="seed")
        if self.output_type not in OUTPUT_TYPES:
            raise BadParameter(f"output_type must be one of {', '.join(OUTPUT_TYPES)}", param="output_type")

    @property
    def num_pictures(self) -> int:
        return len(self.prompts) * self.num_images

    @property
    def cfg_scale(self) -> float:
        """``true_cfg_scale``, 1 if it is not given."""
        return 1.0 if self.true_cfg_scale is None else self.true_cfg_scale

    @property
    def guided(self) -> bool:
        return self.cfg_scale > 1

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(self.seed + i for i in range(self.num_pictures))

    def _check_guidance(self) -> None:
        for name in ("true_cfg_scale", "guidance_scale", "image_guidance_scale"):
            check_number(name, getattr(self, name))
        if self.negative_prompt is not None and not isinstance(self.negative_prompt, str):
            raise BadParameter("negative_prompt must be text", param="negative_prompt")

    def _check_unified(self) -> None:
        check_number("timestep_shift", self.timestep_shift)
        if self.timestep_shift == 0:
            raise BadParameter("timestep_shift must be above 0", param="timestep_shift")
        if self.think is not None and not isinstance(self.think, bool):
            raise BadParameter(f"think must be True or False, not {self.think!r}", param="think")
        if self.max_think_tokens is not None:
            check_count("max_think_tokens", self.max_think_tokens)
            if not self.think:
                raise BadParameter("max_think_tokens has no effect without think", param="max_think_tokens")
        if self.cfg_interval is not None and (not isinstance(self.cfg_interval, tuple) or len(self.cfg_interval) != 2):
            raise BadParameter(f"cfg_interval must be two times, not {self.cfg_interval!r}", param="cfg_interval")
        for time in self.cfg_interval or ():
            check_number("cfg_interval", time)


def check_number(name: str, value: float | None) -> None:
    """Raises BadParameter unless ``value`` is a finite number from 0 up, or not given."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise BadParameter(f"{name} must be a number from 0 up, not {value!r}", param=name)


def as_prompts(prompt: str | Sequence[str]) -> tuple[str, ...]:
    return (prompt,) if isinstance(prompt, str) else tuple(prompt)


def as_images(images: Sequence[ImageInput]) -> tuple[ImageInput, ...]:
    """Raises BadParameter for a single picture, which has no order of its own to be a list."""
    if isinstance(images, str | bytes | Path | Image.Image | np.ndarray):
        raise BadParameter("images must be a list, even of one picture", param="images")
    return tuple(images)


def check_int(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadParameter(f"{name} must be a whole number, not {value!r}", param=name)
    return value


def check_count(name: str, value: int) -> int:
    if check_int(name, value) < 1:
        raise BadParameter(f"{name} must be at least 1, not {value}", param=name)
    return value


def check_side(name: str, value: int, multiple: int, largest: int) -> int:
    """A side of a picture in pixels. Raises BadSize, naming the nearest sides that can be painted."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadSize(f"{name} must be a whole number of pixels, not {value!r}", param=name)
    if value % multiple == 0 and multiple <= value <= largest:
        return value
    below = min(max(value // multiple * multiple, multiple), largest)
    above = min(below + multiple, largest) if value > below else below
    nearest = f"{below}" if below == above else f"{below} or {above}"
    raise BadSize(
        f"{name} is {value}; it must be a multiple of {multiple} up to {largest}, the nearest is {nearest}", param=name
    )
