"""What understanding and generation say to each other: a painting order as data, and what becomes of it.

Everything here is a tagged ``msgspec.Struct``, sent as MessagePack over a ``Channel``. Tensors and K/V pages are named
by where they lie, in a slab of the sender's arena or in understanding's pool, and are never in a message. Deadlines are
on the clock of ``time.monotonic``, which is one for all processes of a host. ``orders`` turns these into the engine's
own objects and back.
"""

from typing import Literal

import msgspec

from underpaint.errors import EngineFailure, UnderpaintError
from underpaint.handover.arena import Slab
from underpaint.kv.pool import Run
from underpaint.kv.tree import Key, Unit
from underpaint.layout import Grid, Layout
from underpaint.models.neo_unify.guidance import Norm
from underpaint.sampling.guidance import Branch

Dtype = Literal["float32", "float16", "bfloat16"]


class TensorAt(msgspec.Struct, frozen=True, tag="tensor"):
    """A contiguous tensor, from byte ``start`` of a slab."""

    slab: Slab
    start: int
    dtype: Dtype
    shape: tuple[int, ...]


class Seed(msgspec.Struct, frozen=True, tag="seed"):
    """Noise that the receiver draws itself, from a CPU generator with this seed, as the family draws it."""

    seed: int


class Plain(msgspec.Struct, frozen=True, tag="plain"):
    """``sampling.guidance.PlainGuidance``."""

    scale: float


class Paint(msgspec.Struct, frozen=True, tag="paint"):
    """``neo_unify.PaintGuidance``."""

    scale: float
    norm: Norm
    interval: tuple[float, float]


class Edit(msgspec.Struct, frozen=True, tag="edit"):
    """``neo_unify.EditGuidance``."""

    scale: float
    picture_scale: float
    norm: Norm
    interval: tuple[float, float]


class Euler(msgspec.Struct, frozen=True, tag="euler"):
    """``sampling.schedule.EulerSampler``: the levels of its schedule, fp32 values."""

    sigmas: tuple[float, ...]
    guidance: Plain


class Flow(msgspec.Struct, frozen=True, tag="flow"):
    """``neo_unify.FlowSampler``: its times, fp32 values."""

    times: tuple[float, ...]
    guidance: Paint | Edit


class Fresh(msgspec.Struct, frozen=True, tag="fresh"):
    """A branch that generation prefills: what ``qwen_image21.Condition`` holds. ``text``: (text rows, context_dim);
    ``latents``: (tokens, channels) of each reference."""

    layout: Layout
    units: tuple[Unit, ...]
    text: TensorAt
    latents: tuple[TensorAt, ...]


class Stored(msgspec.Struct, frozen=True, tag="stored"):
    """A branch whose keys and values understanding has computed: which runs of the order's ``prefix``, in order."""

    layout: Layout
    runs: tuple[int, ...]


class InPages(msgspec.Struct, frozen=True):
    """Runs in the pages of understanding's pool, the key of each that is a unit, and how they are stored. They stay
    there until they were brought as asked for by ``Bring``, or else until the order is ``Painted`` or ``Failed``."""

    runs: tuple[Run, ...]
    units: tuple[Key | None, ...]
    codec: str

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(run.num_rows for run in self.runs)


class JobAt(msgspec.Struct, frozen=True):
    """One picture. ``noise``: what it starts from, (tokens, channels). ``conditions``: which condition of the order
    each branch reads. ``kept_steps``: after which steps its state is wanted, see ``Kept``."""

    grid: Grid
    noise: TensorAt | Seed
    sampler: Euler | Flow
    conditions: dict[Branch, int]
    kept_steps: tuple[int, ...] = ()


class PaintOrder(msgspec.Struct, frozen=True, tag=True):
    """A painting order. ``prefix``: the runs of its ``Stored`` conditions; None if it has none."""

    id: str
    conditions: tuple[Fresh | Stored, ...]
    jobs: tuple[JobAt, ...]
    prefix: InPages | None = None
    deadline: float | None = None


class Bring(msgspec.Struct, frozen=True, tag=True):
    """Generation has all runs of an order's prefix but these, by index; they are to be copied into a slab."""

    id: str
    runs: tuple[int, ...]


class Coming(msgspec.Struct, frozen=True, tag=True):
    """The runs that were asked for, as ``pages.gather`` lays them down one after the other. It may still write."""

    id: str
    slab: Slab


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """The order is no longer wanted; it still ends by ``Painted`` or ``Failed``."""

    id: str


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Steps that each job has taken."""

    id: str
    steps: tuple[int, ...]


class Kept(msgspec.Struct, frozen=True, tag=True):
    """The state of a job after one of its ``kept_steps``."""

    id: str
    job: int
    step: int
    state: TensorAt


class Painted(msgspec.Struct, frozen=True, tag=True):
    """The order is done. ``states``: the final state of each job, in order. ``rows_prefilled``, and when the prefixes
    were in pages."""

    id: str
    states: tuple[TensorAt, ...]
    rows_prefilled: int
    prefilled: float


class ErrorData(msgspec.Struct, frozen=True):
    """An error as data: the name of its class, its sentence, and its attributes."""

    name: str
    message: str
    fields: dict[str, bool | int | float | str | None]

    @classmethod
    def of(cls, error: UnderpaintError) -> "ErrorData":
        return cls(type(error).__name__, str(error), dict(vars(error)))

    def error(self) -> UnderpaintError:
        """The same error again. One of a class that this process has not loaded becomes an EngineFailure that names
        it."""
        kind = _classes(UnderpaintError).get(self.name)
        if kind is None:
            return EngineFailure(f"{self.name}: {self.message}")
        error = kind.__new__(kind)  # not by its constructor, which makes a sentence of other arguments
        Exception.__init__(error, self.message)
        vars(error).update(self.fields)
        return error


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The order ended without a picture: broken, late, or cancelled."""

    id: str
    error: ErrorData


class Release(msgspec.Struct, frozen=True, tag=True):
    """The sender has read these slabs of the receiver's arena."""

    slabs: tuple[Slab, ...]


class OpenArena(msgspec.Struct, frozen=True, tag=True):
    """The sender's arena: one descriptor comes with this."""


class OpenPool(msgspec.Struct, frozen=True, tag=True):
    """Understanding's page pool, to be read in place: ``pool`` says what it is. One descriptor comes with this, or a
    CUDA IPC handle is in it."""

    num_layers: int
    num_heads: int
    head_dim: int
    dtype: Dtype
    codec: str
    page_rows: int
    num_pages: int
    handle: bytes | None = None


ToGeneration = OpenArena | OpenPool | PaintOrder | Coming | Cancel | Release
ToUnderstanding = OpenArena | Bring | Progress | Kept | Painted | Failed | Release


def _classes(root: type[UnderpaintError]) -> dict[str, type[UnderpaintError]]:
    """A class and all below it, by name."""
    known = {root.__name__: root}
    for below in root.__subclasses__():
        known |= _classes(below)
    return known
