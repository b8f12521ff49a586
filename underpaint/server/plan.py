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
ARENAS_SHARE = 8
"""The arenas, one a worker, may together have this part of the memory that is available; it is taken only when it is
used."""
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
    """A worker that understands, one or several that generate, and how pages get from the first to the others. The
    configs are resolved."""

    understanding: EngineConfig
    generation: tuple[EngineConfig, ...]
    handover: Handover
    arena_bytes: int

    def setup(self, role: RoleName, root: Path, num_threads: int, number: int = 0) -> Setup:
        """``number``: which of the workers with this role."""
        config = self._config(role, number)
        if config.device != "cpu":
            config = replace(config, device="cuda:0")  # the first that it sees, see ``environment``
        return Setup(role, number, str(root.resolve()), config, self.handover, self.arena_bytes, num_threads)

    def environment(self, role: RoleName, environ: Mapping[str, str], number: int = 0) -> dict[str, str]:
        """``environ`` for a worker, in which its own device is the first one, as every thread expects, and
        no other is seen but one that pages are fetched from."""
        own = self._config(role, number).device
        if own == "cpu":
            return dict(environ)
        devices = [own]
        if self.handover == "fetch" and role == "generation":
            devices.append(self.understanding.device)
        indices = [torch.device(device).index or 0 for device in devices]
        seen = environ.get(VISIBLE, "").split(",")  # ours, which may be only some of the machine's
        names = [seen[index] if environ.get(VISIBLE) else str(index) for index in indices]
        return {**environ, VISIBLE: ",".join(names)}

    def _config(self, role: RoleName, number: int) -> EngineConfig:
        return self.understanding if role == "understanding" else self.generation[number]


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
    generation = tuple(_config(config, device, spread.generate_memory) for device in theirs)
    arena_bytes = spread.handover_memory
    if arena_bytes is None:
        arena_bytes = min(MAX_ARENA_BYTES, available_bytes() // (ARENAS_SHARE * (1 + len(generation))))
    if arena_bytes < 1:
        raise BadConfig("handover_memory must be at least 1 byte")
    return Plan(understanding, generation, _handover(mode, spread, ours), arena_bytes)


def _config(config: EngineConfig, device: str, kv_cache_bytes: int | None) -> EngineConfig:
    own = config.kv_cache_bytes if kv_cache_bytes is None else kv_cache_bytes
    return resolve(replace(config, device=device, kv_cache_bytes=own))


def _devices(mode: Mode, spread: Spread, device: str, num_cards: int) -> tuple[str, tuple[str, ...]]:
    """Of understanding, and of each worker that generates."""
    understand = _given("understand_devices", spread.understand_devices, num_cards)
    generate = _given("generate_devices", spread.generate_devices, num_cards)
    if len(understand) > 1:
        raise BadConfig(f"understand_devices is {spread.understand_devices!r}; understanding has one device")
    if mode == "colocate" and len(generate) > 1:
        raise BadConfig("colocate is two processes on one device; several devices are for mode separate")
    if device not in ("auto", "cuda", "cpu") and mode == "separate":
        raise BadConfig(f"device {device!r} is one device; with mode separate use understand_devices, generate_devices")
    on_cpu = device == "cpu" or (num_cards == 0 and device == "auto")
    if on_cpu:
        if any(one != "cpu" for one in (*understand, *generate)):
            raise BadConfig("devices are numbers of CUDA devices, and this server runs on the CPU")
        return "cpu", generate or ("cpu",)
    if mode == "colocate":
        one = (*understand, *generate, device if device.startswith("cuda:") else "cuda:0")[0]
        if any(other != one for other in (*understand, *generate)):
            raise BadConfig("colocate is two processes on one device; with two devices use mode separate")
        return one, (one,)
    if num_cards < 2:
        raise BadConfig(f"separate needs two CUDA devices, and this machine has {num_cards}; use mode colocate")
    cards = [f"cuda:{i}" for i in range(num_cards)]
    ours = understand[0] if understand else next((card for card in cards if card not in generate), cards[0])
    theirs = generate or (next(card for card in cards if card != ours),)
    if ours in theirs:
        raise BadConfig(
            f"separate needs a device for understanding beside those that generate, and {ours} would be "
            "both; use mode colocate"
        )
    return ours, theirs


def _given(name: str, value: str | None, num_cards: int) -> tuple[str, ...]:
    """The devices that a list such as 1,2 names; none if there is no list."""
    if value is None:
        return ()
    numbers = value.split(",")
    if all(number == "cpu" for number in numbers):
        return tuple(numbers)
    if not all(number.isascii() and number.isdecimal() for number in numbers):
        raise BadConfig(f"{name} is {value!r}; it must be numbers of CUDA devices, such as 0 or 1,2, or cpu")
    devices = tuple(f"cuda:{int(number)}" for number in numbers)
    if len(set(devices)) < len(devices):
        raise BadConfig(f"{name} is {value!r}, which has a device twice")
    if max(map(int, numbers)) >= num_cards:
        raise BadConfig(f"{name} is {value}, and this machine has {num_cards} CUDA devices")
    return devices


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
