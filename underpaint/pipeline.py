"""The Python API: one object that paints and edits."""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from underpaint.config import EngineConfig, resolve
from underpaint.devices import numbered, wait_for
from underpaint.errors import BadConfig
from underpaint.generation.job import Order
from underpaint.images import ImageInput
from underpaint.models import registry
from underpaint.models.loading import locate
from underpaint.request import OutputType, PaintRequest, as_images, as_prompts
from underpaint.sampling.schedule import check_sigmas
from underpaint.service import Service
from underpaint.studio import make_studio


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


class Pipeline:
    """A loaded model with its prefix cache, which lives as long as the object.

    Calls from several threads are painted together, step by step.
    """

    def __init__(self, service: Service) -> None:
        """Use ``from_pretrained``, or share a service with a ``Chat``."""
        self.service = service
        self._studio = make_studio(service)

    @classmethod
    def from_pretrained(cls, path: str | Path, **options: Any) -> "Pipeline":
        """Load a checkpoint directory or a Hugging Face id; ``options`` are the fields of ``EngineConfig``.

        ``dtype`` may also be a torch.dtype. Raises CheckpointError or BadConfig.
        """
        return cls(load_service(path, options))

    def __call__(
        self,
        prompt: str | Sequence[str],
        images: Sequence[ImageInput] = (),
        *,
        negative_prompt: str | None = None,
        true_cfg_scale: float | None = None,
        width: int | None = None,
        height: int | None = None,
        num_inference_steps: int | None = None,
        sigmas: Sequence[float] | None = None,
        seed: int | None = None,
        num_images: int = 1,
        latents: Tensor | None = None,
        output_type: OutputType = "pil",
        reference_resolution: int | None = None,
        guidance_scale: float | None = None,
        image_guidance_scale: float | None = None,
        cfg_norm: str | None = None,
        cfg_interval: tuple[float, float] | None = None,
        timestep_shift: float | None = None,
        think: bool | None = None,
        max_think_tokens: int | None = None,
        callback: Callback | None = None,
        progress: bool | None = None,
    ) -> Painting:
        """Paint ``num_images`` pictures for each prompt, or edit ``images`` (references, in the order of the prompt).

        A parameter that the model's family does not have is refused. None leaves a choice to the checkpoint.

        Both families: ``width`` and ``height`` (by default the last reference's ratio), ``num_inference_steps``,
        ``seed`` (picture i has seed + i), ``latents`` (what to start from instead of noise, one or one a picture, in
        the shape that ``output_type="latent"`` returns), ``progress`` (show a bar; None shows it on a terminal).

        Qwen-Image 2.1: ``true_cfg_scale`` above 1 guides away from ``negative_prompt``; at most 1 is no guidance, as
        in diffusers. ``sigmas``, or else the checkpoint's own ``sample_sigmas`` when no ``num_inference_steps`` is
        given, are the noise levels. ``reference_resolution``: the side whose square is the area that references are
        resized to, and that is painted when no size is given.

        SenseNova-U1: ``guidance_scale`` and, for edits, ``image_guidance_scale``; ``cfg_norm`` none, global, channel
        or cfg_zero_star; ``cfg_interval``, the times (0 noise, 1 picture) between which it guides; ``timestep_shift``;
        ``think`` lets the model write a thought of up to ``max_think_tokens`` first.

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
            guidance_scale=guidance_scale,
            image_guidance_scale=image_guidance_scale,
            cfg_norm=cfg_norm,
            cfg_interval=cfg_interval,
            timestep_shift=timestep_shift,
            think=think,
            max_think_tokens=max_think_tokens,
        )
        return self._paint(request, callback or _ignore, progress)

    def _paint(self, request: PaintRequest, callback: Callback, progress: bool | None) -> Painting:
        plan = self._studio.plan(request)
        clock = Clock(self.service.config.device)
        with clock.stage("encode"):
            order = self._studio.order(request, plan)
        try:
            needed = self.service.prefixes.bytes_needed(order.conditions)
            with clock.stage("denoise"):
                self._finish(order, callback, progress)
        finally:
            self.service.drop_order(order)  # it may hold pages before it is submitted
        assert order.lease is not None
        assert order.prefilled is not None
        with clock.stage("decode"):
            images = [self._studio.output(request, job) for job in order.jobs]
        prefill = order.prefilled - order.submitted
        seconds = {"encode": 0.0, "prefill": prefill, **clock.seconds}
        seconds["denoise"] -= prefill
        stats = Stats(
            num_steps=order.num_steps,
            num_branches=len(order.jobs[0].conditions),
            rows_prefilled=order.lease.rows_prefilled,
            rows_reused=order.lease.num_rows - order.lease.rows_prefilled,
            kv_bytes=needed,
            seconds=seconds,
        )
        return Painting(images, request.seeds, stats)

    def _finish(self, order: Order, callback: Callback, progress: bool | None) -> None:
        """Let the engines paint an order, reporting its steps. Raises its error."""
        hidden = None if progress is None else not progress
        reported = 0
        self.service.submit_order(order)
        turns = self.service.finish_order(order)
        with tqdm(total=order.num_steps, desc="painting", disable=hidden, leave=False) as bar, closing(turns):
            for _ in turns:
                if order.error is not None or order.step == reported:
                    continue
                bar.update(order.step - reported)
                reported = order.step
                state = Progress(order.step, order.num_steps, [job.state for job in order.jobs])
                callback(state)
                if state.cancelled:
                    order.cancel()


def load_service(path: str | Path, options: dict[str, Any]) -> Service:
    """Load a checkpoint directory or a Hugging Face id. Raises CheckpointError, or BadConfig for unknown options."""
    config = resolve(engine_config(options))
    config = replace(config, device=numbered(config.device))
    return Service(registry.load(locate(path), config), config)


def engine_config(options: dict[str, Any]) -> EngineConfig:
    """The fields of ``EngineConfig`` as a user gives them. Raises BadConfig for others."""
    known = {f.name for f in fields(EngineConfig)}
    if unknown := options.keys() - known:
        raise BadConfig(f"unknown options: {', '.join(sorted(unknown))}; known are {', '.join(sorted(known))}")
    dtype = options.get("dtype", "auto")
    if isinstance(dtype, torch.dtype):
        options = {**options, "dtype": str(dtype).removeprefix("torch.")}
    lora = options.get("lora") or ()
    options = {**options, "lora": (str(lora),) if isinstance(lora, str | Path) else tuple(map(str, lora))}
    return EngineConfig(**options)


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
            wait_for(self._device)
        self.seconds[name] = time.perf_counter() - start
