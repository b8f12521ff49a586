"""How a server is spread over processes and devices: decided and checked before anything is loaded.

No device is touched here. What only a device can answer, its worker asks, and refuses by itself (``wire.Refused``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from underpaint.config import EngineConfig, resolve
from underpaint.errors import BadConfig
from underpaint.host_memory import available_bytes
from underpaint.pipeline import engine_config
from underpaint.server.wire import Handover, RoleName, Setup

Mode = Literal["single", "colocate", "separate"]
Way = Literal["shm", "ipc"]
MAX_ARENA_BYTES = 4 << 30
"""Three branches of a 2048 x 2048 reference of the 8B SenseNova-U1 take 2.1 GiB."""
ARENA_SHARE = 16
"""Each of the two arenas may have this part of the memory that is available; it is taken only when it is used."""
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Spread:
    """What the user says: see ``serve``. None leaves a choice to the machine."""

    mode: Mode | None = None
    understand_devices: str | None = None
    generate_devices: str | None = None
    understand_memory: int | None = None
    generate_memory: int | None = None
    handover: Way | None = None
    handover_memory: int | None = None


@dataclass(frozen=True)
class Plan:
    """Two workers, and how pages get from the first to the second. The configs are resolved."""

    understanding: EngineConfig
    generation: EngineConfig
    handover: Handover
    arena_bytes: int

    def setup(self, role: RoleName, root: Path, num_threads: int) -> Setup:
        config = self._config(role)
        if config.device != "cpu":
            config = replace(config, device="cuda:0")  # the first that it sees, see ``environment``
        return Setup(role, str(root.resolve()), config, self.handover, self.arena_bytes, num_threads)

    def environment(self, role: RoleName, environ: Mapping[str, str]) -> dict[str, str]:
        """``environ`` for the worker of a role, in which its own device is the first one, as every thread expects, and
        no other is seen but one that pages are fetched from."""
        own = self._config(role).device
        if own == "cpu":
            return dict(environ)
        devices = [own]
        if self.handover == "fetch" and role == "generation":
            devices.append(self.understanding.device)
        indices = [torch.device(device).index or 0 for device in devices]
        seen = environ.get(VISIBLE, "").split(",")  # ours, which may be only some of the machine's
        names = [seen[index] if environ.get(VISIBLE) else str(index) for index in indices]
        return {**environ, VISIBLE: ",".join(names)}

    def _config(self, role: RoleName) -> EngineConfig:
        return self.understanding if role == "understanding" else self.generation


def make_plan(spread: Spread, options: dict[str, Any]) -> Plan | None:
    """``options``: the fields of ``EngineConfig``, for both processes. None is one process for everything.

    Raises BadConfig for what this machine, or this program, cannot do.
    """
    for name, allowed in (("mode", get_args(Mode)), ("handover", get_args(Way))):
        if (value := getattr(spread, name)) not in (None, *allowed):
            raise BadConfig(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
    config, num_cards = engine_config(options), torch.cuda.device_count()
    mode = spread.mode
    if mode is None:
        mode = "separate" if num_cards > 1 and config.device in ("auto", "cuda") else "single"
    if mode == "single":
        given = [f.name for f in fields(Spread) if f.name != "mode" and getattr(spread, f.name) is not None]
        if given:
            raise BadConfig(f"{', '.join(given)}: with mode single there is one process; use colocate or separate")
        return None
    ours, theirs = _devices(mode, spread, config.device, num_cards)
    understanding = _config(config, ours, spread.understand_memory)
    generation = _config(config, theirs, spread.generate_memory)
    arena_bytes = spread.handover_memory
    if arena_bytes is None:
        arena_bytes = min(MAX_ARENA_BYTES, available_bytes() // ARENA_SHARE)
    if arena_bytes < 1:
        raise BadConfig("handover_memory must be at least 1 byte")
    return Plan(understanding, generation, _handover(mode, spread, ours), arena_bytes)


def _config(config: EngineConfig, device: str, kv_cache_bytes: int | None) -> EngineConfig:
    own = config.kv_cache_bytes if kv_cache_bytes is None else kv_cache_bytes
    return resolve(replace(config, device=device, kv_cache_bytes=own))


def _devices(mode: Mode, spread: Spread, device: str, num_cards: int) -> tuple[str, str]:
    """Of understanding and of generation."""
    given = [_one_device(name, getattr(spread, name), num_cards) for name in ("understand_devices", "generate_devices")]
    if device not in ("auto", "cuda", "cpu") and mode == "separate":
        raise BadConfig(f"device {device!r} is one device; with mode separate use understand_devices, generate_devices")
    on_cpu = device == "cpu" or (num_cards == 0 and device == "auto")
    if on_cpu:
        if any(one not in (None, "cpu") for one in given):
            raise BadConfig("devices are numbers of CUDA devices, and this server runs on the CPU")
        return "cpu", "cpu"
    if mode == "colocate":
        one = given[0] or given[1] or (device if device.startswith("cuda:") else "cuda:0")
        if any(other not in (None, one) for other in given):
            raise BadConfig("colocate is two processes on one device; with two devices use mode separate")
        return one, one
    if num_cards < 2:
        raise BadConfig(f"separate needs two CUDA devices, and this machine has {num_cards}; use mode colocate")
    ours = given[0] or next(f"cuda:{i}" for i in range(num_cards) if f"cuda:{i}" != given[1])
    theirs = given[1] or next(f"cuda:{i}" for i in range(num_cards) if f"cuda:{i}" != ours)
    if ours == theirs:
        raise BadConfig(f"separate needs two devices, and both would be {ours}; use mode colocate")
    return ours, theirs


def _one_device(name: str, value: str | None, num_cards: int) -> str | None:
    if value is None or value == "cpu":
        return value
    numbers = value.split(",")
    if not all(number.isascii() and number.isdecimal() for number in numbers):
        raise BadConfig(f"{name} is {value!r}; it must be the number of a CUDA device, such as 0, or cpu")
    if len(numbers) > 1:
        raise BadConfig(f"{name} is {value!r}; one device each can be used, parallel groups are not there yet")
    if int(value) >= num_cards:
        raise BadConfig(f"{name} is {value}, and this machine has {num_cards} CUDA devices")
    return f"cuda:{int(value)}"


def _handover(mode: Mode, spread: Spread, ours: str) -> Handover:
    if mode == "colocate":
        if spread.handover is not None:
            raise BadConfig("with mode colocate pages are read in place; handover is for mode separate")
        return "in_place"
    if spread.handover != "ipc":
        return "copy"
    if ours == "cpu":
        raise BadConfig("handover ipc copies from GPU to GPU, and this server runs on the CPU; use shm")
    return "fetch"
