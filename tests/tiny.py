"""A tiny Qwen-Image 2.1 with loud random weights, in the released directory layout, and diffusers' pipeline on it.

Loud: default initialisation leaves the gates near zero, so that a zeroed prefix cache would hardly move the picture
and no comparison would notice. Every weight of the transformer is drawn at a gain that lets prompt, references and
cache all matter; ``test_parity.py`` checks that they do.
"""

import json
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLQwenImage21,
    FlowMatchEulerDiscreteScheduler,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
)
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration, Qwen3VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.processing_utils import ProcessorMixin

CONTEXT_DIM = 64
LATENT_CHANNELS = 8
SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
SPLIT = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SENTENCES = [
    "Comprehend and analyze the provided prompt.",
    "system user assistant",
    "A red teapot on a wooden table beside a window.",
    "Put the cat from image 1 into image 2.",
    "一只水豚在烛光下看书，油画。",
]
CHAT_TEMPLATE = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.content is string -%}{{ m.content }}{%- else -%}{%- for c in m.content -%}"
    "{%- if c.type == 'text' -%}{{ c.text }}{%- endif -%}{%- endfor -%}{%- endif -%}{{ '<|im_end|>\n' }}{%- endfor -%}"
)


class ImageProcessorOnly(Qwen3VLProcessor):
    """Qwen3VLProcessor without its video half, which needs torchvision."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **_: object) -> None:  # type: ignore[no-untyped-def]
        for name in ("image", "video", "vision_start", "vision_end"):
            token = f"<|{name}_pad|>" if name in ("image", "video") else f"<|{name}|>"
            setattr(self, f"{name}_token", token)
            setattr(self, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(SPLIT, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(SENTENCES * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )


def make_encoder(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLForConditionalGeneration:
    torch.manual_seed(0)
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "video_pad")}
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": CONTEXT_DIM, "intermediate_size": 2 * CONTEXT_DIM,
            "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 16,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": CONTEXT_DIM,
            "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    )  # fmt: skip
    return Qwen3VLForConditionalGeneration(config).eval()


def make_vae() -> AutoencoderKLQwenImage21:
    torch.manual_seed(1)
    return AutoencoderKLQwenImage21(
        base_dim=8, decoder_base_dim=12, z_dim=LATENT_CHANNELS, dim_mult=[1, 2, 4, 4, 4], num_res_blocks=1,
        temperal_downsample=[False, True, True, True],
        latents_mean=[0.1 * k - 0.3 for k in range(LATENT_CHANNELS)],
        latents_std=[1.0 + 0.05 * k for k in range(LATENT_CHANNELS)],
    ).eval()  # fmt: skip


def make_transformer(gain: float = 1.5) -> QwenImage21Transformer2DModel:
    model = QwenImage21Transformer2DModel(
        in_channels=LATENT_CHANNELS, out_channels=LATENT_CHANNELS, num_layers=3, attention_head_dim=16,
        num_attention_heads=4, context_in_dim=CONTEXT_DIM, mlp_ratio=3, axes_dims_rope=(4, 6, 6),
    ).eval()  # fmt: skip
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.1 if parameter.ndim == 1 else gain / parameter.shape[-1] ** 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            if name.endswith(("norm_q.weight", "norm_k.weight")):
                parameter.add_(1.0)
    return model


def make_pipeline() -> QwenImage21Pipeline:
    """diffusers' own pipeline: the independent side of every comparison."""
    tokenizer = make_tokenizer()
    image_processor = Qwen2VLImageProcessorPil(
        patch_size=16, merge_size=2, temporal_patch_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3,
        size={"shortest_edge": 32 * 32, "longest_edge": 512 * 512},
    )  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, base_image_seq_len=256, max_image_seq_len=8192,
        shift_terminal=0.02, time_shift_type="exponential",
    )  # fmt: skip
    pipeline = QwenImage21Pipeline(
        scheduler=scheduler,
        vae=make_vae(),
        text_encoder=make_encoder(tokenizer),
        processor=ImageProcessorOnly(image_processor, tokenizer, chat_template=CHAT_TEMPLATE),
        transformer=make_transformer(),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def save_checkpoint(pipeline: QwenImage21Pipeline, root: Path) -> None:
    """Write the released layout; the transformer goes in shards by index."""
    pipeline.save_pretrained(root)
    for file in (root / "transformer").glob("*.safetensors"):
        file.unlink()
    pipeline.transformer.save_pretrained(root / "transformer", max_shard_size="200KB")
    index = json.loads((root / "model_index.json").read_text())
    index["processor"] = ["transformers", "Qwen3VLProcessor"]
    (root / "model_index.json").write_text(json.dumps(index, indent=2))
