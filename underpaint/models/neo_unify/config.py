"""``config.json`` of NEO-Unify, checked key by key.

A released file mixes what defines the network, what training used, and what transformers writes into every config. The
first becomes a field of a dataclass here, or must have the one value that is implemented; the others are listed by
name and not read. Any further key is refused: it may be something that changes the picture.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from underpaint.errors import CheckpointError
from underpaint.models.loading import read_json
from underpaint.models.roles import Role

T = TypeVar("T")

CELL = 32
"""Side in pixels of the square that is one token of an image: 2 x 2 patches of 16 x 16 pixels."""
PATCH = 16
CELL_VALUES = CELL * CELL * 3
MAX_SIDE = 4096
"""The longest side that is painted, in pixels."""


@dataclass(frozen=True)
class FeedForward:
    """One role's feed-forward layer: ``width`` of a unit, and how many units there are. Dense: ``num_experts`` is 0.

    ``renormalise``: the weights of the ``num_chosen`` experts of a row are scaled to add up to 1.
    """

    width: int
    num_experts: int = 0
    num_chosen: int = 0
    renormalise: bool = True


@dataclass(frozen=True)
class LanguageConfig:
    """``llm_config``; the defaults are the released 8B. Fields that begin with ``gen_`` are the generation role's,
    0 stands for the same as the understanding role's."""

    model_type: str = "qwen3"
    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_hidden_layers: int = 42
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    rms_norm_eps: float = 1e-6
    rope_theta: float = 5e6
    rope_theta_hw: float = 1e4
    max_position_embeddings: int = 262144
    num_experts: int = 0
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768
    gen_num_experts: int = 0
    gen_num_experts_per_tok: int = 0
    gen_moe_intermediate_size: int = 0
    norm_topk_prob: bool = True

    @property
    def rotary_axes(self) -> tuple[int, int, int]:
        """Channels of a head that turn with t, height and width."""
        return self.head_dim // 2, self.head_dim // 4, self.head_dim // 4

    def feed_forward(self, role: Role) -> FeedForward:
        """Mixture of experts if there is more than one expert."""
        if self.num_experts <= 1:
            return FeedForward(self.intermediate_size)
        understand = FeedForward(
            self.moe_intermediate_size, self.num_experts, self.num_experts_per_tok, self.norm_topk_prob
        )
        if role is Role.UNDERSTAND:
            return understand
        return FeedForward(
            self.gen_moe_intermediate_size or understand.width,
            self.gen_num_experts or understand.num_experts,
            self.gen_num_experts_per_tok or understand.num_chosen,
            understand.renormalise,
        )


@dataclass(frozen=True)
class VisionConfig:
    """``vision_config``. ``min_pixels`` and ``max_pixels`` bound a picture that is only asked about."""

    hidden_size: int = 1024
    llm_hidden_size: int = 4096
    rope_theta_vision: float = 1e4
    min_pixels: int = 65536
    max_pixels: int = 4194304


@dataclass(frozen=True)
class FlowConfig:
    """The top level: how noise is scaled."""

    noise_scale: float = 1.0
    noise_scale_base_image_seq_len: int = 64
    noise_scale_max_value: float = 8.0


@dataclass(frozen=True)
class NeoConfig:
    """The whole. ``head_width``: channels between the layers of U1's two-layer head; None: U1.5's convolutions."""

    language: LanguageConfig
    vision: VisionConfig
    flow: FlowConfig
    head_width: int | None


@dataclass(frozen=True)
class _Schema:
    """The keys of one part of the file beside the fields of its dataclass. ``fixed``: keys with one implemented value,
    which they have when absent as well. ``unread``: keys that may hold anything."""

    fixed: Mapping[str, Any]
    unread: frozenset[str]


# What transformers writes into every config, and defaults of training and of sampling.
_BOOKKEEPING = frozenset({
    "architectures", "auto_map", "torch_dtype", "dtype", "transformers_version", "return_dict", "output_attentions",
    "output_hidden_states", "use_cache", "initializer_range", "attention_dropout", "bos_token_id", "eos_token_id",
    "pad_token_id", "id2label", "label2id", "max_length", "num_beams", "num_beam_groups", "num_return_sequences",
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
})  # fmt: skip
_LANGUAGE = _Schema(
    fixed={
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "rope_scaling": None,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "pure_llm": False,
    },
    # Angles are computed, so no table of hw positions limits them; extra_num_layers are counted in num_hidden_layers;
    # use_deepep is how training sent rows to experts.
    unread=_BOOKKEEPING
    | {"sliding_window", "max_window_layers", "layer_types", "extra_num_layers", "max_position_embeddings_hw"}
    | {"router_aux_loss_coef", "output_router_logits", "use_deepep"},
)
_VISION = _Schema(
    fixed={"model_type": "neo_vision", "num_channels": 3, "patch_size": PATCH, "downsample_ratio": PATCH / CELL},
    unread=_BOOKKEEPING | {"max_position_embeddings_vision", "tie_word_embeddings"},
)
_TOP = _Schema(
    fixed={
        "model_type": "neo_chat",
        "template": "neo1_0",
        "patch_size": PATCH,
        "downsample_ratio": PATCH / CELL,
        "tie_word_embeddings": False,
        "fm_head_layers": 2,
        "use_adaLN": False,
        "extra_num_layers_post": 0,
        "concat_time_token_num": 0,
        "noise_scale_mode": "resolution",
        "add_noise_scale_embedding": True,
        "time_schedule": "standard",
        "use_backbone_lora": 0,
        "use_llm_lora": 0,
    },
    # t_eps and timestep_shift are training's; inference has its own, see flow.py. The sizes of the head are read from
    # its weights, and so is its kind, which repacked files do not always say (use_pixel_head); fm_head_dim and
    # fm_head_mlp_ratio describe deeper heads than any released one.
    unread=_BOOKKEEPING
    | {"llm_config", "vision_config", "min_pixels", "max_pixels", "timestep_shift", "time_shift_type", "base_shift"}
    | {"max_shift", "base_image_seq_len", "max_image_seq_len", "P_mean", "P_std", "t_eps"}
    | {"use_pixel_head", "fm_head_dim", "fm_head_mlp_ratio", "fm_head_hidden"},
)


def read_neo_config(path: Path, head_width: int | None) -> NeoConfig:
    """The config of a checkpoint; ``head_width`` is what its weights say, see ``NeoConfig``.

    Raises CheckpointError for unknown keys, unsupported or wrongly typed values, and parts that disagree.
    """
    top = read_json(path)
    language, vision = (_part(top, path, name) for name in ("llm_config", "vision_config"))
    for key in vision.keys() & {"llm_hidden_size", "downsample_ratio"}:  # the published class saves these in a list
        vision[key] = vision[key][0] if isinstance(vision[key], list) and len(vision[key]) == 1 else vision[key]
    config = NeoConfig(
        _parse(f"{path}: llm_config", language, LanguageConfig, _LANGUAGE),
        _parse(f"{path}: vision_config", vision, VisionConfig, _VISION),
        _parse(f"{path}", top, FlowConfig, _TOP),
        head_width,
    )
    _check(config, path)
    return config


def config_values(config: NeoConfig) -> dict[str, Any]:
    """What ``config.json`` says of a config; ``read_neo_config`` reads the same from it."""
    return {
        **_TOP.fixed,
        **asdict(config.flow),
        "llm_config": {**_LANGUAGE.fixed, **asdict(config.language)},
        "vision_config": {**_VISION.fixed, **asdict(config.vision)},
    }


def _part(values: Mapping[str, Any], path: Path, name: str) -> dict[str, Any]:
    part = values.get(name)
    if not isinstance(part, dict):
        raise CheckpointError(f"{path}: {name} is missing")
    return part


def _parse(where: str, values: Mapping[str, Any], cls: Callable[..., T], schema: _Schema) -> T:
    """Keys that begin with an underscore are their writer's own. An unknown one that is off says nothing: training
    writes keys of its other models too (``use_deepep: false``)."""
    values = {key: value for key, value in values.items() if not key.startswith("_")}
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    unknown = values.keys() - known.keys() - schema.fixed.keys() - schema.unread
    if unknown := {key for key in unknown if values[key]}:
        raise CheckpointError(f"{where}: unknown keys: {', '.join(sorted(unknown))}")
    for key in schema.fixed.keys() & values.keys():
        if values[key] != schema.fixed[key]:
            raise CheckpointError(f"{where}: {key} must be {schema.fixed[key]!r}, {values[key]!r} is not supported")
    chosen = {key: values[key] for key in known.keys() & values.keys()}
    for key, value in chosen.items():
        kind = type(known[key].default)
        if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool) != (kind is bool):
            raise CheckpointError(f"{where}: {key} must be of type {kind.__name__}, not {value!r}")
    return cls(**chosen)


def _check(config: NeoConfig, path: Path) -> None:
    language = config.language
    if "moe" in language.model_type and language.num_experts <= 1:
        raise CheckpointError(f"{path}: llm_config: model_type is {language.model_type!r}, but num_experts is missing")
    if config.vision.llm_hidden_size != language.hidden_size:
        raise CheckpointError(f"{path}: vision_config and llm_config disagree about the width of a row")
    if language.head_dim % 8 or language.num_attention_heads % language.num_key_value_heads:
        raise CheckpointError(f"{path}: llm_config: the heads cannot be divided over rotary axes and key-value heads")
