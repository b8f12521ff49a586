"""What a checkpoint is and needs, from its headers alone."""

from dataclasses import replace

import torch

from underpaint.config import EngineConfig
from underpaint.kv.codec import CODECS
from underpaint.kv.pool import CacheShape
from underpaint.kv.tile_codec import FP8_TILES, AnyCodec
from underpaint.models import neo_unify, registry
from underpaint.models.loading import Weights
from underpaint.models.neo_unify import model as neo_model
from underpaint.models.qwen_image21 import model as qwen_model
from underpaint.models.qwen_image21.model import MAX_REFERENCES, MAX_SIDE, SIZE_MULTIPLE
from underpaint.report import Bytes, Cell, Report, Table, cell


def describe(checkpoint: registry.Checkpoint, config: EngineConfig) -> Report:
    """Parts, parameters, bytes, page size and limits of a checkpoint, from its headers."""
    if isinstance(checkpoint, neo_unify.Checkpoint):
        return _describe_neo(checkpoint, config)
    transformer, defaults = checkpoint.transformer, checkpoint.defaults
    parts = [_part(name, weights) for name, weights in checkpoint.weights.items()]
    tensors, parameters, num_bytes = (sum(int(part[i]) for part in parts) for i in (1, 2, 3))
    total = ("total", tensors, parameters, Bytes(num_bytes))
    resolution = defaults.reference_resolution
    tokens = (resolution // 16) ** 2
    steps = len(checkpoint.sample_sigmas or ()) or defaults.num_inference_steps
    limits: list[tuple[Cell, ...]] = [
        ("width and height", f"multiples of {SIZE_MULTIPLE}, {SIZE_MULTIPLE} to {MAX_SIDE}"),
        ("references", f"up to {MAX_REFERENCES}"),
        ("prompt", f"{config.max_prompt_tokens} tokens (max_prompt_tokens)"),
        ("default resolution", f"{resolution}x{resolution}, {tokens} tokens"),
        ("default steps", steps),
    ]
    shape = CacheShape(
        transformer.num_layers, transformer.num_attention_heads, transformer.attention_head_dim, torch.bfloat16
    )
    return Report(
        (f"{checkpoint.root}: Qwen-Image 2.1, {transformer.num_layers} layers",),
        (
            Table("Parts", PART_COLUMNS, [*parts, total]),
            _codecs(
                shape,
                defaults.page_rows,
                f"a {resolution}x{resolution} reference",
                tokens,
                [*CODECS.values(), FP8_TILES],
            ),
            Table("Limits", ("what", "limit"), limits),
        ),
    )


PART_COLUMNS = ("part", "tensors", "parameters", "bytes")


def _describe_neo(checkpoint: neo_unify.Checkpoint, config: EngineConfig) -> Report:
    """A process for one role holds that role's part; the embedding and the head of words are in both."""
    language, defaults = checkpoint.config.language, checkpoint.defaults
    roles = {
        "understanding alone": frozenset({neo_unify.Role.UNDERSTAND}),
        "generation alone": frozenset({neo_unify.Role.GENERATE}),
        "both": neo_unify.BOTH_ROLES,
    }
    parts = [_part(name, neo_unify.inspect(checkpoint.root, role).weights) for name, role in roles.items()]
    resolution = defaults.reference_resolution
    tokens = (resolution // 32) ** 2
    limits: list[tuple[Cell, ...]] = [
        ("width and height", f"multiples of {neo_unify.CELL}, {neo_unify.CELL} to {neo_unify.MAX_SIDE}"),
        ("references", "up to 10"),
        ("prompt", f"{config.max_prompt_tokens} tokens (max_prompt_tokens)"),
        ("default resolution", f"{resolution}x{resolution}, {tokens} tokens"),
        ("default steps", defaults.num_inference_steps),
    ]
    shape = CacheShape(language.num_hidden_layers, language.num_key_value_heads, language.head_dim, torch.bfloat16)
    return Report(
        (f"{checkpoint.root}: SenseNova-U1 (NEO-Unify), {language.num_hidden_layers} layers",),
        (
            Table("Parts, by what a process is for", PART_COLUMNS, parts),
            _codecs(shape, defaults.page_rows, f"a {resolution}x{resolution} picture", tokens, [*CODECS.values()]),
            Table("Limits", ("what", "limit"), limits),
        ),
    )


CARD_OPTIONS: tuple[dict[str, str], ...] = (
    {},
    {"quantize": "fp8"},
    {"offload": "encoder,vae"},
    {"quantize": "fp8", "offload": "encoder,vae"},
    {"quantize": "fp8", "offload": "encoder,vae,dit"},
)
"""What ``on_card`` looks at, the fastest first."""
CARD_RESERVE = 1 << 30
"""For the CUDA context, libraries and fragments."""


def on_card(checkpoint: registry.Checkpoint, card_bytes: int, config: EngineConfig) -> Report:
    """What a GPU with ``card_bytes`` holds with each set of options, and the first that leaves room for pages of a
    reference. Counted, not measured; see ``cache_bytes``."""
    defaults, rows = checkpoint.defaults, list[tuple[Cell, ...]]()
    tokens = (defaults.reference_resolution // (32 if isinstance(checkpoint, neo_unify.Checkpoint) else 16)) ** 2
    advice = "nothing of this makes it fit: use a smaller max_batch_rows, or a larger card"
    for options in CARD_OPTIONS:
        if isinstance(checkpoint, neo_unify.Checkpoint) and "offload" in options:
            continue
        settled = replace(config, device="cuda", dtype="bfloat16", kv_codec="bf16", **options)  # type: ignore[arg-type]
        weights, passes, host, row_bytes = _needs(checkpoint, settled)
        left = card_bytes - CARD_RESERVE - weights - passes
        fits = left >= row_bytes * (tokens + config.max_prompt_tokens // 8)
        name = ", ".join(f"{key} {value}" for key, value in options.items()) or "as it is"
        if fits and advice.startswith("nothing"):
            advice = f"fits with: {name}"
        shown = (Bytes(weights), Bytes(passes), Bytes(max(left, 0)), max(left, 0) // (row_bytes * tokens), Bytes(host))
        rows.append((name, *shown, "yes" if fits else "no"))
    columns = ("options", "weights", "passes, VAE", "left for K/V", "references", "on the host", "fits")
    title = f"On a card with {cell(Bytes(card_bytes))}, bf16, max_batch_rows {config.max_batch_rows}"
    return Report((advice,), (Table(title, columns, rows),))


def _needs(checkpoint: registry.Checkpoint, config: EngineConfig) -> tuple[int, int, int, int]:
    """Bytes of weights on the device, of passes and the VAE, of weights on the host, and of a row of K/V."""
    codec = CODECS[config.kv_codec]
    if isinstance(checkpoint, neo_unify.Checkpoint):
        sizes = checkpoint.config.language
        shape = CacheShape(sizes.num_hidden_layers, sizes.num_key_value_heads, sizes.head_dim, config.torch_dtype)
        return (
            neo_model.device_bytes(checkpoint, config),
            neo_model.pass_bytes(sizes, config),
            0,
            shape.row_bytes(codec),
        )
    on_host = qwen_model.part_bytes(checkpoint, config)
    weights = sum(qwen_model.device_bytes(checkpoint, config).values())
    passes = qwen_model.pass_bytes(checkpoint, config)
    host = sum(on_host[part] for part in config.offloaded)
    return weights, passes, host, qwen_model.cache_shape(checkpoint.transformer, config.torch_dtype).row_bytes(codec)


def _part(name: str, weights: Weights) -> tuple[Cell, ...]:
    return name, len(weights.tensors), weights.num_parameters, Bytes(weights.num_bytes)


def _codecs(shape: CacheShape, page_rows: int, picture: str, tokens: int, codecs: list[AnyCodec]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for codec in codecs:
        page = shape.page_bytes(codec, page_rows)
        row = page // page_rows
        rows.append((codec.name, Bytes(row), Bytes(page), Bytes(row * tokens)))
    return Table(f"K/V cache, pages of {page_rows} rows", ("codec", "a row", "a page", picture), rows)
