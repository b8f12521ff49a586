"""Rotary embedding looked up, see ``models.rotations``; and that of whole rows of text, for decoding."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from underpaint.models.neo_unify.config import LanguageConfig
from underpaint.models.neo_unify.transformer import rotary_table
from underpaint.models.rotations import Rotations


class TextRotations(Rotations):
    """Beside the tables one of whole rows of text, which stand at 0 on all axes but t."""

    def __init__(self, config: LanguageConfig, device: str) -> None:
        super().__init__(partial(rotary_table, config=config), [dim // 2 for dim in config.rotary_axes], device)

    def text_rows(self, positions: Sequence[int]) -> npt.NDArray[np.complex64]:
        """(rows, head_dim / 2) of rows of text at ``positions`` on the t axis, on the CPU."""
        self._reach(max(positions, default=0))
        return self._of_text[list(positions)]

    def _grow(self, size: int) -> None:
        super()._grow(size)
        t, *others = self._on_host
        beside = [part[size : size + 1].expand(size, -1) for part in others]
        self._of_text: npt.NDArray[np.complex64] = torch.cat([t[size:], *beside], dim=-1).numpy()
