"""Qwen-Image 2.1 as one object: everything a checkpoint directory holds, and what it can do."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from underpaint.config import EngineConfig
from underpaint.errors import BadImage, CheckpointError
from underpaint.images import MAX_ASPECT_RATIO, fit_to_area
from underpaint.kv.content import ContentCache
from underpaint.kv.pool import CacheShape
from underpaint.kv.tree import Key
from underpaint.layout import Grid, Layout, qwen_positions
from underpaint.models import fp8
from underpaint.models.fusing import can_fuse
from underpaint.models.loading import Defaults, Weights, read_config, read_defaults, read_json
from underpaint.models.lora import open_all
from underpaint.models.offload import check_host, stream
from underpaint.models.painter import Attend, Target, Targets, rows_bytes, run_pass
from underpaint.models.qwen_image21.condition import Condition, Reference, content_of, make_condition
from underpaint.models.qwen_image21.encoder import TextEncoder, load_encoder, load_tokenizer, scan_encoder
from underpaint.models.qwen_image21.frames import can_fuse as can_fuse_frames
from underpaint.models.qwen_image21.transformer import (
    QwenImage21Transformer,
    TransformerConfig,
    rotary_table,
    round_timestep,
)
from underpaint.models.qwen_image21.vae import ImageCodec, load_vae, peak_bytes, scan_vae
from underpaint.models.roles import BOTH_ROLES, Role
from underpaint.models.rotations import Rotations
from underpaint.sampling.schedule import ScheduleRule, check_sigmas

SIZE_MULTIPLE = 32
MAX_SIDE = 4096
MAX_REFERENCES = 10
BLOCKS = "transformer_blocks"
PARTS = ("scheduler", "vae", "text_encoder", "processor", "transformer")
PARTS_OF = {Role.UNDERSTAND: frozenset({"encoder", "vae"}), Role.GENERATE: frozenset({"dit"})}
"""What a role loads, by the names of ``EngineConfig.offload``."""


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
    transformer.check(skeleton(config, transformer.quantised).state_dict())
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


@dataclass(frozen=True, eq=False)
class Parts:
    """What is loaded of a checkpoint: understanding needs encoder and image codec, generation the transformer."""

    transformer: QwenImage21Transformer | None
    encoder: TextEncoder | None
    image_codec: ImageCodec | None


class QwenImage21:
    """The loaded parts. Stateless but for the cache of VAE latents, keyed by the pixels of references, and a table of
    rotations."""

    def __init__(self, checkpoint: Checkpoint, parts: Parts, config: EngineConfig) -> None:
        self.checkpoint = checkpoint
        self._parts = parts
        self._device = config.device
        self.schedule_rule = ScheduleRule(read_json(checkpoint.root / "scheduler" / "scheduler_config.json"))
        self.latents = ContentCache(config.latent_cache_bytes)
        self.cache_shape = cache_shape(checkpoint.transformer, config.torch_dtype)
        self.shared_heads = 1
        axes = checkpoint.transformer.axes_dims_rope
        self._rotations = Rotations(partial(rotary_table, axes=axes), [dim // 2 for dim in axes], config.device)
        identity = repr((str(checkpoint.root.resolve()), config.dtype, config.kv_codec, config.quantize, config.lora))
        self._root_key: Key = hashlib.sha256(identity.encode()).digest()

    @property
    def transformer(self) -> QwenImage21Transformer:
        assert self._parts.transformer is not None, "this process does not generate"
        return self._parts.transformer

    @property
    def encoder(self) -> TextEncoder:
        assert self._parts.encoder is not None, "this process does not understand"
        return self._parts.encoder

    @property
    def image_codec(self) -> ImageCodec:
        assert self._parts.image_codec is not None, "this process does not understand"
        return self._parts.image_codec

    def reference_size(self, image: Image.Image, resolution: int, name: str = "a reference") -> tuple[int, int]:
        """Width and height at which a reference is read. Raises BadImage, naming ``name``: once sides are rounded they
        may differ by more than those of the picture, and the encoder's processor refuses that."""
        width, height = fit_to_area(*image.size, resolution, SIZE_MULTIPLE)
        if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
            raise BadImage(
                f"{name} is {image.width}x{image.height}, which would be read at {width}x{height}; there, too, "
                f"sides may differ by a factor of {MAX_ASPECT_RATIO} at most",
                param="images",
            )
        return width, height

    def reference(self, image: Image.Image, resolution: int) -> Reference:
        """Resize an upright RGBA picture to the area ``resolution`` squared and encode it; one resize feeds both the
        text encoder and the VAE, as in diffusers."""
        size = self.reference_size(image, resolution)
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
                    parts.append(self.transformer.img_in(condition.latents[image]))
                image += 1
        return torch.cat(parts)

    def pass_bytes(self, config: EngineConfig) -> int:
        """What the largest pass takes beside weights and pages, and the VAE, which may work at the same time."""
        codec = self._parts.image_codec
        return _rows_bytes(self.checkpoint.transformer, config) + (codec.peak_bytes if codec else 0)

    @property
    def num_channels(self) -> int:
        return self.checkpoint.transformer.in_channels

    @property
    def num_hidden(self) -> int:
        return self.checkpoint.transformer.hidden_size

    @property
    def capturable(self) -> bool:
        return True

    def grid_level(self, grid: Grid) -> float:
        return 0.0

    def prefill(self, prefix_rows: Tensor, rotary: Tensor, attend: Attend) -> None:
        """Of prefix rows (rows, hidden_size), which are at t = 0."""
        self.transformer.prefill(prefix_rows, rotary, attend)

    def paint(self, prefix_rows: Tensor, targets: Targets, rotary: Tensor, attend: Attend) -> Tensor:
        """Prefix rows at t = 0, and then the targets' rows, each at its own sigma; (rows, channels), their velocity."""
        rows = self.transformer.img_in(targets.state)
        num_prefix_rows, num_targets = len(prefix_rows), len(targets.levels)
        row_timestep = targets.target if num_targets > 1 else None
        if num_prefix_rows:
            rows = torch.cat([prefix_rows.to(rows.dtype), rows])
            # One past the timesteps: t = 0.
            row_timestep = torch.cat([targets.target.new_full((num_prefix_rows,), num_targets), targets.target])
        timesteps = round_timestep(targets.levels[:, 0], rows.dtype)
        return self.transformer(rows, rotary, timesteps, row_timestep, attend)[num_prefix_rows:]

    def predict(self, hidden: Tensor, targets: Targets) -> Tensor:
        return hidden

    def run(self, prefix_rows: Tensor, targets: Sequence[Target], rotary: Tensor, attend: Attend) -> list[Tensor]:
        """See ``run_pass``."""
        return run_pass(self, prefix_rows, targets, rotary, attend, self._device)

    def rotary(self, layout: Layout, start: int, stop: int) -> Tensor:
        """(rows, head_dim / 2) complex64 for rows [start, stop), on the model's device."""
        return self._rotations.rows(qwen_positions(layout)[start:stop])


def cache_shape(config: TransformerConfig, dtype: torch.dtype) -> CacheShape:
    return CacheShape(config.num_layers, config.num_attention_heads, config.attention_head_dim, dtype)


def part_bytes(checkpoint: Checkpoint, config: EngineConfig) -> dict[str, int]:
    """What the weights of each part take once they are loaded, by the names of ``EngineConfig.offload``."""
    quantised = config.quantize == "fp8" or checkpoint.weights["transformer"].quantised
    transformer = skeleton(checkpoint.transformer, quantised)
    itemsize = config.torch_dtype.itemsize
    return {
        "encoder": checkpoint.weights["text_encoder"].num_parameters * itemsize,
        "vae": checkpoint.weights["vae"].num_parameters * itemsize,
        "dit": sum(fp8.bytes_of(name, x, config.torch_dtype) for name, x in transformer.state_dict().items()),
    }


def _rows_bytes(sizes: TransformerConfig, config: EngineConfig) -> int:
    return rows_bytes(config.max_batch_rows, sizes.hidden_size, sizes.hidden_size * sizes.mlp_ratio, config)


def pass_bytes(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """As ``QwenImage21.pass_bytes``, before anything is loaded."""
    vae_config = read_json(checkpoint.root / "vae" / "config.json")
    of_vae = peak_bytes(vae_config, config.torch_dtype, can_fuse_frames(config.device))
    visiting = part_bytes(checkpoint, config)["vae"] if "vae" in config.offloaded else 0
    return _rows_bytes(checkpoint.transformer, config) + of_vae + visiting


def device_bytes(checkpoint: Checkpoint, config: EngineConfig) -> dict[str, int]:
    """What of the weights of each part is always on the device: of a streamed stack two layers, and what is outside."""
    of_part = part_bytes(checkpoint, config)
    itemsize = config.torch_dtype.itemsize
    encoder = {name: info.num_elements * itemsize for name, info in checkpoint.weights["text_encoder"].tensors.items()}
    dit = skeleton(checkpoint.transformer, config.quantize == "fp8" or checkpoint.weights["transformer"].quantised)
    transformer = {name: fp8.bytes_of(name, x, config.torch_dtype) for name, x in dit.state_dict().items()}
    if "encoder" in config.offloaded:
        of_part["encoder"] = _streamed_bytes(encoder, "model.language_model.layers.")
    if "dit" in config.offloaded:
        of_part["dit"] = _streamed_bytes(transformer, f"{BLOCKS}.")
    if "vae" in config.offloaded:
        of_part["vae"] = 0
    return of_part


def _streamed_bytes(tensors: dict[str, int], layers: str) -> int:
    of_layer: Counter[str] = Counter()
    for name, num_bytes in tensors.items():
        if name.startswith(layers):
            of_layer[name.removeprefix(layers).partition(".")[0]] += num_bytes
    outside = sum(tensors.values()) - of_layer.total()
    return outside + 2 * max(of_layer.values())


def load(root: Path, config: EngineConfig, roles: frozenset[Role] = BOTH_ROLES) -> QwenImage21:
    """Load what ``roles`` need of a checkpoint directory; ``config`` is resolved. Raises CheckpointError."""
    checkpoint = inspect(root)
    loras = open_all(config.lora, skeleton(checkpoint.transformer).state_dict())  # before anything takes long
    of_part = part_bytes(checkpoint, config)
    own = frozenset[str]().union(*(PARTS_OF[role] for role in roles))  # the others are another process's
    check_host({part: of_part[part] for part in sorted(config.offloaded & own)})
    dtype, encoder, image_codec, transformer = config.torch_dtype, None, None, None
    if Role.UNDERSTAND in roles:
        tokenizer = load_tokenizer(root / "processor", config.max_prompt_tokens)
        encoder = load_encoder(root, config.device, dtype, tokenizer, "encoder" in config.offloaded)
        if encoder.model.config.text_config.hidden_size != checkpoint.transformer.context_in_dim:
            raise CheckpointError(f"{root}: text_encoder and transformer disagree about the width of the text")
        image_codec = load_vae(root / "vae", config.device, dtype, "vae" in config.offloaded)
        if image_codec.num_channels != checkpoint.transformer.in_channels:
            raise CheckpointError(f"{root}: vae and transformer disagree about the number of latent channels")
    if Role.GENERATE in roles:
        stored = checkpoint.weights["transformer"]
        transformer = skeleton(checkpoint.transformer, fp8.wanted(config, stored.quantised))
        stored.load_into(transformer, "cpu" if "dit" in config.offloaded else config.device, dtype, loras)
        transformer.eval()
        if "dit" in config.offloaded:
            stream(transformer, transformer.transformer_blocks, config.device)
        elif can_fuse(config.device, checkpoint.transformer.attention_head_dim):
            transformer.fuse()
    return QwenImage21(checkpoint, Parts(transformer, encoder, image_codec), config)


def skeleton(config: TransformerConfig, quantised: bool = False) -> QwenImage21Transformer:
    """The transformer without memory, for its names and shapes. ``quantised``: with its blocks in e4m3."""
    with torch.device("meta"):
        transformer = QwenImage21Transformer(config)
    if quantised:
        fp8.prepare(transformer, BLOCKS)
    return transformer
