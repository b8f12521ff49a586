"""Trains the VAE on rendered scenes: first on crops around things, then on whole pictures."""

import random
from pathlib import Path
from typing import cast

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage21
from torch import Tensor, nn

from pocket.build import LATENT_CHANNELS, build_vae
from pocket.checker import check
from pocket.scenes import CANVAS, MAX_THINGS, Scene, Split, draw_scene, render, scene_row
from pocket.training import CapturedStep, Clock, Trainer, cosine_rate

CROP = 64
KL_WEIGHT = 3e-4
RENDER_BATCH = 512
# A channel that the VAE leaves unused has a tiny deviation; scaled up to 1 it is noise for the transformer to learn.
MIN_DEVIATION = 0.25


def draw_scenes(seed: int, split: Split, count: int) -> list[Scene]:
    """Scenes of one to three things, and one in ten empty as after a removal."""
    rng = random.Random(seed)
    return [draw_scene(rng, split, 0 if rng.random() < 0.1 else rng.randint(1, MAX_THINGS)) for _ in range(count)]


def render_bytes(rows: Tensor) -> Tensor:
    """Scene rows -> (B, 4, CANVAS, CANVAS) uint8."""
    pictures = [(render(part) * 255).round().to(torch.uint8) for part in rows.split(RENDER_BATCH)]
    return torch.cat(pictures)


def to_model(pictures: Tensor) -> Tensor:
    """uint8 pictures (B, 4, H, W) -> [-1, 1], the range of the VAE."""
    return pictures.float() / 127.5 - 1


def premultiplied(rgba: Tensor) -> Tensor:
    """(B, 4, H, W) in [-1, 1] -> colour times alpha, and alpha, in [0, 1]: what a viewer can see."""
    unit = (rgba + 1) / 2
    return torch.cat([unit[:, :3] * unit[:, 3:], unit[:, 3:]], dim=1)


class VaeLoss(nn.Module):
    """Reconstruction of premultiplied colour and alpha, and a light KL term that keeps the latents in scale."""

    def __init__(self, vae: AutoencoderKLQwenImage21) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, pictures: Tensor) -> Tensor:
        """`pictures`: (B, 4, H, W) in [-1, 1], in the weights' dtype. Returns the loss, fp32."""
        posterior = self.vae.encode(pictures[:, :, None]).latent_dist
        mean, deviation = posterior.mean.float(), posterior.std.float()
        latents = mean + deviation * torch.randn_like(mean)
        decoder_input = self.vae.post_quant_conv(latents.to(pictures.dtype))
        # Not `vae.decode`: it clamps to [-1, 1], where gradients end.
        painted = self.vae.decoder(decoder_input, first_chunk=True)[:, :, 0].float()
        error = premultiplied(painted) - premultiplied(pictures.float())
        kl = 0.5 * (mean.square() + deviation.square() - 1 - 2 * deviation.log()).mean()
        return error.abs().mean() + 4 * error.square().mean() + KL_WEIGHT * kl


def _crops(pictures: Tensor, rows: Tensor, generator: torch.Generator) -> Tensor:
    """A (CROP, CROP) window near a random thing of each picture; windows of empty scenes are anywhere."""
    count, device = len(pictures), pictures.device
    things = rows[:, 1:].reshape(count, MAX_THINGS, 5)
    pick = torch.randint(MAX_THINGS, (count,), generator=generator, device=device)
    centre = things[torch.arange(count, device=device), pick, 2:4]
    anywhere = torch.rand(count, 2, generator=generator, device=device) * CANVAS
    centre = torch.where(centre.sum(dim=1, keepdim=True) > 0, centre, anywhere)
    offset = (torch.rand(count, 2, generator=generator, device=device) - 0.5) * CROP
    start = (centre + offset - CROP / 2).round().long().clamp(0, CANVAS - CROP)
    at = torch.arange(CROP, device=device)
    index = torch.arange(count, device=device)[:, None, None, None]
    channel = torch.arange(4, device=device)[None, :, None, None]
    y, x = start[:, 1, None] + at, start[:, 0, None] + at
    return pictures[index, channel, y[:, None, :, None], x[:, None, None, :]]


class VaeStage:
    """The whole stage. `batch` is pictures a step; a step on crops has the same number of pixels."""

    def __init__(self, device: torch.device, seed: int, pool: int, batch: int, peak_rate: float) -> None:
        self.device = device
        self.batch = batch
        self.peak_rate = peak_rate
        self.vae = cast(AutoencoderKLQwenImage21, build_vae(seed).to(device))
        self.vae.to(memory_format=torch.channels_last)  # 4 % faster than the default on an H200
        self.trainer = Trainer(self.vae, decay=0.999, betas=(0.9, 0.99), weight_decay=1e-3)
        self.loss = VaeLoss(self.vae)
        rows = torch.tensor([scene_row(scene) for scene in draw_scenes(seed, "train", pool)])
        self.rows = rows.to(device)
        self.pictures = render_bytes(self.rows)
        self.generator = torch.Generator(device).manual_seed(seed)

    def _run(self, inputs: list[Tensor]) -> Tensor:
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        weights = {f"vae.{name}": p.to(dtype) for name, p in self.trainer.parameters.items()}
        loss = torch.func.functional_call(self.loss, weights, (inputs[0].to(dtype, memory_format=torch.channels_last),))
        self.trainer.update(loss)
        return loss.detach()

    def _sample(self, crops: bool) -> Tensor:
        count = self.batch * (CANVAS // CROP) ** 2 if crops else self.batch
        index = torch.randint(len(self.rows), (count,), generator=self.generator, device=self.device)
        if crops:
            return to_model(_crops(self.pictures[index], self.rows[index], self.generator))
        return to_model(self.pictures[index])

    def train(self, num_steps: int, max_seconds: float, state: Path) -> None:
        """`num_steps`, or what fits into `max_seconds`; two thirds of them on crops."""
        clock = Clock(max_seconds)
        on_crops = CapturedStep(self._run, self.trainer.optimizer)
        on_pictures = CapturedStep(self._run, self.trainer.optimizer)
        while self.trainer.step < num_steps:
            step = self.trainer.step
            self.trainer.set_rate(cosine_rate(step, num_steps, self.peak_rate, warmup_steps=200))
            crops = step < num_steps * 2 // 3
            loss = (on_crops if crops else on_pictures)([self._sample(crops)])
            self.trainer.step += 1
            num_steps = clock.plan(step, num_steps, loss)
            if step % 500 == 0 or self.trainer.step == num_steps:
                clock.say(f"vae step {step} loss {float(loss):.5f} rate {float(self.trainer.rate):.1e}")
            if step % 4000 == 3999:
                self.trainer.save(state)
        self.trainer.save(state)


def latent_statistics(vae: AutoencoderKLQwenImage21, pictures: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each latent channel over uint8 pictures."""
    latents = encode(vae, pictures).transpose(0, 1).flatten(1).double()
    return latents.mean(dim=1), latents.std(dim=1)


@torch.no_grad()
def encode(vae: AutoencoderKLQwenImage21, pictures: Tensor) -> Tensor:
    """uint8 pictures -> (B, channels, side, side) fp32, not normalised."""
    parts = []
    for part in pictures.split(RENDER_BATCH):
        posterior = vae.encode(to_model(part)[:, :, None].to(vae.dtype)).latent_dist
        parts.append(posterior.mode()[:, :, 0].float())
    return torch.cat(parts)


@torch.no_grad()
def decode(vae: AutoencoderKLQwenImage21, latents: Tensor) -> Tensor:
    """(B, channels, side, side), not normalised -> uint8 pictures."""
    parts = []
    for part in latents.split(RENDER_BATCH):
        painted = vae.decode(part[:, :, None].to(vae.dtype), return_dict=False)[0][:, :, 0].float()
        parts.append(((painted + 1) * 127.5).round().clamp(0, 255).to(torch.uint8))
    return torch.cat(parts)


@torch.no_grad()
def report(vae: AutoencoderKLQwenImage21, device: torch.device, count: int, seed: int) -> str:
    """Quality on held-out scenes: PSNR of premultiplied colour, mean alpha error, share that the checker passes."""
    scenes = draw_scenes(seed, "held_out", count)
    pictures = render_bytes(torch.tensor([scene_row(scene) for scene in scenes]).to(device))
    painted = decode(vae, encode(vae, pictures))
    error = premultiplied(to_model(painted)) - premultiplied(to_model(pictures))
    psnr = -10 * error[:, :3].square().mean().log10()
    arrays = painted.permute(0, 2, 3, 1).cpu().numpy()
    verdicts = [check(np.ascontiguousarray(a), scene) for a, scene in zip(arrays, scenes, strict=True)]
    passed = sum(verdict.ok for verdict in verdicts) / count
    failures = "; ".join(problem for verdict in verdicts for problem in verdict.problems[:1])[:300]
    return (
        f"vae: {psnr:.2f} dB on premultiplied colour, mean alpha error {error[:, 3].abs().mean():.5f}, "
        f"checker passes {passed:.2%} of {count} reconstructions {failures}"
    )


def export_vae(trainer: Trainer, vae: AutoencoderKLQwenImage21, pictures: Tensor, folder: Path) -> None:
    """Put the averaged weights and the latent statistics into `vae`, round it to bf16, and save it."""
    with torch.no_grad():
        for name, parameter in trainer.parameters.items():
            parameter.copy_(trainer.average[name])
    vae.to(torch.bfloat16)
    mean, deviation = latent_statistics(vae, pictures)
    assert len(mean) == LATENT_CHANNELS
    deviation = deviation.clamp_min(MIN_DEVIATION)
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=deviation.tolist())
    vae.save_pretrained(folder)
