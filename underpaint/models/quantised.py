"""Writing a checkpoint whose blocks are stored in e4m3, in the layout of the one it comes from.

Weights keep their names, and each has its scales beside it, under its name and ``_scale``. Such a directory loads like
any other; half the bytes of the blocks are read, and nothing is quantised at start.
"""

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from underpaint.errors import BadParameter
from underpaint.models import fp8, neo_unify, qwen_image21, registry
from underpaint.models.loading import Weights, read_json
from underpaint.models.lora import Lora, fuse_all


def write_quantised(root: Path, out: Path, lora: Sequence[str] = ()) -> None:
    """Copy the checkpoint at ``root`` to ``out`` with its blocks in e4m3, and ``lora`` (see ``EngineConfig``) fused
    before that.

    ``out`` appears whole or not at all; one shard is in memory at a time. Raises CheckpointError, or BadParameter if
    ``out`` exists or cannot be written, or if there is nothing to quantise.
    """
    checkpoint = registry.inspect(root)
    if isinstance(checkpoint, neo_unify.Checkpoint):
        weights, wanted = checkpoint.weights, neo_unify.skeleton(checkpoint.config, quantised=True).state_dict()
    else:
        weights = checkpoint.weights["transformer"]
        wanted = qwen_image21.skeleton(checkpoint.transformer, quantised=True).state_dict()
    loras = registry.open_loras(checkpoint, lora)
    if weights.quantised:
        raise BadParameter(f"{root} is stored in e4m3 already", param="model")
    if out.exists():
        raise BadParameter(f"{out} exists; name a directory that does not", param="out")
    try:
        with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
            written = Path(scratch) / "checkpoint"
            _write(root, written, weights, wanted, loras)
            written.rename(out)
    except OSError as error:
        raise BadParameter(f"{out} cannot be written: {error}", param="out") from error


def _write(root: Path, out: Path, weights: Weights, wanted: dict[str, Tensor], loras: Sequence[Lora]) -> None:
    files = sorted({info.file for info in weights.tensors.values()})
    shutil.copytree(root, out, ignore=lambda directory, names: [n for n in names if Path(directory) / n in files])
    part = out / weights.directory.relative_to(root)
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for file in files:
        state: dict[str, Tensor] = {}
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                stored = shard.get_tensor(name)
                state |= fp8.settle(name, fuse_all(loras, name, stored), wanted[name], stored.dtype)
        try:
            save_file({name: tensor.contiguous() for name, tensor in state.items()}, part / file.name, {"format": "pt"})
        except SafetensorError as error:  # what it makes of any OSError, such as a disk that is full
            raise OSError(str(error)) from error
        weight_map |= dict.fromkeys(state, file.name)
        num_bytes += sum(tensor.nbytes for tensor in state.values())
    for index in part.glob("*.safetensors.index.json"):
        facts = {**read_json(index), "metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        index.write_text(json.dumps(facts, indent=2, sort_keys=True), encoding="utf-8")
