"""The work of a painting: from a checked body to pictures, with previews on the way."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import Struct

from underpaint.errors import BadParameter, BadSize
from underpaint.generation.job import Job, Order
from underpaint.generation.previews import Estimate, Previews
from underpaint.models.neo_unify import Checkpoint as NeoCheckpoint
from underpaint.models.registry import Checkpoint
from underpaint.request import PaintRequest
from underpaint.sampling.guidance import Branch
from underpaint.server.config import Kind, ServerConfig
from underpaint.server.errand import Errand
from underpaint.server.faults import UnknownModel
from underpaint.server.media import Output, reopen_images, send
from underpaint.server.news import Begun, Closing, Event, Painted, Preview, Usage
from underpaint.server.schema import PaintBody
from underpaint.studio.base import Limits
from underpaint.studio.neo_unify import LIMITS as NEO_LIMITS
from underpaint.studio.qwen_image21 import LIMITS as QWEN_LIMITS

Setting = str | int | float | bool | None
NOT_SETTABLE = {"sigmas": None, "latents": None, "output_type": "pil"}
"""Fields of a ``PaintRequest`` that no client chooses."""


class Atelier:
    """What can be asked of a checkpoint, known without its weights."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        neo = isinstance(checkpoint, NeoCheckpoint)
        self.defaults = checkpoint.defaults
        self.talks = neo
        self.has_alpha = not neo
        self.limits: Limits = NEO_LIMITS if neo else QWEN_LIMITS
        self.own_parameters: tuple[str, ...] = (
            ("guidance_scale", "image_guidance_scale", "think") if neo else ("true_cfg_scale", "negative_prompt")
        )
        self.guidances: tuple[dict[str, Setting], ...] = (
            ({"guidance_scale": 1.0}, {"guidance_scale": 4.0})
            if neo
            else ({"true_cfg_scale": 1.0}, {"true_cfg_scale": 4.0, "negative_prompt": ""})
        )
        """What a body has for a painting of one branch, and of two."""


class Painting(Struct, frozen=True, tag=True):
    """What to paint, how to send it, and how many previews each picture has.

    ``settings``: the fields of a ``PaintRequest`` beside ``prompts`` and ``images``. ``files``: its references, as
    they were sent.
    """

    prompt: str
    files: tuple[bytes, ...]
    settings: dict[str, Setting]
    output: Output
    num_previews: int

    @property
    def kind(self) -> Kind:
        return "painting"

    def request(self) -> PaintRequest:
        """As the engines take it. Raises BadRequest."""
        settings: dict[str, Any] = {**NOT_SETTABLE, **self.settings}
        return PaintRequest(prompts=(self.prompt,), images=reopen_images(self.files), **settings)

    def __call__(self, errand: Errand) -> None:
        """Paint. Raises BadRequest before any work; ``Begun`` tells that there was no reason to."""
        request, studio = self.request(), errand.studio
        with errand.timed("plan"):
            plan = studio.plan(request)
        errand.emit(Begun())
        with errand.timed("encode"):
            order = studio.order(request, plan)
        previews = Previews(order, self.num_previews)
        try:
            with errand.timed("denoise"):
                errand.service.submit_order(order)
                for _ in errand.service.finish_order(order):
                    errand.progress(order.step, order.num_steps)
                    for seen in previews.take():
                        self._show(errand, request, replace(order.jobs[seen.index], state=seen.state), seen)
        finally:
            errand.service.drop_order(order)  # it may hold pages before it is submitted
        assert order.prefilled is not None
        errand.took("prefill", order.prefilled - order.submitted)
        for index, job in enumerate(order.jobs):
            with errand.timed("decode"):
                image = studio.output(request, job)
            with errand.timed("image_encode"):
                picture = send(image, self.output)
            errand.emit(Painted(index, request.seeds[index], picture, usage_of(order, index)))

    def _show(self, errand: Errand, request: PaintRequest, job: Job, seen: Estimate) -> None:
        with errand.timed("preview"):
            picture = send(errand.studio.output(request, job), self.output)
        errand.emit(Preview(seen.index, seen.number, picture))

    def result(self, events: Sequence[Event], _: Closing | None) -> list[Painted]:
        """The finished pictures."""
        return [event for event in events if isinstance(event, Painted)]


def usage_of(order: Order, index: int) -> Usage:
    job = order.jobs[index]
    if index:
        return Usage(0, 0, len(job.state))
    layout = order.conditions[job.conditions[Branch.CONDITIONAL]].layout
    rows = {"text": 0, "image": 0}
    for segment in layout.segments:
        rows[segment.kind] += segment.stop - segment.start
    return Usage(rows["text"], rows["image"], len(job.state))


def total(painted: list[Painted]) -> Usage:
    return Usage(
        sum(one.usage.text_tokens for one in painted),
        sum(one.usage.image_tokens for one in painted),
        sum(one.usage.output_tokens for one in painted),
    )


PARAM_NAMES: Mapping[str, str] = {"num_images": "n", "width": "size", "height": "size"}
"""What the engines call a parameter -> what clients call it."""


def read_body(
    body: PaintBody, files: tuple[bytes, ...], atelier: Atelier, config: ServerConfig, streams: bool
) -> Painting:
    """A body as a painting, checked as far as needs no model. ``files``: its references, whose headers were read.
    ``streams``: previews can be delivered. Raises BadRequest."""
    check_model(body.model, config)
    if body.response_format == "url":
        raise BadParameter("pictures are not kept; response_format can be b64_json", param="response_format")
    num_previews = check_previews(body.partial_images, "partial_images", streams)
    check_steps(body.num_inference_steps, "num_inference_steps", config)
    output = Output(body.output_format or "png", body.output_compression, body.background or "auto")
    output.check(atelier.has_alpha)
    width, height = legal_size(body.size or "auto", atelier.limits, config)
    check_pixels((body.reference_resolution or 1) ** 2, "reference_resolution", config)
    if width is None:
        own_side = body.reference_resolution or atelier.defaults.reference_resolution
        check_pixels(own_side**2, "size", config)
    settings: dict[str, Setting] = {
        "negative_prompt": body.negative_prompt,
        "true_cfg_scale": body.true_cfg_scale,
        "width": width,
        "height": height,
        "num_steps": body.num_inference_steps,
        "seed": secrets.randbits(32) if body.seed is None else body.seed,
        "num_images": body.n or 1,
        "reference_resolution": body.reference_resolution,
        "guidance_scale": body.guidance_scale,
        "image_guidance_scale": body.image_guidance_scale,
        "cfg_norm": body.cfg_norm,
        "timestep_shift": body.timestep_shift,
        "think": body.think,
        "max_think_tokens": body.max_think_tokens,
    }
    painting = Painting(body.prompt, files, settings, output, num_previews)
    painting.request()  # for what it refuses
    return painting


def check_model(name: str | None, config: ServerConfig) -> None:
    """Raises UnknownModel."""
    if name is not None and name != config.model_id:
        raise UnknownModel(f"there is no model {name!r} here, only {config.model_id!r}", param="model")


def check_previews(num_previews: int | None, param: str, streams: bool) -> int:
    """How many previews a picture has. Raises BadParameter if there is no stream to send them in."""
    if num_previews and not streams:
        raise BadParameter("partial_images needs stream", param=param)
    return num_previews or 0


def check_steps(num_steps: int | None, param: str, config: ServerConfig) -> None:
    """Raises BadParameter."""
    if (num_steps or 1) > config.max_steps:
        raise BadParameter(f"{param} is {num_steps}, the limit of this server is {config.max_steps}", param=param)


def check_pixels(num_pixels: int, param: str, config: ServerConfig) -> None:
    """Raises BadSize for a picture larger than this server paints."""
    if num_pixels > config.max_output_pixels:
        limit = config.max_output_pixels
        raise BadSize(f"{param}: {num_pixels} pixels are too many, the limit of this server is {limit}", param=param)


def legal_size(text: str, limits: Limits, config: ServerConfig) -> tuple[int | None, int | None]:
    """Width and height, None for auto. Raises BadSize, naming the nearest sizes that can be painted."""
    if text == "auto":
        return None, None
    sides = text.lower().split("x")
    if len(sides) != 2 or not all(side.isascii() and side.isdecimal() for side in sides):
        raise BadSize(f"size {text!r} must be WIDTHxHEIGHT, for example 1024x768, or auto", param="size")
    width, height = (int(side) for side in sides)
    down, up = (tuple(_round(side, limits, up) for side in (width, height)) for up in (False, True))
    if (width, height) != down:
        if config.round_sizes and width >= down[0] and height >= down[1]:
            width, height = down
        else:
            nearest = " or ".join(dict.fromkeys(f"{w}x{h}" for w, h in (down, up)))
            raise BadSize(
                f"size {width}x{height} cannot be painted: sides must be multiples of {limits.side_multiple} up to "
                f"{limits.max_side}; the nearest is {nearest}",
                param="size",
            )
    check_pixels(width * height, "size", config)
    return width, height


def _round(side: int, limits: Limits, up: bool) -> int:
    multiple = limits.side_multiple
    rounded = (side + (multiple - 1 if up else 0)) // multiple * multiple
    return min(max(rounded, multiple), limits.max_side // multiple * multiple)
