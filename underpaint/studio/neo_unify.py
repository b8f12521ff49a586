"""Requests for SenseNova-U1 and U1.5."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from underpaint.generation.job import Job, Order
from underpaint.generation.prefix import Borrowed
from underpaint.images import check_finite, to_picture
from underpaint.layout import Grid
from underpaint.models.neo_unify import EditGuidance, FlowSampler, PaintGuidance, Passage, Picture
from underpaint.models.neo_unify.config import CELL, CELL_VALUES, MAX_SIDE
from underpaint.models.neo_unify.flow import DEFAULT_TIMESTEP_SHIFT, draw_noise, flow_times, noise_scale
from underpaint.models.neo_unify.prompt import AFTER_THOUGHT, painting_branches
from underpaint.models.neo_unify.vision import read_picture, reference_bounds, to_cells, to_pixels
from underpaint.request import PaintRequest
from underpaint.sampling.guidance import Branch
from underpaint.service import Service, finish
from underpaint.studio.base import Limits, Plan, given_latents, read_references, refuse, target_size
from underpaint.understanding.reply import Reply
from underpaint.understanding.sampler import SamplingOptions, TokenSampler

LIMITS = Limits(CELL, MAX_SIDE, max_references=10)
OTHERS = ("negative_prompt", "true_cfg_scale", "sigmas", "reference_resolution")
DEFAULT_IMAGE_GUIDANCE_SCALE = 1.0
DEFAULT_THINK_TOKENS = 1024


class NeoStudio:
    """The understanding engine reads the branches, and writes a thought first if there is to be one."""

    def __init__(self, service: Service) -> None:
        self._model = service.neo
        self._service = service

    def plan(self, request: PaintRequest) -> Plan:
        refuse(request, OTHERS, "SenseNova-U1, which has guidance_scale and image_guidance_scale")
        references = read_references(request, LIMITS)
        defaults = self._model.checkpoint.defaults
        width, height = target_size(request, references, defaults.reference_resolution, LIMITS)
        grid = height // CELL, width // CELL
        sampler = self.sampler(request, len(references), request.num_steps or defaults.num_inference_steps)
        for prompt in request.prompts:  # refuses a long one; pictures count as nothing here
            painting_branches(self._model.tokenizer, prompt, [_nothing()] * len(references))
        return Plan(references, grid, sampler, tuple(self._noise(request, grid)))

    def sampler(self, request: PaintRequest, num_references: int, num_steps: int) -> FlowSampler:
        """The course of a painting or, with references, of an edit. Raises BadParameter."""
        own = self._model.checkpoint.defaults.guidance_scale
        scale = own if request.guidance_scale is None else request.guidance_scale
        norm, interval = request.cfg_norm or "none", request.cfg_interval or (0.0, 1.0)
        guidance: PaintGuidance | EditGuidance
        if num_references:
            of_pictures = request.image_guidance_scale
            of_pictures = DEFAULT_IMAGE_GUIDANCE_SCALE if of_pictures is None else of_pictures
            guidance = EditGuidance(scale, of_pictures, norm, interval)  # type: ignore[arg-type]
        else:
            if request.image_guidance_scale is not None:
                refuse(request, ("image_guidance_scale",), "a painting without references")
            guidance = PaintGuidance(scale, norm, interval)  # type: ignore[arg-type]
        shift = DEFAULT_TIMESTEP_SHIFT if request.timestep_shift is None else request.timestep_shift
        return FlowSampler(flow_times(num_steps, shift), guidance)

    def order(self, request: PaintRequest, plan: Plan) -> Order:
        """The pictures of a prompt read the same prefixes; only branches that some step needs are read, and they are
        in pages when this returns."""
        bounds = reference_bounds(len(plan.references))
        pictures = [read_picture(image, bounds) for image in plan.references]
        replies: list[Reply] = []
        jobs = []
        noise = iter(plan.noise)
        shared: dict[Branch, int] = {}
        born = time.monotonic()
        for prompt in request.prompts:
            passages = painting_branches(self._model.tokenizer, prompt, pictures, think=bool(request.think))
            if request.think:
                passages[Branch.CONDITIONAL] = self._think(request, passages[Branch.CONDITIONAL])
            of_branch: dict[Branch, int] = {}
            for branch in plan.sampler.every_branch:
                if branch not in shared or branch is Branch.CONDITIONAL:
                    shared[branch] = len(replies)
                    replies.append(Reply(passages[branch], born=born))
                of_branch[branch] = shared[branch]
            jobs += [Job(next(noise), plan.grid, plan.sampler, of_branch) for _ in range(request.num_images)]
        conditions = tuple(self._model.condition(reply.passage) for reply in replies)
        return Order(conditions, tuple(jobs), lease=self._read(replies))

    def _read(self, replies: list[Reply]) -> Borrowed:
        """Have the branches read, and hold their pages."""
        with ExitStack() as stack:
            for reply in replies:
                self._service.submit_reply(reply)
                stack.callback(self._service.drop_reply, reply)
            return finish(self._service.borrow(replies))

    def output(self, request: PaintRequest, job: Job) -> Any:
        """``pil`` is RGB, ``pt`` (3, height, width) in [0, 1], ``latent`` the raw pixels (3, height, width)."""
        pixels = check_finite(to_pixels(job.state, job.grid))
        if request.output_type == "latent":
            return pixels
        shown = (pixels.float() * 0.5 + 0.5).clamp(0, 1)
        return shown if request.output_type == "pt" else to_picture(shown)

    def _think(self, request: PaintRequest, passage: Passage) -> Passage:
        """Let the model think, and bring it to where the picture begins. Its pages are found in the tree later."""
        tokenizer = self._model.tokenizer
        limit = DEFAULT_THINK_TOKENS if request.max_think_tokens is None else request.max_think_tokens
        thought = Reply(
            passage,
            TokenSampler.of(SamplingOptions(max_tokens=limit), ()),
            stop_tokens=frozenset({tokenizer.turn_stop}),
            pause_tokens=frozenset({tokenizer.think_stop}),
        )
        self._service.submit_reply(thought)
        try:
            finish(self._service.rest_reply(thought))
        finally:
            self._service.drop_reply(thought)
        return thought.passage.followed_by(tokenizer.tokenize(AFTER_THOUGHT))

    def _noise(self, request: PaintRequest, grid: Grid) -> Sequence[Tensor]:
        dtype, device = self._model.dtype, self._model.device
        if request.latents is not None:
            shape = (3, grid[0] * CELL, grid[1] * CELL)
            return [to_cells(pixels) for pixels in given_latents(request, shape, dtype, device)]
        scale = noise_scale(self._model.config.flow, grid)
        generators = (torch.Generator("cpu").manual_seed(seed) for seed in request.seeds)
        return [draw_noise(generator, grid, scale, dtype).to(device) for generator in generators]


def _nothing() -> Picture:
    return Picture((1, 1), torch.empty(1, CELL_VALUES), b"")
