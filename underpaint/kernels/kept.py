"""Where the keys and values of a pass are kept: what a kernel that writes them is told."""

from dataclasses import dataclass

from torch import Tensor

from underpaint.kernels.tiles import StoredKV


@dataclass(frozen=True, eq=False)
class Kept:
    """Pages to keep rows in: ``slots`` (rows,) int32 of ``stored``, -1 for a row that is not kept. There may be fewer
    slots than rows: those behind are not kept."""

    stored: StoredKV
    slots: Tensor

    def behind(self, row: int) -> "Kept":
        """What of it is for the rows from ``row`` on."""
        return Kept(self.stored, self.slots[row:])
