"""Qwen-Image 2.1 as one object: everything a checkpoint directory holds, and what it can do."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from underpaint.config import EngineConfig
from underpaint.errors import CheckpointError
from underpaint.images import fit_to_area
from underpaint.kv.content import ContentCache
from underpaint.kv.pool import CacheShape
from underpaint.kv.tree import Key
from underpaint.layout import Layout, qwen_positions
from underpaint.models.loading import Defaults, Weights, read_config, read_defaults, read_json
from underpaint.models.painter import Target
from underpaint.models.qwen_image21.condition import Condition, Reference, content_of, make_condition
from underpaint.models.qwen_image21.encoder import TextEncoder, load_encoder, load_tokenizer, scan_encoder
from underpaint.models.qwen_image21.transformer import (
    Attend,
    QwenImage21Transformer,
    TransformerConfig,
    rotary_table,
    round_timestep,
)
from underpaint.models.qwen_image21.vae import ImageCodec, load_vae, scan_vae
from underpaint.sampling.schedule import ScheduleRule, check_sigmas

SIZE_MULTIPLE = 32
MAX_SIDE = 4096
MAX_REFERENCES = 10
PARTS = ("scheduler", "vae", "text_encoder", "processor", "transformer")


@dataclass(frozen=True)
class Checkpoint:
    """What a directory says of itself, read and checked without loading a weight."""

    root: Path
    transformer: TransformerConfig
    defaults: Defaults
    sample_sigmas: tuple[float, ...] | None
    weights: dict[str, Weights]


def inspect(root: Path) -> Checkpoint:
    """Check every file, key, shape and dtype of a checkpoint directory. Raises CheckpointError."""
    index = {key: value for key, value in read_json(root / "model_index.json").items() if not key.startswith("_")}
    if unknown := index.keys() - {*PARTS, "sample_sigmas"}:
        raise CheckpointError(f"{root / 'model_index.json'}: unknown keys: {', '.join(sorted(unknown))}")
    for part in PARTS:
        if part not in index or not (root / part).is_dir():
            raise CheckpointError(f"{root}: the part {part} is missing")
    sigmas = index.get("sample_sigmas")
    config = read_config(
        root / "transformer" / "config.json",
        TransformerConfig,
        required={"patch_size": 1, "causal_condition": True, "causal_block": True},
    )
    if sum(config.axes_dims_rope) != config.attention_head_dim:
        raise CheckpointError(f"{root}: axes_dims_rope {config.axes_dims_rope} must add up to attention_head_dim")
    transformer = Weights.scan(root / "transformer", "diffusion_pytorch_model")
    transformer.check(_skeleton(config).state_dict())
    return Checkpoint(
        root,
        config,
        read_defaults(root),
        None if sigmas is None else check_sigmas(sigmas),
        {
            "transformer": transformer,
            "text_encoder": scan_encoder(root / "text_encoder"),
            "vae": scan_vae(root / "vae"),
        },
    )


class QwenImage21:
    """The loaded parts. Stateless but for the cache of VAE latents, keyed by the pixels of references."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        transformer: QwenImage21Transformer,
        encoder: TextEncoder,
        image_codec: ImageCodec,
        config: EngineConfig,
    ) -> None:
        self.checkpoint = checkpoint
        self.transformer = transformer
        self.encoder = encoder
        self.image_codec = image_codec
        self.schedule_rule = ScheduleRule(read_json(checkpoint.root / "scheduler" / "scheduler_config.json"))
        self.latents = ContentCache(config.latent_cache_bytes)
        self.cache_shape = cache_shape(checkpoint.transformer, config.torch_dtype)
        identity = repr((str(checkpoint.root.resolve()), config.dtype, config.kv_codec))
        self._root_key: Key = hashlib.sha256(identity.encode()).digest()

    def reference(self, image: Image.Image, resolution: int) -> Reference:
        """Resize an upright RGBA picture to the area ``resolution`` squared and encode it; one resize feeds both the
        text encoder and the VAE, as in diffusers."""
        size = fit_to_area(*image.size, resolution, SIZE_MULTIPLE)
        image = image.resize(size, Image.Resampling.LANCZOS)
        content = content_of(image)
        latents = self.latents.get(content, lambda: self.image_codec.encode(image))
        return Reference(image, content, self.image_codec.grid(*size), latents)

    def condition(self, prompt: str, references: Sequence[Reference]) -> Condition:
        """Encode a prompt among references into the prefix of a branch. Raises PromptTooLong."""
        texts = self.encoder.tokenizer.texts(prompt, len(references))
        encoded = self.encoder.encode(texts, [reference.image for reference in references])
        return make_condition(encoded, references, self._root_key)

    def embed_prefix(self, condition: Condition, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a prefix, (rows, hidden_size). The range never cuts an image."""
        parts = []
        text_row = image = 0
        for segment in condition.layout.segments:
            first, last = max(start, segment.start) - segment.start, min(stop, segment.stop) - segment.start
            if segment.kind == "text":
                if first < last:
                    parts.append(self.transformer.txt_in(condition.text[text_row + first : text_row + last]))
                text_row += segment.stop - segment.start
            else:
                if first < last:
                    parts.append(self.transformer.img_in(condition.references[image].latents))
                image += 1
        return torch.cat(parts)

    def run(self, prefix_rows: Tensor, targets: Sequence[Target], rotary: Tensor, attend: Attend) -> list[Tensor]:
        """One pass over prefix rows (rows, hidden_size), at t = 0, and then the targets' rows, each at its own sigma;
        either may be missing. Velocity (tokens, channels) of each target."""
        if not targets:
            self.transformer.prefill(prefix_rows, rotary, attend)
            return []
        states = self.transformer.img_in(torch.cat([target.state for target in targets]))
        rows = torch.cat([prefix_rows.to(states.dtype), states]) if len(prefix_rows) else states
        levels = torch.stack([target.level for target in targets])
        timesteps = round_timestep(levels, rows.dtype).to(rows.device)
        sizes = [len(target.state) for target in targets]
        row_timestep = None
        if len(prefix_rows) or bool((levels != levels[0]).any()):
            # Prefix rows point one past the timesteps, at t = 0.
            of_target = torch.arange(len(targets)).repeat_interleave(torch.tensor(sizes))
            row_timestep = torch.cat([torch.full((len(prefix_rows),), len(targets)), of_target]).to(rows.device)
        velocity = self.transformer(rows, rotary, timesteps, row_timestep, attend)
        return list(velocity[len(prefix_rows) :].split(sizes))

    def rotary(self, layout: Layout, start: int, stop: int) -> Tensor:
        """(rows, head_dim / 2) complex64 for rows [start, stop), on the model's device."""
        positions = qwen_positions(layout)[start:stop]
        return rotary_table(positions, self.checkpoint.transformer.axes_dims_rope).to(self.encoder.model.device)


def cache_shape(config: TransformerConfig, dtype: torch.dtype) -> CacheShape:
    return CacheShape(config.num_layers, config.num_attention_heads, config.attention_head_dim, dtype)


def load(root: Path, config: EngineConfig) -> QwenImage21:
    """Load a checkpoint directory; ``config`` is resolved. Raises CheckpointError."""
    checkpoint = inspect(root)
    dtype = config.torch_dtype
    transformer = _skeleton(checkpoint.transformer)
    checkpoint.weights["transformer"].load_into(transformer, config.device, dtype)
    tokenizer = load_tokenizer(root / "processor", config.max_prompt_tokens)
    encoder = load_encoder(root, config.device, dtype, tokenizer)
    if encoder.model.config.text_config.hidden_size != checkpoint.transformer.context_in_dim:
        raise CheckpointError(f"{root}: text_encoder and transformer disagree about the width of the text")
    image_codec = load_vae(root / "vae", config.device, dtype)
    if image_codec.num_channels != checkpoint.transformer.in_channels:
        raise CheckpointError(f"{root}: vae and transformer disagree about the number of latent channels")
    return QwenImage21(checkpoint, transformer.eval(), encoder, image_codec, config)


def _skeleton(config: TransformerConfig) -> QwenImage21Transformer:
    with torch.device("meta"):
        return QwenImage21Transformer(config)
