"""Requests for Qwen-Image 2.1."""

import threading
from typing import Any

from torch import Tensor

from underpaint.errors import BadParameter
from underpaint.generation.job import Job, Order, draw_noise
from underpaint.images import check_finite, to_picture
from underpaint.layout import Grid
from underpaint.models.qwen_image21 import Condition
from underpaint.models.qwen_image21.model import MAX_REFERENCES, MAX_SIDE, SIZE_MULTIPLE
from underpaint.request import PaintRequest, check_side
from underpaint.sampling.guidance import Branch, PlainGuidance
from underpaint.sampling.schedule import EulerSampler
from underpaint.service import Service
from underpaint.studio.base import Limits, Plan, given_latents, read_references, refuse, target_size

LIMITS = Limits(SIZE_MULTIPLE, MAX_SIDE, MAX_REFERENCES)
OTHERS = (
    "guidance_scale", "image_guidance_scale", "cfg_norm", "cfg_interval", "timestep_shift", "think", "max_think_tokens",
)  # fmt: skip


class QwenStudio:
    """Encoder and VAE are used by one thread at a time; the engines by others meanwhile."""

    def __init__(self, service: Service) -> None:
        self._model = service.qwen
        self._config = service.config
        self._encoding = threading.Lock()

    def plan(self, request: PaintRequest) -> Plan:
        refuse(request, OTHERS, "Qwen-Image 2.1, which has true_cfg_scale and negative_prompt")
        if request.guided and request.negative_prompt is None:
            raise BadParameter(
                f"true_cfg_scale {request.true_cfg_scale} needs a negative_prompt to guide away from; it may be empty",
                param="negative_prompt",
            )
        if request.negative_prompt is not None and request.true_cfg_scale is None:
            message = "negative_prompt has no effect without true_cfg_scale; to guide away from it, give one above 1"
            raise BadParameter(message, param="negative_prompt")
        defaults = self._model.checkpoint.defaults
        check_side("reference_resolution", self._resolution(request), SIZE_MULTIPLE, MAX_SIDE)
        for prompt in (*request.prompts, request.negative_prompt or ""):
            self._model.encoder.tokenizer.texts(prompt, len(request.images))
        references = read_references(request, LIMITS)
        for i, image in enumerate(references):
            self._model.reference_size(image, self._resolution(request), f"image {i + 1}")
        grid = self._model.image_codec.grid(*target_size(request, references, self._resolution(request), LIMITS))
        sigmas = request.sigmas
        if sigmas is None and request.num_steps is None:
            sigmas = self._model.checkpoint.sample_sigmas
        num_steps = request.num_steps or defaults.num_inference_steps
        schedule = self._model.schedule_rule.schedule(grid[0] * grid[1], num_steps, sigmas)
        sampler = EulerSampler(schedule, PlainGuidance(request.cfg_scale))
        return Plan(references, grid, sampler, tuple(self._noise(request, grid)))

    def order(self, request: PaintRequest, plan: Plan) -> Order:
        """The pictures of a prompt read the same prefix."""
        with self._encoding:
            conditions = self._conditions(request, plan)
        index = {prompt: i for i, prompt in enumerate(conditions)}
        negative: dict[Branch, int] = {}
        if request.guided and request.negative_prompt is not None:
            negative = {Branch.UNCONDITIONAL: index[request.negative_prompt]}
        prompts = [prompt for prompt in request.prompts for _ in range(request.num_images)]
        jobs = [
            Job(noise, plan.grid, plan.sampler, {Branch.CONDITIONAL: index[prompt], **negative})
            for noise, prompt in zip(plan.noise, prompts, strict=True)
        ]
        return Order(tuple(conditions.values()), tuple(jobs))

    def output(self, request: PaintRequest, job: Job) -> Any:
        if request.output_type == "latent":
            return check_finite(job.state)
        with self._encoding:
            pixels = check_finite(self._model.image_codec.decode(job.state, job.grid))
        return pixels if request.output_type == "pt" else to_picture(pixels)

    def _resolution(self, request: PaintRequest) -> int:
        if request.reference_resolution is not None:
            return request.reference_resolution
        return self._model.checkpoint.defaults.reference_resolution

    def _conditions(self, request: PaintRequest, plan: Plan) -> dict[str, Condition]:
        """The prefix of every different prompt, the negative one included if it is needed."""
        references = [self._model.reference(image, self._resolution(request)) for image in plan.references]
        prompts = list(request.prompts)
        if request.guided and request.negative_prompt is not None:
            prompts.append(request.negative_prompt)
        return {prompt: self._model.condition(prompt, references) for prompt in dict.fromkeys(prompts)}

    def _noise(self, request: PaintRequest, grid: Grid) -> list[Tensor]:
        num_channels, dtype, device = (
            self._model.image_codec.num_channels,
            self._config.torch_dtype,
            self._config.device,
        )
        if request.latents is not None:
            return given_latents(request, (grid[0] * grid[1], num_channels), dtype, device)
        return [draw_noise(seed, num_channels, grid, dtype).to(device) for seed in request.seeds]
