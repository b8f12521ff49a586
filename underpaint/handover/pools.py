"""A page pool in memory that another process can map, so that its pages are read in place.

On a CPU that memory is a memfd. On a GPU it is one allocation of the driver's own, mapped by its CUDA IPC handle.
(Torch's own sharing of CUDA tensors keeps reference counts in files of /dev/shm, which outlive a process that is
killed.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from underpaint.handover.device_memory import DeviceMemory
from underpaint.handover.faults import BadHandover
from underpaint.handover.memory import Memory
from underpaint.handover.messages import Dtype, OpenPool
from underpaint.kv.codec import CODECS, Codec
from underpaint.kv.pool import CacheShape, PagePool, memory_bytes

DTYPES: dict[Dtype, torch.dtype] = {name: getattr(torch, name) for name in get_args(Dtype)}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, eq=False)
class SharedPool:
    """Understanding's side: a pool of its own, and the memory that it lies in."""

    pool: PagePool
    memory: Memory | DeviceMemory

    def offer(self) -> tuple[OpenPool, tuple[int, ...]]:
        """What to send to the other process: a message, and the descriptors beside it."""
        shape, pool = self.pool.shape, self.pool
        handle = self.memory.handle() if isinstance(self.memory, DeviceMemory) else None
        message = OpenPool(
            shape.num_layers, shape.num_heads, shape.head_dim, NAMES[shape.dtype], pool.codec.name, pool.page_rows,
            pool.num_pages, handle,
        )  # fmt: skip
        return message, (self.memory.fd,) if isinstance(self.memory, Memory) else ()

    def close(self) -> None:
        """Only when no other process reads from it any more."""
        self.memory.close()


def share_pool(shape: CacheShape, codec: Codec, budget_bytes: int, device: str, page_rows: int) -> SharedPool:
    """A ``PagePool`` like any other, in memory that can be mapped."""
    size = memory_bytes(shape, budget_bytes)
    memory = DeviceMemory.allocate(size, device) if device.startswith("cuda") else Memory.create(size)
    return SharedPool(PagePool(shape, codec, budget_bytes, device, page_rows, memory.data), memory)


@dataclass(frozen=True, eq=False)
class MappedPool:
    """Generation's side, on the same device. All pages of ``pool`` count as taken: they are the other process's to hand
    out, and are only read here."""

    pool: PagePool
    memory: Memory | DeviceMemory

    def close(self) -> None:
        self.memory.close()


def map_pool(message: OpenPool, descriptors: Sequence[int], device: str) -> MappedPool:
    """The pool that the other process offers, in place: not a byte is moved. Takes over the descriptors. Raises
    BadHandover."""
    shape, codec = _describe(message)
    budget = message.num_pages * message.page_rows * shape.row_bytes(codec)
    memory: Memory | DeviceMemory
    if message.handle is not None:
        memory = DeviceMemory.open(message.handle, memory_bytes(shape, budget), device)
    else:
        memory = Memory(_only(descriptors))
    if memory.data.nbytes < memory_bytes(shape, budget):
        memory.close()
        raise BadHandover("the pool that was handed over is smaller than it says")
    pool = PagePool(shape, codec, budget, device, message.page_rows, memory.data)
    pool.allocate(pool.num_pages * pool.page_rows)
    return MappedPool(pool, memory)


class RemotePool:
    """Generation's side, on another device of the same host: addresses, for ``Mover.fetch``."""

    def __init__(self, message: OpenPool, device: str) -> None:
        """``device``: the one that will read. Raises BadHandover if the pool is not in a GPU's memory."""
        if message.handle is None:
            raise BadHandover("pages can be copied from GPU to GPU only; use the shared arena")
        shape, codec = _describe(message)
        budget = message.num_pages * message.page_rows * shape.row_bytes(codec)
        size = memory_bytes(shape, budget)
        # A pool without memory knows where its planes would lie.
        nowhere = torch.empty(size, dtype=torch.uint8, device="meta")
        self.form = PagePool(shape, codec, budget, "cpu", message.page_rows, nowhere)
        self.memory = DeviceMemory.open(message.handle, size, device)

    def addresses(self, layer: int) -> tuple[int, ...]:
        """Of K and V of a layer and their scales."""
        there = planes(self.form, layer)
        return tuple(self.memory.address + int(plane.storage_offset()) * plane.itemsize for plane in there)

    def close(self) -> None:
        self.memory.close()


def planes(pool: PagePool, layer: int) -> tuple[Tensor, ...]:
    """K and V of a layer and their scales as they are stored, (slots, ...) each."""
    stored = pool.rows(layer)
    return tuple(plane for plane in (stored.k, stored.v, stored.k_scale, stored.v_scale) if plane is not None)


def _describe(message: OpenPool) -> tuple[CacheShape, Codec]:
    if message.codec not in CODECS:
        raise BadHandover(f"{message.codec!r} is not a codec")
    shape = CacheShape(message.num_layers, message.num_heads, message.head_dim, DTYPES[message.dtype])
    return shape, CODECS[message.codec]


def _only(descriptors: Sequence[int]) -> int:
    if len(descriptors) != 1:
        raise BadHandover(f"a pool comes with one descriptor, not {len(descriptors)}")
    return descriptors[0]
