"""Which family a checkpoint belongs to."""

from collections.abc import Sequence
from pathlib import Path

from underpaint.config import EngineConfig
from underpaint.errors import CheckpointError
from underpaint.models import neo_unify, qwen_image21
from underpaint.models.loading import read_json
from underpaint.models.lora import Lora, open_all
from underpaint.models.roles import BOTH_ROLES, Role

__all__ = ["inspect", "load", "num_bytes", "open_loras"]

Checkpoint = qwen_image21.Checkpoint | neo_unify.Checkpoint
Model = qwen_image21.QwenImage21 | neo_unify.NeoUnify


def inspect(root: Path) -> Checkpoint:
    """Check a checkpoint directory without loading it. Raises CheckpointError."""
    return neo_unify.inspect(root) if _is_neo_unify(root) else qwen_image21.inspect(root)


def load(root: Path, config: EngineConfig, roles: frozenset[Role] = BOTH_ROLES) -> Model:
    """Load what ``roles`` need of a checkpoint directory, with a resolved config. Raises CheckpointError."""
    family = neo_unify if _is_neo_unify(root) else qwen_image21
    return family.load(root, config, roles)


def open_loras(checkpoint: Checkpoint, lora: Sequence[str]) -> list[Lora]:
    """The files of ``EngineConfig.lora``, matched to the network that they change; no tensor is read. Raises
    CheckpointError or BadConfig."""
    if isinstance(checkpoint, neo_unify.Checkpoint):
        return open_all(lora, neo_unify.skeleton(checkpoint.config).state_dict())
    return open_all(lora, qwen_image21.skeleton(checkpoint.transformer).state_dict())


def num_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of all weights of a checkpoint, as they are stored."""
    weights = checkpoint.weights
    return sum(part.num_bytes for part in (weights.values() if isinstance(weights, dict) else [weights]))


def _is_neo_unify(root: Path) -> bool:
    """By ``model_index.json``, which pipelines have, or else ``config.json``, which single models have."""
    if not (root / "model_index.json").exists() and (root / "config.json").exists():
        kind = read_json(root / "config.json").get("model_type")
        if kind != "neo_chat":
            raise CheckpointError(f"{root} holds a {kind!r}; the supported model is neo_chat (SenseNova-U1)")
        return True
    name = read_json(root / "model_index.json").get("_class_name")
    if name != "QwenImage21Pipeline":
        raise CheckpointError(f"{root} holds a {name!r}; the supported pipeline is QwenImage21Pipeline")
    return False
