"""Attention of a pass that also keeps keys and values: those of its first rows go into pages."""

import torch
from torch import Tensor

from underpaint.attention.batch import AttendPass
from underpaint.kernels.kept import Kept
from underpaint.kernels.packed_tiles import PackedTiles
from underpaint.kernels.tiles import StoredKV
from underpaint.kv.pool import PagePool


class KeepingAttention:
    """What ``attend`` is to a transformer. ``slots``: (kept rows,) int32 or int64, where the first rows of the pass go;
    with ``some``, below 0 for rows that are not kept.

    A plain transformer calls it with finished queries, keys and values. A fused one writes them where ``kept`` says
    itself, and calls ``packed``. In pages of tiles these are kept then, since a page's rows have to be known together.
    """

    def __init__(self, pool: PagePool, slots: Tensor, attend: AttendPass, some: bool = False) -> None:
        self._pool = pool
        self._slots = slots
        self._slots32 = slots.to(torch.int32)
        self._attend = attend
        self._some = some

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keep, then attend; see ``attention.Backend``."""
        if num_kept := len(self._slots):
            slots, k_kept, v_kept = self._slots, k[:num_kept], v[:num_kept]
            if self._some:
                kept = slots >= 0
                slots, k_kept, v_kept = slots[kept], k_kept[kept], v_kept[kept]
            self._pool.write(layer, slots, k_kept, v_kept)
        return self._attend(q, k, v, layer)

    def kept(self, layer: int) -> Kept | None:
        """Where the first rows go; None if nothing is kept, or only later."""
        stored = self._pool.stored(layer)
        return Kept(stored, self._slots32) if isinstance(stored, StoredKV) and len(self._slots) else None

    def packed(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend; what is to be kept already is, unless it goes into pages of tiles."""
        stored = self._pool.stored(layer)
        if isinstance(stored, PackedTiles) and len(self._slots):
            from underpaint.kernels.pack_e4m3 import pack_pages  # needs Triton, as a fused network does

            pack_pages(k, v, stored, self._slots32)
        return self._attend(q, k, v, layer)
