"""A painting request: checked whole before any work begins. Every field is honoured or refused."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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
            check_text("prompt", prompt)
        if self.latents is not None and not isinstance(self.latents, Tensor):
            raise BadParameter(f"latents must be a tensor, not a {type(self.latents).__name__}", param="latents")
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
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name))
        if self.negative_prompt is not None:
            check_text("negative_prompt", self.negative_prompt)

    def _check_unified(self) -> None:
        if self.timestep_shift is not None:
            check_shift(self.timestep_shift)
        if self.think is not None:
            check_think(self.think)
        if self.max_think_tokens is not None:
            check_count("max_think_tokens", self.max_think_tokens)
            if not self.think:
                raise BadParameter("max_think_tokens has no effect without think", param="max_think_tokens")
        if self.cfg_interval is not None:
            check_interval(self.cfg_interval)


def check_number(name: str, value: float) -> None:
    """Raises BadParameter unless ``value`` is a finite number from 0 up."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise BadParameter(f"{name} must be a number from 0 up, not {value!r}", param=name)


def check_shift(shift: float) -> None:
    """Raises BadParameter for a ``timestep_shift`` that is no number above 0."""
    check_number("timestep_shift", shift)
    if shift == 0:
        raise BadParameter("timestep_shift must be above 0", param="timestep_shift")


def check_interval(interval: tuple[float, float]) -> None:
    """Raises BadParameter for a ``cfg_interval`` that is not two times, the lower first."""
    if not isinstance(interval, tuple) or len(interval) != 2:
        raise BadParameter(f"cfg_interval must be two times, not {interval!r}", param="cfg_interval")
    for time in interval:
        check_number("cfg_interval", time)
    if interval[0] > interval[1]:
        raise BadParameter(f"cfg_interval is {interval}; it must be two times, the lower first", param="cfg_interval")


def check_think(think: bool) -> None:
    if not isinstance(think, bool):
        raise BadParameter(f"think must be True or False, not {think!r}", param="think")


def check_text(name: str, text: str) -> str:
    """Raises BadParameter for what is no text, also for half of a UTF-16 pair: no tokenizer takes it."""
    if not isinstance(text, str):
        raise BadParameter(f"{name} must be text, not {text!r}", param=name)
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise BadParameter(f"{name} has a character that is no Unicode, half of a UTF-16 pair", param=name)
    return text


def as_prompts(prompt: str | Sequence[str]) -> tuple[str, ...]:
    """A text alone becomes a tuple of it; what is neither text nor list is left to be refused as a prompt."""
    return tuple(prompt) if isinstance(prompt, Sequence) and not isinstance(prompt, str) else (prompt,)


def as_images(images: Sequence[ImageInput]) -> tuple[ImageInput, ...]:
    """Raises BadParameter for what is no list, such as a single picture."""
    if not isinstance(images, Sequence) or isinstance(images, str | bytes):
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
