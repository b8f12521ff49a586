"""Attention of a pass that also keeps keys and values: those of its first rows go into pages."""

import torch
from torch import Tensor

from underpaint.attention.batch import AttendPass, ProductAttend
from underpaint.kernels.head_form import HeadForm
from underpaint.kernels.kept import Kept
from underpaint.kernels.packed_tiles import PackedTiles
from underpaint.kernels.tiles import StoredKV
from underpaint.kv.pool import PagePool


class KeepingAttention:
    """What ``attend`` is to a transformer. ``slots``: (kept rows,) int32 or int64, where the first rows of the pass go;
    with ``some``, below 0 for rows that are not kept.

    A plain transformer calls it with finished queries, keys and values. A fused one writes them where ``kept`` says
    itself, and calls ``packed``, or lets ``finish`` do both. Pages of tiles are filled by ``packed``, once all of their
    rows are known.
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

    def finish(self, layer: int, qkv: Tensor, kv_heads: int, form: HeadForm, rotary: Tensor) -> Tensor:
        """See ``ProductAttend``. Where nothing is kept, a backend may do it in its own way."""
        if isinstance(self._attend, ProductAttend) and not len(self._slots):
            return self._attend.finish(layer, qkv, kv_heads, form, rotary)
        from underpaint.kernels.kv_pack import kv_pack  # needs Triton, as a fused network does

        kv_pack(qkv, kv_heads, form, rotary, self.kept(layer))
        q, k, v = qkv.split([qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
        return self.packed(layer, q, k, v)
