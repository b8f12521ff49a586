"""What the API process and its workers say to each other, as MessagePack over a ``handover.channel``. Nothing else
crosses: no code, no closures, no tensors."""

from pathlib import Path
from typing import Literal

from msgspec import Struct

from underpaint.config import EngineConfig
from underpaint.models.roles import Role
from underpaint.server.faults import NotReady
from underpaint.server.news import Ended, Entered, Failed, Moved, Told, Took
from underpaint.server.paint import Painting
from underpaint.server.talk import Talk
from underpaint.server.vitals import Vitals

RoleName = Literal["understanding", "generation"]
ROLES: dict[RoleName, Role] = {"understanding": Role.UNDERSTAND, "generation": Role.GENERATE}
Handover = Literal["copy", "fetch", "in_place"]
"""How the pages of a prefix reach generation: through shared memory, from device to device, or not at all, because
both processes have the same device and generation reads them where they are."""
FRAME_LIMIT = 1 << 30
"""Bytes of a message: uploads and finished pictures are in it, within the limits of ``ServerConfig``."""
QUEUE_BYTES = 2 << 30


class WorkerLost(NotReady):
    """The process that a request was in, or needed, ended before it was done."""

    code = "worker_lost"


class Setup(Struct, frozen=True, tag=True):
    """What a worker is: the first message to it. ``number``: which of those with its role. ``root``: a checkpoint
    directory. ``arena_bytes``: shared memory for what it hands over."""

    role: RoleName
    number: int
    root: str
    config: EngineConfig
    handover: Handover
    arena_bytes: int
    num_threads: int

    @property
    def path(self) -> Path:
        return Path(self.root)


class Meet(Struct, frozen=True, tag=True):
    """The line number ``line`` between understanding and the generation worker ``worker``: one end of it comes with
    this. Any earlier line between them is of the past."""

    line: int
    worker: int


class Begin(Struct, frozen=True, tag=True):
    """To understanding: have this done. News of it follow, the last of them Ended or Failed."""

    task: str
    work: Painting | Talk
    deadline: float


class Withdraw(Struct, frozen=True, tag=True):
    """To understanding: this is not wanted any more. Its news end as always."""

    task: str


class Stop(Struct, frozen=True, tag=True):
    """End now. The end of the channel means the same."""


class Up(Struct, frozen=True, tag=True):
    """The weights are loaded."""


class Refused(Struct, frozen=True, tag=True):
    """It will never load, and why: the device cannot do what was asked for, or the checkpoint is damaged."""

    reason: str


class Pulse(Struct, frozen=True, tag=True):
    """A sign of life. ``turn_seconds``: how long the pass that generation is in has taken up to now."""

    vitals: Vitals
    turn_seconds: float


class Parted(Struct, frozen=True, tag=True):
    """The line with this number ended, whoever ended it."""

    line: int


ToWorker = Setup | Meet | Begin | Withdraw | Stop
Heard = Entered | Took | Moved | Told | Ended | Failed
FromWorker = Up | Refused | Pulse | Parted | Heard
