"""The pocket SenseNova-U1: its configuration in the released format, its tokenizer, fresh weights, and export.

The head is U1.5's convolutions. A target is 16 cells of 32 x 32 pixels and there is no VAE, so a hidden row must become
3072 pixel values. U1's two layers would draw every edge at every place in a cell from one matrix of at least 512 x 3072
(1.6 M parameters, a seventh of the model), and each cell by itself; the convolutions draw 8 x 8 pixels from 3 x 3
neighbours with the same weights everywhere (1.0 M), which is what shapes at unseen places need.

Two numbers of the released format are set for pictures of this size. ``noise_scale_base_image_seq_len`` 4 gives 16
cells noise of deviation 2: with the released 64 it would be 0.5, and as thousands of pixels of one colour tell more
than that hides, all would be decided in the first step. ``min_pixels`` 16384 lets a picture that is asked about stay
16 cells. For references of edits and pictures of a dialogue with paintings the released rule has no number to set:
they grow to 512 x 512, 256 cells, and the checkpoint is trained on them so.
"""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from pocket.captions import lexicon
from pocket.dialogues import dialogue_words
from pocket.questions import question_words
from pocket.scenes import CANVAS
from pocket.tokenizer import QWEN_PATTERN, SPECIAL_TOKENS
from underpaint.models.neo_unify.config import (
    CELL,
    PATCH,
    FlowConfig,
    LanguageConfig,
    NeoConfig,
    VisionConfig,
    read_neo_config,
)
from underpaint.models.neo_unify.flow import ConvHead, noise_scale
from underpaint.models.neo_unify.network import NeoUnifyNetwork
from underpaint.models.neo_unify.prompt import (
    IMAGE_CONTEXT,
    IMAGE_START,
    IMAGE_STOP,
    PAINTING_SYSTEM_MESSAGE,
    THINK_START,
    THINK_STOP,
)

SIDE = CANVAS // CELL
GRID = (SIDE, SIDE)
NUM_CELLS = SIDE * SIDE
# Floor of 1 - t in the loss; inference has its own. With the released 0.05 more than half of the loss would come from
# times at which the picture is all but finished, and which shape it has is decided long before.
TRAINING_T_EPS = 0.3
NUM_INFERENCE_STEPS = 20
PAGE_ROWS = 16
GUIDANCE_SCALE = 1.0
VOCABULARY = 1280  # an upper limit, special tokens apart
NEO_SPECIAL_TOKENS = (*SPECIAL_TOKENS, THINK_START, THINK_STOP, IMAGE_CONTEXT, IMAGE_START, IMAGE_STOP)
# Files of at most this size can be carried by anything.
SHARD_BYTES = 12_500_000


@dataclass(frozen=True)
class Sizes:
    """What may differ between the pocket checkpoint and the tiny networks of the tests."""

    hidden_size: int = 256
    intermediate_size: int = 576
    num_hidden_layers: int = 7
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    vision_hidden_size: int = 256


POCKET = Sizes()


def config_values(sizes: Sizes, vocab_size: int, eos_token_id: int) -> dict[str, Any]:
    """``config.json`` with the keys of the released file."""
    language = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.num_hidden_layers,
        "num_attention_heads": sizes.num_attention_heads,
        "num_key_value_heads": sizes.num_key_value_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e6,
        "rope_theta_hw": 1e4,
        "max_position_embeddings_hw": 10000,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
    }
    vision = {
        "architectures": ["NEOVisionModel"],
        "model_type": "neo_vision",
        "num_channels": 3,
        "patch_size": PATCH,
        "hidden_size": sizes.vision_hidden_size,
        "llm_hidden_size": sizes.hidden_size,
        "downsample_ratio": PATCH / CELL,
        "rope_theta_vision": 1e4,
        "max_position_embeddings_vision": 10000,
        "min_pixels": CANVAS * CANVAS,
        "max_pixels": 4194304,
    }
    return {
        "architectures": ["NEOChatModel"],
        "model_type": "neo_chat",
        "template": "neo1_0",
        "patch_size": PATCH,
        "downsample_ratio": PATCH / CELL,
        "llm_config": language,
        "vision_config": vision,
        "fm_head_layers": 2,
        "fm_head_dim": 1536,
        "fm_head_mlp_ratio": 1.0,
        "use_pixel_head": True,
        "concat_time_token_num": 0,
        "noise_scale": 1.0,
        "noise_scale_mode": "resolution",
        "noise_scale_base_image_seq_len": 4,
        "noise_scale_max_value": 16.0,
        "add_noise_scale_embedding": True,
        "time_schedule": "standard",
        "time_shift_type": "exponential",
        "timestep_shift": 1.0,
        "base_shift": 0.5,
        "max_shift": 1.15,
        "base_image_seq_len": 64,
        "max_image_seq_len": 4096,
        "t_eps": TRAINING_T_EPS,
        "torch_dtype": "bfloat16",
    }


def neo_config(values: dict[str, Any]) -> NeoConfig:
    """What the engine reads from a ``config.json`` of these values."""
    return NeoConfig(
        LanguageConfig(**_known(values["llm_config"], LanguageConfig)),
        VisionConfig(**_known(values["vision_config"], VisionConfig)),
        FlowConfig(**_known(values, FlowConfig)),
        head_width=None,
    )


def _known(values: dict[str, Any], cls: type) -> dict[str, Any]:
    return {field.name: values[field.name] for field in fields(cls) if field.name in values}


def painting_noise_scale(config: NeoConfig) -> float:
    """Deviation of the noise that a picture of the scenes' size starts from."""
    return noise_scale(config.flow, GRID)


def build_neo_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE in Qwen's format, its merges learned from the words of prompts, answers and templates."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    words = [*lexicon(), *question_words(), *dialogue_words(), "system", "user", "assistant", "Image", "\n\n"]
    # Twice, so that the words of the scenes come before those of the system message when merges run out.
    tokenizer.train_from_iterator([*words, *words, PAINTING_SYSTEM_MESSAGE], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in NEO_SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[token for token in NEO_SPECIAL_TOKENS if token != "<|im_end|>"],
        model_max_length=32768,
    )


def build_network(config: NeoConfig, seed: int) -> NeoUnifyNetwork:
    """Fresh weights, fp32. Residual branches start small and the head near zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = NeoUnifyNetwork(config)
        shrink = (2 * config.language.num_hidden_layers) ** -0.5
        for name, module in network.named_modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.3)
            elif isinstance(module, nn.Linear) and "language_model" in name:
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if "o_proj" in name or "down_proj" in name:
                    with torch.no_grad():
                        module.weight.mul_(shrink)
        head = network.fm_modules["fm_head"]
        assert isinstance(head, ConvHead)
        with torch.no_grad():
            head.conv2.weight.mul_(0.1)
            network.language_model.lm_head.weight.mul_(0.1)
    return network


def export(weights: dict[str, Tensor], values: dict[str, Any], tokenizer: PreTrainedTokenizerFast, root: Path) -> int:
    """Write a checkpoint in the released layout, in bfloat16. Returns its size in bytes."""
    root.mkdir(parents=True, exist_ok=True)
    for old in root.glob("*.safetensors*"):
        old.unlink()
    _write_json(root / "config.json", values)
    defaults = {
        "reference_resolution": CANVAS,
        "num_inference_steps": NUM_INFERENCE_STEPS,
        "page_rows": PAGE_ROWS,
        "guidance_scale": GUIDANCE_SCALE,
    }
    _write_json(root / "underpaint.json", defaults)
    tokenizer.save_pretrained(root)
    rounded = {name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in sorted(weights.items())}
    shards = _shards(rounded)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, root / file, metadata={"format": "pt"})
        (root / file).chmod(0o644)  # safetensors writes files that only their owner can read
        weight_map |= dict.fromkeys(shard, file)
    total = sum(weight.nbytes for weight in rounded.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(root / "model.safetensors.index.json", index)
    read_neo_config(root / "config.json", head_width=None)  # raises if a key would be refused
    return sum(path.stat().st_size for path in root.iterdir())


def _shards(weights: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """In order, each as large as `SHARD_BYTES` allows."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, weight in weights.items():
        if shards[-1] and size + weight.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = weight
        size += weight.nbytes
    return shards


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
