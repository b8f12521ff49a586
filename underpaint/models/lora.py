"""Low-rank updates (LoRA), fused into the weights while they are loaded.

A file names the module of the network and the part: ``<module>.lora_down.weight``, ``.lora_up.weight`` and perhaps
``.alpha`` as kohya's tools and the published distillations do, ``.lora_A.weight`` and ``.lora_B.weight`` as PEFT and
diffusers do, perhaps with the adapter's name ``default`` before ``weight``. Before the module may stand
``transformer.``, ``diffusion_model.``, or ``lora_unet_`` with underscores for dots. diffusers keeps alpha in the file's
metadata. A fused weight is ``weight + strength * alpha / rank * up @ down``, where alpha is the rank unless something
says it, summed in fp32 one tensor at a time: all updates of an 8B model at once would take 15 GiB beside it.
"""

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from underpaint.errors import BadConfig, CheckpointError
from underpaint.kv.codec import E4M3

DOWN, UP, ALPHA = "lora_down.weight", "lora_up.weight", "alpha"
PARTS = {
    DOWN: DOWN, "lora_A.weight": DOWN, "lora_A.default.weight": DOWN,
    UP: UP, "lora_B.weight": UP, "lora_B.default.weight": UP, ALPHA: ALPHA,
}  # fmt: skip
PREFIXES = ("transformer.", "diffusion_model.", "lora_unet_")
DIFFUSERS_METADATA = "lora_adapter_metadata"
UNSUPPORTED = ("use_rslora", "use_dora", "lora_bias", "alpha_pattern")
"""What PEFT's metadata may turn on, and would change the formula."""


@dataclass(frozen=True)
class LoraSpec:
    """A file and how strongly to apply it."""

    path: Path
    strength: float = 1.0

    @classmethod
    def parse(cls, text: str) -> "LoraSpec":
        """``FILE`` or ``FILE=STRENGTH``; ``~`` is the home. Raises BadConfig for a strength that is not finite."""
        path, equals, strength = text.rpartition("=")
        try:
            value = float(strength) if equals else 1.0
        except ValueError:  # the file's name has the sign in it
            equals, value = "", 1.0
        if not math.isfinite(value):
            raise BadConfig(f"lora {text}: the strength must be a finite number")
        path = os.path.expanduser(path if equals else text)  # no shell does it for a file of options
        return cls(Path(path), value)


class Lora:
    """The updates of one file, by the name of the weight that each changes. Tensors are read when they are fused."""

    def __init__(self, spec: LoraSpec, updates: dict[str, dict[str, str]], alpha: float | None) -> None:
        self.spec = spec
        self._updates = updates  # weight name -> part -> name in the file
        self._alpha = alpha

    @classmethod
    def open(cls, spec: LoraSpec, weight_names: Iterable[str]) -> "Lora":
        """Match a file to the weights of a whole network. Raises CheckpointError for anything that matches none."""
        modules = {name.removesuffix(".weight"): name for name in weight_names if name.endswith(".weight")}
        modules |= {module.replace(".", "_"): name for module, name in modules.items()}
        names, metadata = _read_header(spec.path)
        updates: dict[str, dict[str, str]] = {}
        for key in names:
            module, part = _split(key)
            if part is None or module not in modules:
                raise CheckpointError(f"{spec.path}: {key} belongs to no weight of this model")
            updates.setdefault(modules[module], {})[part] = key
        for weight, parts in updates.items():
            if missing := {DOWN, UP} - parts.keys():
                raise CheckpointError(f"{spec.path}: {weight} has no {', '.join(sorted(missing))}")
        return cls(spec, updates, _alpha(spec.path, metadata))

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
            down, up = (file.get_tensor(parts[part]).float() for part in (DOWN, UP))
            rank = down.shape[0]
            alpha = float(file.get_tensor(parts[ALPHA])) if ALPHA in parts else self._alpha
        # Flattened, a convolution's update is a product of matrices as well.
        if up.flatten(1).shape != (weight.shape[0], rank) or down.numel() != rank * weight[0].numel():
            shapes = f"{tuple(up.shape)} x {tuple(down.shape)}"
            raise CheckpointError(f"{self.spec.path}: {shapes} does not fit {name} of shape {tuple(weight.shape)}")
        delta = (up.flatten(1) @ down.flatten(1)).reshape(weight.shape)
        scale = 1.0 if alpha is None else alpha / rank
        return weight.float() + self.spec.strength * scale * delta


def open_all(texts: Sequence[str], weight_names: Iterable[str]) -> list[Lora]:
    """The files of ``EngineConfig.lora``, matched to the weights of a whole network. Raises CheckpointError."""
    names = list(weight_names)
    return [Lora.open(LoraSpec.parse(text), names) for text in texts]


def fuse_all(loras: Sequence[Lora], name: str, weight: Tensor) -> Tensor:
    """``weight`` with the updates of all, in order. Raises CheckpointError."""
    for lora in loras:
        weight = lora.fuse(name, weight)
    return weight


def _read_header(path: Path) -> tuple[list[str], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys()), file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is missing, damaged or not a safetensors file: {error}") from error


def _alpha(path: Path, metadata: dict[str, str]) -> float | None:
    """What diffusers wrote of the adapter, if it did; keys begin with the part of the pipeline."""
    try:
        written: dict[str, Any] = json.loads(metadata.get(DIFFUSERS_METADATA, "{}"))
        adapter = {key.removeprefix("transformer."): value for key, value in written.items()}
        alpha = float(adapter["lora_alpha"]) if "lora_alpha" in adapter else None
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: {DIFFUSERS_METADATA} cannot be read: {error}") from error
    if turned_on := [key for key in UNSUPPORTED if adapter.get(key)]:
        raise CheckpointError(f"{path}: {', '.join(turned_on)} of PEFT is not supported")
    return alpha


def _split(key: str) -> tuple[str, str | None]:
    for prefix in PREFIXES:
        key = key.removeprefix(prefix)
    for suffix, part in PARTS.items():
        if key.endswith(f".{suffix}"):
            return key.removesuffix(f".{suffix}"), part
    return key, None
