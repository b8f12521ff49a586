"""The work of a painting: from a checked body to pictures, with previews on the way. Runs in a thread of the desk."""

import secrets
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace

from PIL import Image
from torch import Tensor

from underpaint.errors import BadParameter, BadSize
from underpaint.generation.job import Job, Order
from underpaint.models.neo_unify import NeoUnify
from underpaint.request import PaintRequest
from underpaint.sampling.guidance import Branch
from underpaint.server.config import ServerConfig
from underpaint.server.desk import Task
from underpaint.server.faults import UnknownModel
from underpaint.server.media import Output, Sent, send
from underpaint.server.schema import PaintBody
from underpaint.service import Service
from underpaint.studio import NeoStudio, QwenStudio, Studio
from underpaint.studio.base import Limits
from underpaint.studio.neo_unify import LIMITS as NEO_LIMITS
from underpaint.studio.qwen_image21 import LIMITS as QWEN_LIMITS


class Atelier:
    """What the server can paint with: the family of the model, and a studio for every request."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.talks = service.understanding is not None
        neo = isinstance(service.model, NeoUnify)
        self.has_alpha = not neo
        self.limits: Limits = NEO_LIMITS if neo else QWEN_LIMITS
        self.own_parameters: tuple[str, ...] = (
            ("guidance_scale", "image_guidance_scale", "think") if neo else ("true_cfg_scale", "negative_prompt")
        )
        # One for all: it holds the lock under which encoder and VAE are used.
        self._shared = None if neo else QwenStudio(service)

    def studio(self, task: Task) -> Studio:
        """For one request. A studio that lets the model think does so in the name of the request."""
        return self._shared or NeoStudio(task.engines)


@dataclass(frozen=True)
class Usage:
    """Tokens read (once for all pictures of a request) and painted."""

    text_tokens: int
    image_tokens: int
    output_tokens: int

    def as_json(self) -> dict[str, object]:
        read = self.text_tokens + self.image_tokens
        return {
            "input_tokens": read,
            "input_tokens_details": {"text_tokens": self.text_tokens, "image_tokens": self.image_tokens},
            "output_tokens": self.output_tokens,
            "total_tokens": read + self.output_tokens,
        }


@dataclass(frozen=True)
class Begun:
    """The request is legal, and its work begins. Nothing was sent before, so a refusal still has its own status."""


@dataclass(frozen=True)
class Preview:
    """``number`` counts the previews of picture ``index`` from 0."""

    index: int
    number: int
    picture: Sent


@dataclass(frozen=True)
class Painted:
    """A finished picture. The usage of the first one counts what was read for all."""

    index: int
    seed: int
    picture: Sent
    usage: Usage


@dataclass(frozen=True)
class Painting:
    """What to paint, how to send it, and how many previews each picture has."""

    request: PaintRequest
    output: Output
    num_previews: int

    def __call__(self, task: Task, atelier: Atelier) -> list[Painted]:
        """Paint. Raises BadRequest before any work; ``Begun`` tells that there was no reason to."""
        studio, request = atelier.studio(task), self.request
        with task.timed("plan"):
            plan = studio.plan(request)
        task.emit(Begun())
        with task.timed("encode"):
            order = studio.order(request, plan)
        previews = Previews(self, studio, order)
        task.engines.submit_order(order)
        with closing(task.engines.finish_order(order)) as turns, task.timed("denoise"):
            for _ in turns:
                task.progress(order.step, order.num_steps)
                previews.look(task)
        assert order.prefilled is not None
        task.metrics.stage_seconds.labels("prefill").observe(order.prefilled - order.submitted)
        return [self._finish(task, studio, order, index) for index in range(len(order.jobs))]

    def _finish(self, task: Task, studio: Studio, order: Order, index: int) -> Painted:
        with task.timed("decode"):
            image = studio.output(self.request, order.jobs[index])
        with task.timed("image_encode"):
            picture = send(image, self.output)
        painted = Painted(index, self.request.seeds[index], picture, usage_of(order, index))
        task.metrics.pictures.inc()
        task.emit(painted)
        return painted


@dataclass(eq=False)
class Previews:
    """Shows the pictures of an order while they are painted: not the noisy state, but where it is heading.

    The flow is nearly straight, so two states of a picture, extended to the last noise level, give an estimate of it.
    """

    painting: Painting
    studio: Studio
    order: Order
    _seen: dict[int, tuple[int, Tensor]] = field(default_factory=dict)
    _shown: dict[int, int] = field(default_factory=dict)

    def look(self, task: Task) -> None:
        """Between turns: show what is due."""
        if not self.painting.num_previews or self.order.ended:
            return
        for index, job in enumerate(self.order.jobs):
            step, state = job.step, job.state
            last = self._seen.get(index)
            if last is not None and last[0] < step < job.sampler.num_steps and self._due(index, step, job):
                self._show(task, index, replace(job, state=estimate(job, last, (step, state))))
            if last is None or last[0] < step:
                self._seen[index] = (step, state)

    def _due(self, index: int, step: int, job: Job) -> bool:
        """Previews stand evenly between the first and the last step."""
        parts = self.painting.num_previews + 1
        return step * parts >= (self._shown.get(index, 0) + 1) * job.sampler.num_steps

    def _show(self, task: Task, index: int, job: Job) -> None:
        with task.timed("preview"):
            picture = send(self.studio.output(self.painting.request, job), self.painting.output)
        number = self._shown.get(index, 0)
        self._shown[index] = number + 1
        task.emit(Preview(index, number, picture))
        task.stage = "denoise"


def estimate(job: Job, before: tuple[int, Tensor], now: tuple[int, Tensor]) -> Tensor:
    """The state at the last noise level, on the line through two earlier ones; (tokens, channels)."""
    level = job.sampler.level
    start, here, end = level(before[0]), level(now[0]), level(job.sampler.num_steps)
    return now[1] + float((end - here) / (here - start)) * (now[1] - before[1])


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
    body: PaintBody, images: tuple[Image.Image, ...], atelier: Atelier, config: ServerConfig, streams: bool
) -> Painting:
    """A body as a painting, checked as far as needs no model. ``streams``: previews can be delivered.
    Raises BadRequest."""
    check_model(body.model, config)
    if body.response_format == "url":
        raise BadParameter("pictures are not kept; response_format can be b64_json", param="response_format")
    num_previews = body.partial_images or 0
    if num_previews and not streams:
        raise BadParameter("partial_images needs stream", param="partial_images")
    check_steps(body.num_inference_steps, "num_inference_steps", config)
    output = Output(body.output_format or "png", body.output_compression, body.background or "auto")
    output.check(atelier.has_alpha)
    width, height = legal_size(body.size or "auto", atelier.limits, config)
    check_pixels((body.reference_resolution or 1) ** 2, "reference_resolution", config)
    if width is None:
        own_side = body.reference_resolution or atelier.service.model.checkpoint.defaults.reference_resolution
        check_pixels(own_side**2, "size", config)
    request = PaintRequest(
        prompts=(body.prompt,),
        images=images,
        negative_prompt=body.negative_prompt,
        true_cfg_scale=body.true_cfg_scale,
        width=width,
        height=height,
        num_steps=body.num_inference_steps,
        sigmas=None,
        seed=secrets.randbits(32) if body.seed is None else body.seed,
        num_images=body.n or 1,
        latents=None,
        output_type="pil",
        reference_resolution=body.reference_resolution,
        guidance_scale=body.guidance_scale,
        image_guidance_scale=body.image_guidance_scale,
        cfg_norm=body.cfg_norm,
        timestep_shift=body.timestep_shift,
        think=body.think,
        max_think_tokens=body.max_think_tokens,
    )
    return Painting(request, output, num_previews)


def check_model(name: str | None, config: ServerConfig) -> None:
    """Raises UnknownModel."""
    if name is not None and name != config.model_id:
        raise UnknownModel(f"there is no model {name!r} here, only {config.model_id!r}", param="model")


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
