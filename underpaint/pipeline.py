"""The Python API: one object that paints and edits."""

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from underpaint.attention import BACKENDS
from underpaint.config import EngineConfig, cache_bytes, resolve
from underpaint.errors import BadConfig, BadParameter
from underpaint.generation.engine import GenerationEngine
from underpaint.generation.job import Job, Order, draw_noise
from underpaint.generation.prefix import PrefixCache
from underpaint.generation.runner import Runner
from underpaint.images import ImageInput, fit_to_area, read_image, to_picture
from underpaint.kv.codec import CODECS
from underpaint.kv.pool import PagePool
from underpaint.kv.tree import PrefixTree
from underpaint.layout import Grid
from underpaint.models import registry
from underpaint.models.loading import locate
from underpaint.models.qwen_image21 import Condition, QwenImage21
from underpaint.models.qwen_image21.model import MAX_REFERENCES, MAX_SIDE, SIZE_MULTIPLE
from underpaint.request import OutputType, PaintRequest, as_images, as_prompts, check_side
from underpaint.sampling.guidance import Branch, PlainGuidance
from underpaint.sampling.schedule import EulerSampler, Schedule, check_sigmas


@dataclass(frozen=True)
class Stats:
    """What a call did. ``rows_prefilled`` and ``rows_reused`` count prefix rows computed and found in the cache;
    ``kv_bytes`` is what the prefixes held in pages; ``seconds`` is by stage."""

    num_steps: int
    num_branches: int
    rows_prefilled: int
    rows_reused: int
    kv_bytes: int
    seconds: dict[str, float]


@dataclass(frozen=True)
class Painting:
    """``images``: PIL RGBA pictures, or (4, height, width) float tensors in [0, 1] (``pt``), or the final packed
    latents (tokens, channels) (``latent``). ``seeds``: the seed of each."""

    images: list[Any]
    seeds: tuple[int, ...]
    stats: Stats


@dataclass(eq=False)
class Progress:
    """Handed to the callback after every step. ``latents``: one (tokens, channels) tensor a picture, to read only."""

    step: int
    num_steps: int
    latents: list[Tensor]
    cancelled: bool = field(default=False, init=False)

    def cancel(self) -> None:
        """Stop before the next step; the call raises Cancelled and its memory is given back."""
        self.cancelled = True


Callback = Callable[[Progress], None]


@dataclass(frozen=True, eq=False)
class Plan:
    """A request with everything settled that the checkpoint decides. ``noise``: (tokens, channels) a picture."""

    references: tuple[Image.Image, ...]
    resolution: int
    grid: Grid
    schedule: Schedule
    noise: list[Tensor]


class Pipeline:
    """A loaded model with its prefix cache, which lives as long as the object.

    Calls from several threads are painted together, step by step.
    """

    def __init__(self, model: QwenImage21, config: EngineConfig) -> None:
        """``config`` is resolved. Use ``from_pretrained``."""
        self.model = model
        self.config = config
        budget = cache_bytes(config)
        page_rows = model.checkpoint.defaults.page_rows
        self.pool = PagePool(model.cache_shape, CODECS[config.kv_codec], budget, config.device, page_rows)
        self.runner = Runner(model, self.pool, BACKENDS[config.attention_backend], config.device)
        self.tree = PrefixTree(self.pool)
        self.prefixes = PrefixCache(self.tree, self.runner)
        self.engine = GenerationEngine(self.prefixes, self.runner, config.max_batch_rows)
        self._encoding = threading.Lock()
        self._turning = threading.Lock()

    @classmethod
    def from_pretrained(cls, path: str | Path, **options: Any) -> "Pipeline":
        """Load a checkpoint directory or a Hugging Face id; ``options`` are the fields of ``EngineConfig``.

        ``dtype`` may also be a torch.dtype. Raises CheckpointError or BadConfig.
        """
        known = {f.name for f in fields(EngineConfig)}
        if unknown := options.keys() - known:
            raise BadConfig(f"unknown options: {', '.join(sorted(unknown))}; known are {', '.join(sorted(known))}")
        if isinstance(options.get("dtype"), torch.dtype):
            options["dtype"] = str(options["dtype"]).removeprefix("torch.")
        config = resolve(EngineConfig(**options))
        return cls(registry.load(locate(path), config), config)

    def __call__(
        self,
        prompt: str | Sequence[str],
        images: Sequence[ImageInput] = (),
        *,
        negative_prompt: str | None = None,
        true_cfg_scale: float = 1.0,
        width: int | None = None,
        height: int | None = None,
        num_inference_steps: int | None = None,
        sigmas: Sequence[float] | None = None,
        seed: int | None = None,
        num_images: int = 1,
        latents: Tensor | None = None,
        output_type: OutputType = "pil",
        reference_resolution: int | None = None,
        callback: Callback | None = None,
        progress: bool | None = None,
    ) -> Painting:
        """Paint ``num_images`` pictures for each prompt, or edit ``images`` (references, in the order of the prompt).

        ``reference_resolution``: the side whose square is the area that references are resized to, and the size that
        is painted when ``width`` and ``height`` are not given (in the last reference's ratio). ``true_cfg_scale``
        above 1 guides away from ``negative_prompt``; at most 1 is no guidance, as in diffusers. ``sigmas``, or else
        the checkpoint's own ``sample_sigmas`` when no ``num_inference_steps`` is given, are the noise levels.
        ``latents``: noise to start from, (tokens, channels) or one of these a picture. ``progress``: show a bar;
        None shows it on a terminal.

        Raises BadRequest and its kin before any work, Cancelled if the callback cancels. Whatever is raised, by the
        callback too, no page stays taken.
        """
        request = PaintRequest(
            prompts=as_prompts(prompt),
            images=as_images(images),
            negative_prompt=negative_prompt,
            true_cfg_scale=true_cfg_scale,
            width=width,
            height=height,
            num_steps=num_inference_steps,
            sigmas=None if sigmas is None else check_sigmas(sigmas),
            seed=secrets.randbits(32) if seed is None else seed,
            num_images=num_images,
            latents=latents,
            output_type=output_type,
            reference_resolution=reference_resolution,
        )
        return self._paint(request, self._plan(request), callback or _ignore, progress)

    def _plan(self, request: PaintRequest) -> Plan:
        """Settle what the checkpoint decides, and check what needs the model. Nothing is encoded yet."""
        checkpoint = self.model.checkpoint
        resolution = request.reference_resolution
        if resolution is None:
            resolution = checkpoint.defaults.reference_resolution
        check_side("reference_resolution", resolution, SIZE_MULTIPLE, MAX_SIDE)
        if len(request.images) > MAX_REFERENCES:
            message = f"{len(request.images)} references are given, the limit is {MAX_REFERENCES}"
            raise BadParameter(message, param="images")
        for name, side in (("width", request.width), ("height", request.height)):
            if side is not None:
                check_side(name, side, SIZE_MULTIPLE, MAX_SIDE)
        for prompt in (*request.prompts, request.negative_prompt or ""):
            self.model.encoder.tokenizer.texts(prompt, len(request.images))
        references = tuple(read_image(image, f"image {i + 1}") for i, image in enumerate(request.images))
        ratio = references[-1].size if references else (1, 1)
        own_width, own_height = fit_to_area(*ratio, resolution, SIZE_MULTIPLE)
        width = check_side("width", request.width or own_width, SIZE_MULTIPLE, MAX_SIDE)
        height = check_side("height", request.height or own_height, SIZE_MULTIPLE, MAX_SIDE)
        grid = self.model.image_codec.grid(width, height)
        sigmas = request.sigmas
        if sigmas is None and request.num_steps is None:
            sigmas = checkpoint.sample_sigmas
        num_steps = request.num_steps or checkpoint.defaults.num_inference_steps
        schedule = self.model.schedule_rule.schedule(grid[0] * grid[1], num_steps, sigmas)
        return Plan(references, resolution, grid, schedule, self._noise(request, grid))

    def _noise(self, request: PaintRequest, grid: Grid) -> list[Tensor]:
        num_channels, dtype = self.model.image_codec.num_channels, self.config.torch_dtype
        if request.latents is None:
            drawn = (draw_noise(seed, num_channels, grid, dtype) for seed in request.seeds)
            return [noise.to(self.config.device) for noise in drawn]
        one = (grid[0] * grid[1], num_channels)
        given = request.latents[None] if request.latents.ndim == 2 else request.latents
        if tuple(given.shape) != (request.num_pictures, *one):
            raise BadParameter(
                f"latents has shape {tuple(request.latents.shape)}; {request.num_pictures} x {one} is needed",
                param="latents",
            )
        return list(given.to(self.config.device, dtype))

    def _paint(self, request: PaintRequest, plan: Plan, callback: Callback, progress: bool | None) -> Painting:
        clock = Clock(self.config.device)
        with self._encoding, clock.stage("encode"):
            conditions = self._conditions(request, plan)
        order = self._order(request, plan, conditions)
        with clock.stage("denoise"):
            self._finish(order, callback, progress)
        assert order.lease is not None
        assert order.prefilled is not None
        prefill = order.prefilled - order.submitted
        with self._encoding, clock.stage("decode"):
            images = [self._output(job, request.output_type) for job in order.jobs]
        seconds = {"encode": 0.0, "prefill": prefill, **clock.seconds}
        seconds["denoise"] -= prefill
        stats = Stats(
            num_steps=plan.schedule.num_steps,
            num_branches=len(order.jobs[0].conditions),
            rows_prefilled=order.lease.rows_prefilled,
            rows_reused=order.lease.num_rows - order.lease.rows_prefilled,
            kv_bytes=self.prefixes.bytes_needed(order.conditions),
            seconds=seconds,
        )
        return Painting(images, request.seeds, stats)

    def _conditions(self, request: PaintRequest, plan: Plan) -> dict[str, Condition]:
        """The prefix of every different prompt, the negative one included if it is needed."""
        references = [self.model.reference(image, plan.resolution) for image in plan.references]
        prompts = list(request.prompts)
        if request.guided and request.negative_prompt is not None:
            prompts.append(request.negative_prompt)
        return {prompt: self.model.condition(prompt, references) for prompt in dict.fromkeys(prompts)}

    def _order(self, request: PaintRequest, plan: Plan, conditions: dict[str, Condition]) -> Order:
        """One job a picture; the pictures of a prompt read the same prefix."""
        index = {prompt: i for i, prompt in enumerate(conditions)}
        negative: dict[Branch, int] = {}
        if request.guided and request.negative_prompt is not None:
            negative = {Branch.UNCONDITIONAL: index[request.negative_prompt]}
        sampler = EulerSampler(plan.schedule, PlainGuidance(request.true_cfg_scale))
        prompts = [prompt for prompt in request.prompts for _ in range(request.num_images)]
        jobs = [
            Job(noise, plan.grid, sampler, {Branch.CONDITIONAL: index[prompt], **negative})
            for noise, prompt in zip(plan.noise, prompts, strict=True)
        ]
        return Order(tuple(conditions.values()), tuple(jobs))

    def _finish(self, order: Order, callback: Callback, progress: bool | None) -> None:
        """Drive the engine until an order ends; other threads' orders advance with it. Raises its error."""
        hidden = None if progress is None else not progress
        reported = 0
        with self._turning:
            self.engine.submit(order)
        try:
            with tqdm(total=order.num_steps, desc="painting", disable=hidden, leave=False) as bar:
                while not order.ended:
                    with self._turning:
                        if not order.ended:
                            self.engine.turn()
                    if order.error is None and order.step > reported:
                        reported = order.step
                        bar.update(order.step - bar.n)
                        report = Progress(order.step, order.num_steps, [job.state for job in order.jobs])
                        callback(report)
                        if report.cancelled:
                            order.cancel()
        finally:
            with self._turning:
                self.engine.drop(order)
        if order.error is not None:
            raise order.error

    def _output(self, job: Job, output_type: OutputType) -> Any:
        if output_type == "latent":
            return job.state
        pixels = self.model.image_codec.decode(job.state, job.grid)
        return pixels if output_type == "pt" else to_picture(pixels)


def _ignore(_: Progress) -> None:
    pass


class Clock:
    """Wall seconds by stage; waits for the device at the end of each."""

    def __init__(self, device: str) -> None:
        self.seconds: dict[str, float] = {}
        self._device = torch.device(device)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.seconds[name] = time.perf_counter() - start
