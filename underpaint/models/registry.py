"""Which family a checkpoint belongs to."""

from pathlib import Path

from underpaint.config import EngineConfig
from underpaint.errors import CheckpointError
from underpaint.models import qwen_image21
from underpaint.models.loading import read_json

__all__ = ["inspect", "load"]


def inspect(root: Path) -> qwen_image21.Checkpoint:
    """Check a checkpoint directory without loading it. Raises CheckpointError."""
    _check_family(root)
    return qwen_image21.inspect(root)


def load(root: Path, config: EngineConfig) -> qwen_image21.QwenImage21:
    """Load a checkpoint directory with a resolved config. Raises CheckpointError."""
    _check_family(root)
    return qwen_image21.load(root, config)


def _check_family(root: Path) -> None:
    name = read_json(root / "model_index.json").get("_class_name")
    if name != "QwenImage21Pipeline":
        raise CheckpointError(f"{root} holds a {name!r}; the supported family is QwenImage21Pipeline")
