"""Memory of a GPU that another process can map, by the CUDA driver's interface.

Not from torch's allocator: that hands out pieces of larger blocks, and a handle stands for a whole block.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from underpaint.devices import wait_for

LAZY_ENABLE_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("data", ctypes.c_ubyte * 64),)


class DeviceMemory:
    """``num_bytes`` at ``address``, which ``device`` can read: its own, or mapped from another process."""

    def __init__(self, address: int, num_bytes: int, device: str, mapped: bool) -> None:
        """Use ``allocate`` or ``open``."""
        self.address = address
        self.num_bytes = num_bytes
        self.device = device
        self._mapped = mapped

    @classmethod
    def allocate(cls, num_bytes: int, device: str) -> "DeviceMemory":
        """New memory, whatever it holds. Raises torch.OutOfMemoryError."""
        device = _make_current(device)
        address = ctypes.c_uint64()
        status = _driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(num_bytes))
        if status == 2:  # CUDA_ERROR_OUT_OF_MEMORY
            raise torch.OutOfMemoryError(f"{num_bytes} bytes for the page pool are not free on {device}")
        _check("cuMemAlloc", status)
        return cls(address.value, num_bytes, device, mapped=False)

    @classmethod
    def open(cls, handle: bytes, num_bytes: int, device: str) -> "DeviceMemory":
        """Another process's memory, of this device or of a peer of it."""
        device = _make_current(device)
        address = ctypes.c_uint64()
        given = _Handle.from_buffer_copy(handle)
        flags = ctypes.c_uint(LAZY_ENABLE_PEER_ACCESS)
        _check("cuIpcOpenMemHandle", _driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), given, flags))
        return cls(address.value, num_bytes, device, mapped=True)

    @property
    def data(self) -> Tensor:
        """(num_bytes,) uint8 on ``device``, without a copy; not for a peer's memory."""
        return torch.as_tensor(_Array(self), device=self.device)

    def handle(self) -> bytes:
        """What ``open`` needs in another process."""
        _make_current(self.device)
        handle = _Handle()
        _check("cuIpcGetMemHandle", _driver().cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(self.address)))
        return bytes(handle)

    def close(self) -> None:
        """Free or unmap it, once; nothing may use it any more. An owner outlives those who map its memory."""
        if not self.address:
            return
        _make_current(self.device)
        torch.cuda.synchronize(self.device)
        name = "cuIpcCloseMemHandle" if self._mapped else "cuMemFree_v2"
        _check(name, getattr(_driver(), name)(ctypes.c_uint64(self.address)))
        self.address = 0


class _Array:
    """CUDA's array interface, through which torch takes memory that it did not allocate."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (memory.num_bytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "version": 3,
        }


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _make_current(device: str) -> str:
    """The driver works in the context that torch uses on ``device``; its name, with its number."""
    index = torch.device(device).index
    index = torch.cuda.current_device() if index is None else index
    torch.cuda.set_device(index)
    wait_for(f"cuda:{index}")  # torch makes the context when it first does something there
    return f"cuda:{index}"


def _check(call: str, status: int) -> None:
    if status != 0:
        raise RuntimeError(f"{call} failed with CUDA error {status}")
