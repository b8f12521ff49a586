"""The sizes of the pocket Qwen-Image 2.1: its VAE, text encoder and transformer, with fresh weights."""

import torch
from diffusers import AutoencoderKLQwenImage21
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from underpaint.models.qwen_image21.transformer import QwenImage21Transformer, TransformerConfig

LATENT_CHANNELS = 16
LATENT_SIDE = 8  # latent tokens a side of a picture of `scenes.CANVAS` pixels: 16 pixels each
TEXT_WIDTH = 192
VISION_PATCH = 16
FIRST_LOG_VARIANCE = -6.0  # of the posterior: a deviation of 0.05, under that of the first means (0.15)

VAE_CONFIG = {
    "base_dim": 16,
    "decoder_base_dim": 16,
    "z_dim": LATENT_CHANNELS,
    "dim_mult": [1, 2, 4, 4, 4],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True, True],
}
TEXT_CONFIG = {
    "hidden_size": TEXT_WIDTH,
    "intermediate_size": 3 * TEXT_WIDTH,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
}
VISION_CONFIG = {
    "depth": 3,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_heads": 2,
    "patch_size": VISION_PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": TEXT_WIDTH,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}
TRANSFORMER_CONFIG = TransformerConfig(
    in_channels=LATENT_CHANNELS,
    out_channels=LATENT_CHANNELS,
    num_layers=6,
    attention_head_dim=32,
    num_attention_heads=8,
    context_in_dim=TEXT_WIDTH,
    mlp_ratio=3,
    axes_dims_rope=(8, 12, 12),
)


def build_vae(seed: int) -> AutoencoderKLQwenImage21:
    """A fresh VAE, for a learning rate of 1e-3: residual branches start at zero, and the posterior starts narrow, so
    that its noise does not drown the first latents. The class's own initialisation was only seen to learn up to 5e-4.

    The temporal convolutions are there for the layout of the checkpoint; a single frame never passes them.
    """
    torch.manual_seed(seed)
    zeros, ones = [0.0] * LATENT_CHANNELS, [1.0] * LATENT_CHANNELS
    vae = AutoencoderKLQwenImage21(**VAE_CONFIG, latents_mean=zeros, latents_std=ones)
    for name, module in vae.named_modules():
        if name.endswith("conv2") and isinstance(module, nn.Conv2d):
            nn.init.zeros_(module.weight)
        if name.endswith("time_conv"):
            module.requires_grad_(False)
    nn.init.constant_(vae.quant_conv.bias[LATENT_CHANNELS:].data, FIRST_LOG_VARIANCE)
    return vae


def encoder_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLConfig:
    """Qwen3-VL in small: every part of the released one is there, deepstack and interleaved mrope too."""
    token = tokenizer.convert_tokens_to_ids
    text = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, **TEXT_CONFIG}
    return Qwen3VLConfig(
        text_config=text,
        vision_config=dict(VISION_CONFIG),
        tie_word_embeddings=True,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
    )


def build_encoder(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3VLForConditionalGeneration:
    """A fresh text encoder."""
    torch.manual_seed(seed)
    return Qwen3VLForConditionalGeneration(encoder_config(tokenizer))


def build_transformer(seed: int) -> QwenImage21Transformer:
    """A fresh transformer. The output starts at zero, so that the first prediction is the mean velocity."""
    torch.manual_seed(seed)
    transformer = QwenImage21Transformer(TRANSFORMER_CONFIG)
    nn.init.zeros_(transformer.proj_out.weight)
    return transformer
