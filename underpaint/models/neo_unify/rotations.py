"""Rotary embedding looked up instead of computed for every pass: the same numbers, see ``transformer.rotary_table``."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from underpaint.models.neo_unify.config import LanguageConfig
from underpaint.models.neo_unify.transformer import rotary_table

FIRST_SIZE = 1024


class Rotations:
    """A table of the rotations of every axis at positions 0 to N - 1, on the CPU and on ``device``; N doubles when a
    position is beyond it. Beside it one of whole rows of text, which stand at 0 on the other axes."""

    def __init__(self, config: LanguageConfig, device: str) -> None:
        self._config = config
        self._device = device
        self._sizes = [channels // 2 for channels in config.rotary_axes]
        self._grow(FIRST_SIZE)

    def rows(self, positions: Tensor) -> Tensor:
        """(rows, 3) positions on the CPU -> (rows, head_dim / 2) complex64 on the device."""
        if len(positions):
            self._reach(int(positions.max()))
        there = positions.to(self._device)
        return torch.cat([part[there[:, axis]] for axis, part in enumerate(self._on_device)], dim=-1)

    def text_rows(self, positions: Sequence[int]) -> npt.NDArray[np.complex64]:
        """(rows, head_dim / 2) of rows of text at ``positions`` on the t axis, on the CPU."""
        self._reach(max(positions, default=0))
        return self._of_text[list(positions)]

    def _reach(self, position: int) -> None:
        if position >= len(self._on_host[0]):
            self._grow(1 << position.bit_length())

    def _grow(self, size: int) -> None:
        table = rotary_table(torch.arange(size)[:, None].expand(-1, 3), self._config)
        self._on_host = table.split(self._sizes, dim=-1)
        t, *others = self._on_host
        text = torch.cat([t, *(part[:1].expand(size, -1) for part in others)], dim=-1)
        self._of_text: npt.NDArray[np.complex64] = text.numpy()
        self._on_device = tuple(part.to(self._device) for part in self._on_host)
