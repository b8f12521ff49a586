"""Reading a checkpoint directory: strict about files, keys, shapes and dtypes before anything is built."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from underpaint.errors import CheckpointError
from underpaint.kv.codec import E4M3
from underpaint.kv.pool import PAGE_ROWS
from underpaint.models import fp8
from underpaint.models.lora import Lora, fuse_all

T = TypeVar("T")
FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
QUANTISED = "F8_E4M3"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def locate(path_or_id: str | Path) -> Path:
    """A local directory as it is, or the snapshot of a Hugging Face id. Raises CheckpointError."""
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path
    name = str(path_or_id)
    if path.exists() or not HUB_ID.fullmatch(name):
        raise CheckpointError(f"{name!r} is neither a checkpoint directory nor a Hugging Face id (owner/name)")
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(f"{name!r} is no local directory and could not be downloaded: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError if the file is missing or not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return value


def read_config(path: Path, cls: Callable[..., T], required: Mapping[str, Any]) -> T:
    """A frozen dataclass from a JSON file, with lists as tuples.

    ``required`` are keys that the dataclass does not have and the one value each may take. Keys that begin with an
    underscore are their writer's own. Any other unknown key, or a value of the wrong type, raises CheckpointError.
    """
    values = {key: value for key, value in read_json(path).items() if not key.startswith("_")}
    for key, expected in required.items():
        if key in values and values.pop(key) != expected:
            raise CheckpointError(f"{path}: {key} must be {expected!r}, other values are not supported")
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    unknown = values.keys() - known.keys()
    if unknown:
        raise CheckpointError(f"{path}: unknown keys: {', '.join(sorted(unknown))}")
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    for key, value in values.items():
        kind = type(known[key].default)
        if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool):
            raise CheckpointError(f"{path}: {key} must be of type {kind.__name__}, not {value!r}")
    return cls(**values)


@dataclass(frozen=True)
class Defaults:
    """``underpaint.json``, an optional file of a checkpoint: what it wants where the caller says nothing.

    ``reference_resolution``: side of the square whose area references and targets get. ``num_inference_steps``: steps
    of an unspecified schedule. ``page_rows``: token slots of a K/V page. ``guidance_scale``: of SenseNova-U1.
    """

    reference_resolution: int = 1024
    num_inference_steps: int = 40
    page_rows: int = PAGE_ROWS
    guidance_scale: float = 4.0


def read_defaults(root: Path, otherwise: Defaults | None = None) -> Defaults:
    """The defaults of a checkpoint directory, or ``otherwise`` if it has none. Raises CheckpointError."""
    path = root / "underpaint.json"
    return read_config(path, Defaults, required={}) if path.exists() else otherwise or Defaults()


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint, known from the header of its file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()


class Weights:
    """The tensors of one part: a single safetensors file, or shards named by an index."""

    def __init__(self, tensors: dict[str, TensorInfo], directory: Path) -> None:
        self.tensors = tensors
        self.directory = directory

    @classmethod
    def scan(cls, directory: Path, stem: str) -> "Weights":
        """Read the headers below ``directory`` (``stem``.safetensors or its index). Raises CheckpointError."""
        index_path = directory / f"{stem}.safetensors.index.json"
        if not index_path.exists():
            return cls(_read_header(directory / f"{stem}.safetensors"), directory)
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index_path} has no weight_map")
        tensors: dict[str, TensorInfo] = {}
        for name in sorted(set(weight_map.values())):
            tensors.update(_read_header(directory / name))
        misplaced = [key for key, name in weight_map.items() if key not in tensors or tensors[key].file.name != name]
        unlisted = tensors.keys() - weight_map.keys()
        if misplaced or unlisted:
            raise CheckpointError(f"{index_path} and its shards disagree about {_some([*misplaced, *unlisted])}")
        return cls(tensors, directory)

    @property
    def num_parameters(self) -> int:
        return sum(info.num_elements for info in self.tensors.values())

    @property
    def num_bytes(self) -> int:
        itemsize = {QUANTISED: 1, **{name: dtype.itemsize for name, dtype in FLOAT_DTYPES.items()}}
        return sum(info.num_elements * itemsize[info.dtype] for info in self.tensors.values())

    @property
    def quantised(self) -> bool:
        """Whether the linears of the blocks are stored in e4m3, see ``fp8``."""
        return any(info.dtype == QUANTISED for info in self.tensors.values())

    def check(self, expected: Mapping[str, Tensor], unused: frozenset[str] = frozenset()) -> None:
        """Raises CheckpointError unless the tensors are exactly ``expected`` (names and shapes) in a float dtype.

        Where e4m3 is expected, a float dtype will do: it can be quantised, and then has no scales yet. ``unused`` names
        tensors that released checkpoints carry and we deliberately do not load.
        """
        to_quantise = {
            name
            for name, want in expected.items()
            if want.dtype == E4M3 and name in self.tensors and self.tensors[name].dtype in FLOAT_DTYPES
        }
        absent = {name + fp8.SCALE for name in to_quantise}
        expected = {name: want for name, want in expected.items() if name not in absent}
        names = self.tensors.keys() - unused
        if missing := expected.keys() - names:
            raise CheckpointError(f"{self.directory}: missing tensors: {_some(missing)}")
        if surplus := names - expected.keys():
            raise CheckpointError(f"{self.directory}: unknown tensors: {_some(surplus)}")
        for name, want in expected.items():
            info = self.tensors[name]
            if info.shape != tuple(want.shape):
                raise CheckpointError(
                    f"{self.directory}: {name} has shape {info.shape}, the config asks for {tuple(want.shape)}"
                )
            if info.dtype not in FLOAT_DTYPES and not (info.dtype == QUANTISED and want.dtype == E4M3):
                raise CheckpointError(f"{self.directory}: {name} is {info.dtype}; only F32, F16 and BF16 are supported")

    def load_into(self, module: nn.Module, device: str, dtype: torch.dtype, loras: Sequence[Lora] = ()) -> None:
        """Replace the parameters of ``module`` (built on the meta device) by the tensors, moved, with ``loras`` fused,
        and cast or quantised, one after the other.

        For modules without buffers outside their state dict. One file is open at a time. Raises CheckpointError, also
        for a LoRA on weights that are stored in e4m3.
        """
        wanted = module.state_dict()
        self.check(wanted)
        state: dict[str, Tensor] = {}
        for file in sorted({info.file for info in self.tensors.values()}):
            with safe_open(file, framework="pt", device=device) as shard:
                for name in sorted(name for name, info in self.tensors.items() if info.file == file):
                    weight = fuse_all(loras, name, shard.get_tensor(name))
                    state |= fp8.settle(name, weight, wanted[name], dtype)
        module.load_state_dict(state, strict=True, assign=True)
        module.requires_grad_(False)


def _read_header(file: Path) -> dict[str, TensorInfo]:
    if not file.is_file():
        raise CheckpointError(f"{file} is missing")
    try:
        with safe_open(file, framework="pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            return {name: TensorInfo(file, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged or not a safetensors file: {error}") from error


def _some(names: "list[str] | set[str] | Any", limit: int = 4) -> str:
    names = sorted(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
