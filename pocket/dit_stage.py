"""Trains the text encoder and the transformer together by flow matching on the latents of a trained VAE."""

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage21
from torch import Tensor, nn

from pocket.build import LATENT_SIDE, TRANSFORMER_CONFIG, build_encoder, build_transformer
from pocket.checker import check
from pocket.export import NUM_INFERENCE_STEPS, SCHEDULER_CONFIG
from pocket.paint_model import TARGET_ROWS, PaintModel, TaskBatch, move_geometry, task_geometry
from pocket.pool import TOKENS, Pool, draw_pool, pool_of
from pocket.tasks import TASKS, Example, draw_example
from pocket.tokenizer import build_tokenizer
from pocket.training import CapturedStep, Clock, Trainer, cosine_rate
from pocket.vae_stage import decode, to_model
from underpaint.sampling.schedule import ScheduleRule, euler_step

COPIES = 4  # noisy targets of one prefix
TIME_SHIFT = 2.0  # odds of a noise level are multiplied by it: layout and colours are decided at high noise


@dataclass(frozen=True)
class StageOptions:
    """``pool`` and ``batch``: examples for each task, prefixes a step for each task."""

    seed: int
    pool: tuple[int, int, int]
    batch: tuple[int, int, int]
    peak_rate: float


def _batch(lines: list[Tensor], noisy: Tensor, timesteps: Tensor) -> TaskBatch:
    """Lines of a pool and noisy targets (B, K, rows, channels) in the model's dtype."""
    token_ids, lengths, references, latents, _ = lines
    dtype = noisy.dtype
    return TaskBatch(
        token_ids=token_ids.long(),
        lengths=lengths.long(),
        references=to_model(references).to(dtype),
        reference_latents=latents.to(dtype),
        noisy=noisy,
        timesteps=timesteps,
    )


class FlowLoss(nn.Module):
    """Flow matching: x = (1 - s) image + s noise, the velocity is noise - image, and the timestep is s."""

    def __init__(self, model: PaintModel, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype

    def forward(self, tasks: list[list[Tensor]]) -> Tensor:
        """`tasks`: lines of the pools. Returns the mean squared error of each task, (tasks,) fp32."""
        batches, velocities = [], []
        for lines in tasks:
            image = lines[-1].float()[:, None].expand(-1, COPIES, -1, -1)
            noise = torch.randn(image.shape, device=image.device)
            # One level from each quarter of the range for the targets of a prefix.
            quarter = torch.arange(COPIES, device=image.device)
            uniform = (quarter + torch.rand(image.shape[:2], device=image.device)) / COPIES
            sigma = TIME_SHIFT * uniform / (1 + (TIME_SHIFT - 1) * uniform)
            noisy = torch.lerp(image, noise, sigma[:, :, None, None])
            batches.append(_batch(lines, noisy.to(self.dtype), sigma))
            velocities.append(noise - image)
        errors = zip(self.model(batches), velocities, strict=True)
        return torch.stack([(predicted.float() - true).square().mean() for predicted, true in errors])


class DitStage:
    """Encoder, transformer, their trainer and the pools."""

    def __init__(self, vae: AutoencoderKLQwenImage21, device: torch.device, options: StageOptions) -> None:
        self.vae = vae
        self.device = device
        self.options = options
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.tokenizer = build_tokenizer()
        encoder = build_encoder(self.tokenizer, options.seed)
        axes = TRANSFORMER_CONFIG.axes_dims_rope
        geometries = [task_geometry(self.tokenizer, encoder, axes, n, TOKENS[n]) for n in range(len(TASKS))]
        transformer = build_transformer(options.seed)
        moved = [move_geometry(geometry, device) for geometry in geometries]
        self.model = PaintModel(encoder, transformer, moved).to(device)
        self.trainer = Trainer(self.model, decay=0.999, betas=(0.9, 0.98), weight_decay=0.01)
        self.loss = FlowLoss(self.model, self.dtype)
        self.generator = torch.Generator(device)

    def _cast(self, weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
        return {prefix + name: weight.to(self.dtype) for name, weight in weights.items()}

    def _run(self, inputs: list[Tensor]) -> Tensor:
        width = len(inputs) // len(TASKS)
        tasks = [inputs[start : start + width] for start in range(0, len(inputs), width)]
        weights = self._cast(self.trainer.parameters, "model.")
        losses = torch.func.functional_call(self.loss, weights, (tasks,))
        self.trainer.update(losses.mean())
        return losses.detach()

    def draw_pools(self, seed: int) -> list[Pool]:
        """The training examples of each task."""
        sizes = self.options.pool
        return [draw_pool(seed, "train", n, sizes[n], self.tokenizer, self.vae, self.device) for n in range(len(TASKS))]

    def train(self, pools: list[Pool], num_steps: int, stop_step: int, max_seconds: float, state: Path) -> None:
        """Go on to `stop_step` of a schedule over `num_steps`, at most `max_seconds`, and save.

        Sampling differs with the step at which a run starts, so a resumed run does not repeat itself.
        """
        clock = Clock(max_seconds)
        self.generator.manual_seed(self.options.seed + self.trainer.step)
        torch.manual_seed(self.options.seed + self.trainer.step)
        captured = CapturedStep(self._run, self.trainer.optimizer)
        recent = torch.zeros(len(TASKS), device=self.device)
        report_every, save_every = 500, 5000
        while self.trainer.step < min(stop_step, num_steps) and clock.seconds < max_seconds:
            step = self.trainer.step
            self.trainer.set_rate(cosine_rate(step, num_steps, self.options.peak_rate, warmup_steps=300))
            picked = [p.pick(n, self.generator) for p, n in zip(pools, self.options.batch, strict=True)]
            losses = captured([x for lines in picked for x in lines])
            recent += losses
            self.trainer.step += 1
            num_steps = clock.plan(step, num_steps, losses)
            if self.trainer.step % report_every == 0:
                means = " ".join(
                    f"{task} {x:.4f}" for task, x in zip(TASKS, (recent / report_every).tolist(), strict=True)
                )
                clock.say(f"dit step {self.trainer.step} loss {means} rate {float(self.trainer.rate):.1e}")
                recent.zero_()
            if self.trainer.step % save_every == 0:
                self.trainer.save(state)
                clock.say(self.report(64, self.options.seed + 1, NUM_INFERENCE_STEPS, scale=1.0))
        self.trainer.save(state)
        clock.say(f"dit stopped at step {self.trainer.step} of {num_steps}")

    @torch.no_grad()
    def _sample(
        self, lines: list[list[Tensor]], empty: list[list[Tensor]], num_steps: int, scale: float
    ) -> list[Tensor]:
        """Pictures of each task, uint8, from the averaged weights. `empty`: the same lines without a prompt."""
        weights = self._cast(self.trainer.average, "")
        sigmas = ScheduleRule(SCHEDULER_CONFIG).schedule(TARGET_ROWS, num_steps).sigmas.to(self.device)
        noise = torch.Generator(self.device).manual_seed(self.options.seed)
        latents = [
            torch.randn(task[-1].shape, device=self.device, generator=noise)[:, None].to(self.dtype) for task in lines
        ]
        for step in range(num_steps):
            velocities = self._velocities(weights, lines, latents, sigmas[step])
            if scale != 1:
                without = self._velocities(weights, empty, latents, sigmas[step])
                velocities = [w + scale * (v - w) for v, w in zip(velocities, without, strict=True)]
            latents = [
                euler_step(x, v, sigmas[step], sigmas[step + 1]) for x, v in zip(latents, velocities, strict=True)
            ]
        mean, deviation = (
            torch.tensor(x, device=self.device) for x in (self.vae.config.latents_mean, self.vae.config.latents_std)
        )
        unscaled = [x[:, 0].float() * deviation + mean for x in latents]
        side = (LATENT_SIDE, LATENT_SIDE)
        return [decode(self.vae, x.transpose(1, 2).unflatten(2, side)) for x in unscaled]

    def _velocities(
        self, weights: dict[str, Tensor], lines: list[list[Tensor]], latents: list[Tensor], sigma: Tensor
    ) -> list[Tensor]:
        batches = [_batch(task, x, sigma.expand(x.shape[:2])) for task, x in zip(lines, latents, strict=True)]
        return torch.func.functional_call(self.model, weights, (batches,))

    def report(self, count: int, seed: int, num_steps: int, scale: float) -> str:
        """Scores on `count` held-out examples of each task, by kind."""
        examples: list[list[Example]] = []
        lines: list[list[Tensor]] = []
        empty: list[list[Tensor]] = []
        for n in range(len(TASKS)):
            rng = random.Random(f"{seed}/report/{n}")
            drawn = [draw_example(rng, "held_out", n) for _ in range(count)]
            examples.append(drawn)
            for prompts, into in (([e.prompt for e in drawn], lines), ([""] * count, empty)):
                pool = pool_of(drawn, prompts, n, self.tokenizer, self.vae, self.device)
                into.append(list(vars(pool).values()))
        right: Counter[str] = Counter()
        total: Counter[str] = Counter()
        problems: list[str] = []
        for task, drawn, pictures in zip(TASKS, examples, self._sample(lines, empty, num_steps, scale), strict=True):
            for example, picture in zip(drawn, pictures.permute(0, 2, 3, 1).cpu().numpy(), strict=True):
                verdict = check(np.ascontiguousarray(picture), example.target)
                names = {task, f"{task}/{example.kind}"}
                total.update(names)
                right.update(names if verdict.ok else ())
                problems += verdict.problems[:1]
        scores = " ".join(f"{name} {right[name] / total[name]:.3f}" for name in sorted(total))
        return f"step {self.trainer.step}, {num_steps} steps, guidance {scale}: {scores}; {'; '.join(problems[:8])}"
