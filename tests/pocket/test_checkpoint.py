"""The checkpoint in the repository: its layout, its size, its VAE, and that the public classes load it."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLQwenImage21, FlowMatchEulerDiscreteScheduler, QwenImage21Transformer2DModel
from transformers import PreTrainedTokenizerFast, Qwen3VLForConditionalGeneration

import pocket
from pocket.build import LATENT_CHANNELS
from pocket.checker import check
from pocket.evaluate_qwen import draw
from pocket.scenes import draw_scene, render, scene_row
from pocket.scoreboard import judge, picture
from pocket.tasks import KINDS
from pocket.tokenizer import build_tokenizer
from pocket.vae_stage import decode, encode

CHECKPOINT = Path(pocket.__file__).parent / "qwen-image-2.1"
MAX_BYTES = 20_000_000


def test_size() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT.rglob("*") if path.is_file()) <= MAX_BYTES


def test_own_settings() -> None:
    settings = json.loads((CHECKPOINT / "underpaint.json").read_text())
    assert settings == {"reference_resolution": 128, "num_inference_steps": 20, "page_rows": 16}


def test_public_classes_load_every_part() -> None:
    index = json.loads((CHECKPOINT / "model_index.json").read_text())
    assert index["_class_name"] == "QwenImage21Pipeline"
    assert index["processor"] == ["transformers", "Qwen3VLProcessor"]
    transformer = QwenImage21Transformer2DModel.from_pretrained(CHECKPOINT / "transformer")
    encoder = Qwen3VLForConditionalGeneration.from_pretrained(CHECKPOINT / "text_encoder")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(CHECKPOINT / "processor")
    FlowMatchEulerDiscreteScheduler.from_pretrained(CHECKPOINT / "scheduler")
    assert transformer.config.in_channels == LATENT_CHANNELS
    assert transformer.config.context_in_dim == encoder.config.text_config.hidden_size
    assert len(tokenizer) == encoder.config.text_config.vocab_size


def test_tokenizer_is_the_one_that_the_code_trains() -> None:
    saved = PreTrainedTokenizerFast.from_pretrained(CHECKPOINT / "processor")
    built = build_tokenizer()
    assert saved.get_vocab() == built.get_vocab()
    prompt = "把红色圆形移到左上角, make the background sky blue"
    assert saved(prompt).input_ids == built(prompt).input_ids


def test_vae_reconstructs_unseen_scenes() -> None:
    vae = AutoencoderKLQwenImage21.from_pretrained(CHECKPOINT / "vae").eval()
    rng = random.Random(13)
    scenes = [draw_scene(rng, "held_out", count) for count in (1, 2, 3, 3)]
    pictures = (render(torch.tensor([scene_row(scene) for scene in scenes])) * 255).round().to(torch.uint8)
    painted = decode(vae, encode(vae, pictures)).permute(0, 2, 3, 1).numpy()
    for pixels, scene in zip(painted, scenes, strict=True):
        assert check(np.ascontiguousarray(pixels), scene).ok


@pytest.mark.parametrize("kinds", [*KINDS, ("transparent",)], ids="-".join)
def test_evaluation_draws_are_fixed(kinds: tuple[str, ...]) -> None:
    first, again, other = (draw(list(kinds), random.Random(seed)) for seed in (0, 0, 1))
    assert first == again != other
    for example in first:
        assert judge(picture(example.target), example.target).ok
