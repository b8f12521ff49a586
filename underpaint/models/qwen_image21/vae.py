"""The RGBA VAE of Qwen-Image 2.1: diffusers' AutoencoderKLQwenImage21, between pictures and packed latents.

Packed latents are (tokens, channels), row-major over a grid of one token per 16 x 16 pixels, normalised by the
checkpoint's per-channel mean and standard deviation.
"""

from pathlib import Path

import torch
from diffusers import AutoencoderKLQwenImage21
from PIL import Image
from torch import Tensor

from underpaint.errors import CheckpointError
from underpaint.images import to_array
from underpaint.layout import Grid
from underpaint.models.loading import Weights, read_json


class ImageCodec:
    """Encodes references and decodes targets. Deterministic: references are encoded to the mode."""

    def __init__(self, vae: AutoencoderKLQwenImage21) -> None:
        self.vae = vae
        self.num_channels: int = vae.config.z_dim
        # The config's scale_factor_spatial is not read: released checkpoints ship 8 there, the truth is 16.
        self.pixels_per_token: int = 2 ** len(vae.config.temperal_downsample)
        shape = (1, self.num_channels, 1, 1, 1)
        self._mean = torch.tensor(vae.config.latents_mean).view(shape).to(vae.device, vae.dtype)
        self._std = torch.tensor(vae.config.latents_std).view(shape).to(vae.device, vae.dtype)

    def grid(self, width: int, height: int) -> Grid:
        """Tokens of a picture whose sides are multiples of ``pixels_per_token``."""
        return height // self.pixels_per_token, width // self.pixels_per_token

    @torch.inference_mode()
    def encode(self, image: Image.Image) -> Tensor:
        """An RGBA picture -> (tokens, channels)."""
        pixels = torch.from_numpy(to_array(image))[None, :, None].to(self.vae.device, self.vae.dtype)
        latents = (self.vae.encode(pixels).latent_dist.mode() - self._mean) / self._std
        return latents[0].flatten(1).T.contiguous()

    @torch.inference_mode()
    def decode(self, latents: Tensor, grid: Grid) -> Tensor:
        """(tokens, channels) -> (4, height, width) float32 in [0, 1]."""
        packed = latents.to(self.vae.dtype).T.reshape(1, self.num_channels, 1, *grid)
        pixels = self.vae.decode(packed * self._std + self._mean, return_dict=False)[0]
        return (pixels[0, :, 0].float() / 2 + 0.5).clamp(0, 1)


def scan_vae(directory: Path) -> Weights:
    """Read the headers of ``vae/`` and check every tensor against its config. Raises CheckpointError."""
    weights = Weights.scan(directory, "diffusion_pytorch_model")
    config = read_json(directory / "config.json")
    if config.get("_class_name") != "AutoencoderKLQwenImage21":
        raise CheckpointError(f"{directory} holds a {config.get('_class_name')!r}, not an AutoencoderKLQwenImage21")
    known = set(AutoencoderKLQwenImage21._get_init_keys(AutoencoderKLQwenImage21))
    if unknown := {key for key in config if not key.startswith("_")} - known:
        raise CheckpointError(f"{directory / 'config.json'}: unknown keys: {', '.join(sorted(unknown))}")
    with torch.device("meta"):
        vae = AutoencoderKLQwenImage21.from_config(config)
    weights.check(vae.state_dict())
    return weights


def load_vae(directory: Path, device: str, dtype: torch.dtype) -> ImageCodec:
    """The VAE of a checkpoint. Raises CheckpointError."""
    scan_vae(directory)
    vae = AutoencoderKLQwenImage21.from_pretrained(directory, torch_dtype=dtype, local_files_only=True).to(device)
    return ImageCodec(vae.eval().requires_grad_(False))
