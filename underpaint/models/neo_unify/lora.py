"""Low-rank updates in kohya's naming, fused into the weights while they are loaded.

The published 8-step distillation names the modules of the network as they are:
``language_model.model.layers.0.self_attn.q_proj_mot_gen.lora_down.weight``, ``.lora_up.weight`` and ``.alpha``. Other
tools put ``diffusion_model.`` before, or ``lora_unet_`` with underscores for dots. A fused weight is
``weight + strength * alpha / rank * up @ down``, summed in fp32 one tensor at a time: all updates at once would take
15 GiB beside an 8B model.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from underpaint.errors import CheckpointError
from underpaint.kv.codec import E4M3

PARTS = ("lora_down.weight", "lora_up.weight", "alpha")
PREFIXES = ("diffusion_model.", "lora_unet_")


@dataclass(frozen=True)
class LoraSpec:
    """A LoRA file and how strongly to apply it."""

    path: Path
    strength: float = 1.0


class Lora:
    """The updates of one file, by the name of the weight that each changes. Tensors are read when they are fused."""

    def __init__(self, spec: LoraSpec, updates: dict[str, dict[str, str]]) -> None:
        self.spec = spec
        self._updates = updates  # weight name -> part -> name in the file

    @classmethod
    def open(cls, spec: LoraSpec, weight_names: Iterable[str]) -> "Lora":
        """Match a file to the weights of a whole network. Raises CheckpointError for anything that matches none."""
        modules = {name.removesuffix(".weight"): name for name in weight_names if name.endswith(".weight")}
        modules |= {module.replace(".", "_"): name for module, name in modules.items()}
        updates: dict[str, dict[str, str]] = {}
        for key in _names(spec.path):
            module, part = _split(key)
            if part is None or module not in modules:
                raise CheckpointError(f"{spec.path}: {key} belongs to no weight of this model")
            updates.setdefault(modules[module], {})[part] = key
        for weight, parts in updates.items():
            if missing := {*PARTS[:2]} - parts.keys():
                raise CheckpointError(f"{spec.path}: {weight} has no {', '.join(sorted(missing))}")
        return cls(spec, updates)

    @property
    def weight_names(self) -> frozenset[str]:
        return frozenset(self._updates)

    def fuse(self, name: str, weight: Tensor) -> Tensor:
        """``weight`` with its update, in fp32; or as it is, if it has none. Raises CheckpointError."""
        if name not in self._updates:
            return weight
        if weight.dtype == E4M3:
            raise CheckpointError(f"{self.spec.path} changes {name}, which is in e4m3; fuse first, then quantise")
        parts = self._updates[name]
        with safe_open(self.spec.path, framework="pt", device=str(weight.device)) as file:
            down, up = (file.get_tensor(parts[part]).float() for part in PARTS[:2])
            rank = down.shape[0]
            alpha = float(file.get_tensor(parts["alpha"])) if "alpha" in parts else float(rank)
        # Flattened, a convolution's update is a product of matrices as well.
        if up.flatten(1).shape != (weight.shape[0], rank) or down.numel() != rank * weight[0].numel():
            shapes = f"{tuple(up.shape)} x {tuple(down.shape)}"
            raise CheckpointError(f"{self.spec.path}: {shapes} does not fit {name} of shape {tuple(weight.shape)}")
        delta = (up.flatten(1) @ down.flatten(1)).reshape(weight.shape)
        return weight.float() + self.spec.strength * alpha / rank * delta


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is missing, damaged or not a safetensors file: {error}") from error


def _split(key: str) -> tuple[str, str | None]:
    for prefix in PREFIXES:
        key = key.removeprefix(prefix)
    for part in PARTS:
        if key.endswith(f".{part}"):
            return key.removesuffix(f".{part}"), part
    return key, None
