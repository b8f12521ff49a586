"""Writes the pocket checkpoint in the directory layout of the released Qwen-Image 2.1."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast

from pocket.paint_model import PaintModel
from pocket.scenes import CANVAS
from pocket.tokenizer import CHAT_TEMPLATE
from pocket.training import Trainer

NUM_INFERENCE_STEPS = 20
PAGE_ROWS = 16
DIFFUSERS_VERSION = "0.42.1"
# The released values; 64 target tokens lie below the base length, which gives a shift of mu = 0.49.
SCHEDULER_CONFIG: dict[str, Any] = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}
MODEL_INDEX = {
    "_class_name": "QwenImage21Pipeline",
    "_diffusers_version": DIFFUSERS_VERSION,
    "processor": ["transformers", "Qwen3VLProcessor"],
    "sample_sigmas": None,
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen3VLForConditionalGeneration"],
    "transformer": ["diffusers", "QwenImage21Transformer2DModel"],
    "vae": ["diffusers", "AutoencoderKLQwenImage21"],
}
IMAGE_PROCESSOR = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "image_std": [0.5, 0.5, 0.5],
    "merge_size": 2,
    "patch_size": 16,
    "processor_class": "Qwen3VLProcessor",
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"longest_edge": 16777216, "shortest_edge": 1024},
    "temporal_patch_size": 2,
}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def export_processor(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Tokenizer, chat template and image processor."""
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    _write_json(folder / "preprocessor_config.json", IMAGE_PROCESSOR)


def export_transformer(model: PaintModel, folder: Path) -> None:
    """Config and weights as diffusers writes them."""
    config: dict[str, Any] = {"_class_name": "QwenImage21Transformer2DModel", "_diffusers_version": DIFFUSERS_VERSION}
    config |= {"causal_condition": True, "patch_size": 1, **asdict(model.transformer.config)}
    _write_json(folder / "config.json", dict(sorted(config.items())))
    weights = {name: weight.contiguous().cpu() for name, weight in model.transformer.state_dict().items()}
    save_file(weights, folder / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})


def export(trainer: Trainer, model: PaintModel, tokenizer: PreTrainedTokenizerFast, vae: Path, folder: Path) -> None:
    """The averaged weights in bfloat16, and all configuration; `vae` is the folder of the exported VAE."""
    with torch.no_grad():
        for name, parameter in trainer.parameters.items():
            parameter.copy_(trainer.average[name])
    model.to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "model_index.json", MODEL_INDEX)
    own = {"reference_resolution": CANVAS, "num_inference_steps": NUM_INFERENCE_STEPS, "page_rows": PAGE_ROWS}
    _write_json(folder / "underpaint.json", own)
    FlowMatchEulerDiscreteScheduler.from_config(SCHEDULER_CONFIG).save_pretrained(folder / "scheduler")
    export_processor(tokenizer, folder / "processor")
    export_transformer(model, folder / "transformer")
    model.encoder.model.save_pretrained(folder / "text_encoder")
    (folder / "vae").mkdir(exist_ok=True)
    for file in vae.iterdir():
        shutil.copyfile(file, folder / "vae" / file.name)
    for weights in folder.rglob("*.safetensors"):
        weights.chmod(0o644)  # safetensors writes files that only their owner can read
