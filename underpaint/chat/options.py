"""How an answer is written and painted: every option is honoured, or refused with a sentence."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from underpaint.errors import BadParameter
from underpaint.models.loading import Defaults
from underpaint.models.neo_unify import CELL, MAX_SIDE, EditGuidance, FlowSampler
from underpaint.models.neo_unify.flow import DEFAULT_TIMESTEP_SHIFT, flow_times
from underpaint.request import check_count, check_int, check_shift, check_side, check_think
from underpaint.studio.neo_unify import DEFAULT_THINK_TOKENS
from underpaint.understanding.sampler import SamplingOptions

MAX_PICTURES = 10


@dataclass(frozen=True)
class PaintingOptions:
    """How the pictures of an answer are painted. ``guidance_scale`` and ``num_inference_steps``: None for the
    checkpoint's own. ``sizes``: (width, height) of each in turn, the last one for the rest; empty for the last
    picture's ratio at the checkpoint's own area. ``num_previews``: of each, fewer where it has too few steps."""

    guidance_scale: float | None = None
    image_guidance_scale: float = 1.0
    cfg_norm: str = "none"
    cfg_interval: tuple[float, float] = (0.0, 1.0)
    timestep_shift: float = DEFAULT_TIMESTEP_SHIFT
    num_inference_steps: int | None = None
    sizes: tuple[tuple[int, int], ...] = ()
    num_previews: int = 0

    def __post_init__(self) -> None:
        check_shift(self.timestep_shift)
        if self.num_inference_steps is not None:
            check_count("num_inference_steps", self.num_inference_steps)
        if check_int("num_previews", self.num_previews) < 0:
            raise BadParameter("num_previews cannot be negative", param="num_previews")
        if not isinstance(self.sizes, tuple | list) or not all(map(_is_pair, self.sizes)):
            raise BadParameter(f"sizes must be pairs of width and height, not {self.sizes!r}", param="sizes")
        for width, height in self.sizes:
            check_side("width", width, CELL, MAX_SIDE)
            check_side("height", height, CELL, MAX_SIDE)

    def sampler(self, defaults: Defaults) -> FlowSampler:
        """Raises BadParameter for scales, norms and intervals that cannot be honoured."""
        scale = defaults.guidance_scale if self.guidance_scale is None else self.guidance_scale
        guidance = EditGuidance(scale, self.image_guidance_scale, self.cfg_norm, self.cfg_interval)  # type: ignore[arg-type]
        num_steps = self.num_inference_steps or defaults.num_inference_steps
        return FlowSampler(flow_times(num_steps, self.timestep_shift), guidance)


@dataclass(frozen=True)
class AnswerOptions:
    """How an answer is made. ``think_tokens``: that a thought before it may have, 0 for none. ``seed``: of the noise of
    all pictures."""

    painting: PaintingOptions
    max_pictures: int
    think_tokens: int
    seed: int
    sampling: SamplingOptions

    @classmethod
    def of(
        cls,
        *,
        max_pictures: int = MAX_PICTURES,
        think: bool = False,
        max_think_tokens: int | None = None,
        painting: PaintingOptions | None = None,
        seed: int | None = None,
        **sampling: Any,
    ) -> "AnswerOptions":
        """From the arguments of ``Chat.send``, see there. Raises BadParameter for all that needs no model."""
        if not 0 <= check_int("max_pictures", max_pictures) <= MAX_PICTURES:
            message = f"max_pictures is {max_pictures}; it must be from 0 to {MAX_PICTURES}"
            raise BadParameter(message, param="max_pictures")
        think_tokens = _think_tokens(think, max_think_tokens)
        seed = secrets.randbits(32) if seed is None else seed
        options = _sampling_options({"seed": seed, **sampling})
        return cls(_painting_options(painting, max_pictures), max_pictures, think_tokens, seed, options)


def _painting_options(painting: PaintingOptions | None, max_pictures: int) -> PaintingOptions:
    """Raises BadParameter for what no picture would show."""
    if painting is None:
        return PaintingOptions()
    if not isinstance(painting, PaintingOptions):
        raise BadParameter(f"painting must be PaintingOptions, not {painting!r}", param="painting")
    given = [field.name for field in fields(painting) if getattr(painting, field.name) != field.default]
    if given and not max_pictures:
        message = f"{given[0]} has no effect with max_pictures 0, which asks for text only"
        raise BadParameter(message, param=given[0])
    if len(painting.sizes) > max_pictures:
        message = f"there are {len(painting.sizes)} sizes for max_pictures {max_pictures}; leave out those in excess"
        raise BadParameter(message, param="sizes")
    return painting


def _think_tokens(think: bool, limit: int | None) -> int:
    """How many tokens a thought may have, 0 for none. Raises BadParameter."""
    check_think(think)
    if limit is None:
        return DEFAULT_THINK_TOKENS if think else 0
    if check_count("max_think_tokens", limit) and not think:
        raise BadParameter("max_think_tokens has no effect without think", param="max_think_tokens")
    return limit


def _sampling_options(sampling: Mapping[str, Any]) -> SamplingOptions:
    known = {field.name for field in fields(SamplingOptions)}
    if unknown := sampling.keys() - known:
        raise BadParameter(f"unknown parameters: {', '.join(sorted(unknown))}; known are {', '.join(sorted(known))}")
    values = dict(sampling)
    if isinstance(values.get("stop"), list):
        values["stop"] = tuple(values["stop"])
    return SamplingOptions(**values)


def _is_pair(size: Any) -> bool:
    return isinstance(size, tuple | list) and len(size) == 2
