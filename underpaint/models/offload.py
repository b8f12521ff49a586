"""Weights in host memory, brought to the device when they are needed: for cards that cannot hold a model.

``Streamed``: the layers of a stack, each copied while the one before it works, into two places in turn. Copies run at
the rate of the bus: at 55 GB/s, measured from pinned memory on an H200's host, 7 GB of fp8 blocks take 0.13 s a pass.
``Visiting``: a whole part, there while it is used. The host cannot use pinned memory for anything else, so what is free
is looked at first.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from underpaint.errors import BadConfig
from underpaint.host_memory import available_bytes

ALIGNMENT = 256
KEPT_FREE = 2 << 30
"""Bytes of host memory that are left to everything else."""


def check_host(parts: Mapping[str, int]) -> None:
    """Raises BadConfig if the host has no room for the weights of these parts, by name in bytes."""
    if not parts:
        return
    needed, free = sum(parts.values()) + KEPT_FREE, available_bytes()
    if needed > free:
        listed = ", ".join(f"{name} {num_bytes}" for name, num_bytes in parts.items())
        raise BadConfig(
            f"offload keeps weights in host memory ({listed} bytes) and leaves {KEPT_FREE} free: {needed} are needed, "
            f"and {free} are available"
        )


class Packed:
    """The parameters of a module in one buffer on the host, which takes their place."""

    def __init__(self, module: nn.Module, pin: bool) -> None:
        assert not list(module.buffers()), "buffers stay where they are, and these would not"
        self._parameters = list(module.parameters())
        self._strides = [parameter.stride() for parameter in self._parameters]  # convolutions may be channels-last
        self._starts = [0]
        for parameter in self._parameters:
            self._starts.append(-(-(self._starts[-1] + parameter.nbytes) // ALIGNMENT) * ALIGNMENT)
        self.num_bytes = self._starts[-1]
        self.host = torch.empty(self.num_bytes, dtype=torch.uint8)
        if pin:
            self._pin()
        self._home = self.views(self.host)
        for parameter, view in zip(self._parameters, self._home, strict=True):
            view.copy_(parameter.data)
        self.come_home()

    def _pin(self) -> None:
        """Let copies to a GPU run by themselves, until this object is gone. Registered, because torch's own pinned
        memory comes in powers of two: up to twice as much. Raises BadConfig."""
        runtime, address = torch.cuda.cudart(), self.host.data_ptr()
        status = int(runtime.cudaHostRegister(address, self.num_bytes, 0))
        if status:
            raise BadConfig(f"{self.num_bytes} bytes of host memory could not be pinned (CUDA error {status})")
        weakref.finalize(self, runtime.cudaHostUnregister, address)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The parameters, if their bytes are in ``buffer``."""
        return [
            buffer[start : start + p.nbytes].view(p.dtype).as_strided(p.shape, strides)
            for start, p, strides in zip(self._starts, self._parameters, self._strides, strict=False)
        ]

    def settle(self, views: Sequence[Tensor]) -> None:
        """Let the parameters be these tensors."""
        for parameter, view in zip(self._parameters, views, strict=True):
            parameter.data = view

    def come_home(self) -> None:
        self.settle(self._home)


class Streamed:
    """The layers of a stack, which are called in order: each is brought while the one before it works.

    Between calls the parameters of a layer are those on the host. A pass that breaks off in the middle leaves nothing
    behind: the next begins with the first layer again.
    """

    def __init__(self, layers: Sequence[nn.Module], device: str) -> None:
        """``layers`` are on the host."""
        self._device = torch.device(device)
        on_gpu = self._device.type == "cuda"
        self._packed = [Packed(layer, pin=on_gpu) for layer in layers]
        self.host_bytes = sum(packed.num_bytes for packed in self._packed)
        largest = max(packed.num_bytes for packed in self._packed)
        self._places = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(2)]
        self._views = [[packed.views(place) for place in self._places] for packed in self._packed]
        self._brought: tuple[int, int] | None = None  # which layer was copied last, and where to
        self._copying = torch.cuda.Stream(self._device) if on_gpu else None
        self._ready: list[Any] = [None, None]
        self._left: list[Any] = [None, None]
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._before(number))
            layer.register_forward_hook(self._after(number), always_call=True)

    @property
    def device_bytes(self) -> int:
        return sum(place.nbytes for place in self._places)

    def _before(self, number: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if self._brought is None or self._brought[0] != number:
                self._bring(number)
            assert self._brought is not None
            place = self._brought[1]
            if self._ready[place] is not None:
                torch.cuda.current_stream(self._device).wait_event(self._ready[place])
            self._packed[number].settle(self._views[number][place])
            self._bring((number + 1) % len(self._packed))

        return hook

    def _after(self, number: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if self._copying is not None:
                # The layer is in the place that the next one is not being copied to.
                assert self._brought is not None
                self._left[1 - self._brought[1]] = torch.cuda.current_stream(self._device).record_event()
            self._packed[number].come_home()

        return hook

    def _bring(self, number: int) -> None:
        """Begin to copy a layer to the place that the last one was not copied to."""
        packed, place = self._packed[number], 1 - self._brought[1] if self._brought else 0
        self._brought = number, place
        target = self._places[place][: packed.num_bytes]
        if self._copying is None:
            target.copy_(packed.host)
            return
        with torch.cuda.stream(self._copying):
            if self._left[place] is not None:
                self._copying.wait_event(self._left[place])
            target.copy_(packed.host, non_blocking=True)
            self._ready[place] = self._copying.record_event()


def stream(network: nn.Module, layers: nn.ModuleList, device: str) -> Streamed:
    """Stream ``layers`` of a network that is on the host, and move all else of it to the device."""
    streamed = Streamed(list(layers), device)
    inside = {id(parameter) for parameter in layers.parameters()}
    for module in network.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in inside:
                parameter.data = parameter.data.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    return streamed


class Visiting:
    """A part whose weights are on the device within ``there``, and else on the host. Not for several threads."""

    def __init__(self, module: nn.Module, device: str) -> None:
        """``module`` is on the host."""
        self._device = torch.device(device)
        self._packed = Packed(module, pin=self._device.type == "cuda")
        self.num_bytes = self._packed.num_bytes

    @contextmanager
    def there(self) -> Iterator[None]:
        self._packed.settle(self._packed.views(self._packed.host.to(self._device, non_blocking=True)))
        try:
            yield
        finally:
            self._packed.come_home()
