"""Examples on the training device: drawn, tokenised, rendered and encoded once, then picked from in every step."""

import random
from dataclasses import dataclass

import torch
from diffusers import AutoencoderKLQwenImage21
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from pocket.build import LATENT_CHANNELS
from pocket.paint_model import TARGET_ROWS, VISION_SIDE
from pocket.scenes import CANVAS, Scene, Split, scene_row
from pocket.tasks import Example, draw_example
from pocket.tokenizer import full_prompt
from pocket.vae_stage import encode, render_bytes

TOKENS = (56, 56, 88)  # encoder tokens of a sequence with 0, 1, 2 references, padded
EMPTY_PROMPT_SHARE = 0.07  # of the examples lose their prompt, which teaches what guidance steers away from
CHUNK = 4096  # pictures rendered and encoded at a time


@dataclass(frozen=True)
class Pool:
    """Examples of one task, one line each: ``token_ids`` (N, tokens) and ``lengths`` (N,) int32; ``references``
    (N, references, 3, CANVAS, CANVAS) uint8 on white; ``reference_latents`` (N, references, rows, channels) and
    ``targets`` (N, rows, channels), normalised, bfloat16."""

    token_ids: Tensor
    lengths: Tensor
    references: Tensor
    reference_latents: Tensor
    targets: Tensor

    def pick(self, count: int, generator: torch.Generator) -> list[Tensor]:
        """`count` random lines, in the order of the fields."""
        index = torch.randint(len(self.lengths), (count,), generator=generator, device=self.lengths.device)
        return [x[index] for x in vars(self).values()]


def tokenize(
    tokenizer: PreTrainedTokenizerFast, prompts: list[str], num_references: int, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """Padded token ids (N, num_tokens) and real lengths (N,), int32."""
    texts = [full_prompt(prompt, num_references, VISION_SIDE * VISION_SIDE) for prompt in prompts]
    encodings = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    ids = [encoding.ids for encoding in encodings]
    longest = max(len(line) for line in ids)
    if longest > num_tokens:
        raise ValueError(f"a prompt has {longest} tokens, the task is padded to {num_tokens}")
    padded = [line + [tokenizer.pad_token_id] * (num_tokens - len(line)) for line in ids]
    return torch.tensor(padded, dtype=torch.int32), torch.tensor([len(line) for line in ids], dtype=torch.int32)


def on_white(pictures: Tensor) -> Tensor:
    """uint8 RGBA (N, 4, H, W) composited on white: (N, 3, H, W)."""
    unit = pictures.float() / 255
    flat = unit[:, :3] * unit[:, 3:] + 1 - unit[:, 3:]
    return (flat * 255).round().to(torch.uint8)


def latent_rows(vae: AutoencoderKLQwenImage21, pictures: Tensor) -> Tensor:
    """uint8 pictures -> normalised latents (N, rows, channels) fp32."""
    mean, deviation = (
        torch.tensor(x, device=pictures.device) for x in (vae.config.latents_mean, vae.config.latents_std)
    )
    return (encode(vae, pictures).flatten(2).transpose(1, 2) - mean) / deviation


def _scenes_to_device(
    vae: AutoencoderKLQwenImage21, scenes: list[Scene], device: torch.device, keep_pictures: bool
) -> tuple[Tensor, Tensor]:
    """Latents (N, rows, channels) bfloat16, and pictures on white, empty unless `keep_pictures`."""
    latents = torch.empty(len(scenes), TARGET_ROWS, LATENT_CHANNELS, dtype=torch.bfloat16, device=device)
    kept = len(scenes) if keep_pictures else 0
    pictures = torch.empty(kept, 3, CANVAS, CANVAS, dtype=torch.uint8, device=device)
    rows = torch.tensor([scene_row(scene) for scene in scenes]).to(device)
    for start in range(0, len(scenes), CHUNK):
        rendered = render_bytes(rows[start : start + CHUNK])
        latents[start : start + CHUNK] = latent_rows(vae, rendered).bfloat16()
        if keep_pictures:
            pictures[start : start + CHUNK] = on_white(rendered)
    return latents, pictures


def pool_of(
    examples: list[Example],
    prompts: list[str],
    num_references: int,
    tokenizer: PreTrainedTokenizerFast,
    vae: AutoencoderKLQwenImage21,
    device: torch.device,
) -> Pool:
    """A pool of given examples, with prompts of their own or others in their place."""
    ids, lengths = tokenize(tokenizer, prompts, num_references, TOKENS[num_references])
    targets, _ = _scenes_to_device(vae, [e.target for e in examples], device, keep_pictures=False)
    shape = (len(examples), num_references)
    references = torch.empty(*shape, 3, CANVAS, CANVAS, dtype=torch.uint8, device=device)
    latents = torch.empty(*shape, TARGET_ROWS, LATENT_CHANNELS, dtype=torch.bfloat16, device=device)
    for index in range(num_references):
        scenes = [e.references[index] for e in examples]
        latents[:, index], references[:, index] = _scenes_to_device(vae, scenes, device, keep_pictures=True)
    return Pool(ids.to(device), lengths.to(device), references, latents, targets)


def draw_pool(
    seed: int,
    split: Split,
    num_references: int,
    count: int,
    tokenizer: PreTrainedTokenizerFast,
    vae: AutoencoderKLQwenImage21,
    device: torch.device,
) -> Pool:
    """A pool for training: some prompts are dropped."""
    rng = random.Random(f"{seed}/{split}/{num_references}")
    examples = [draw_example(rng, split, num_references) for _ in range(count)]
    prompts = ["" if rng.random() < EMPTY_PROMPT_SHARE else e.prompt for e in examples]
    return pool_of(examples, prompts, num_references, tokenizer, vae, device)
