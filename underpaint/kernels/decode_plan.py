"""The plan of attention in text decode, and what it means: plain PyTorch that reads the plan as the kernel does.

One row a sequence attends to all rows that its sequence has in pages, the newest included. What a kernel reads beside q
and the pages is a table of pages with their valid counts, and a list of pieces: stretches of a sequence's key tiles,
about equally long whatever the lengths of the sequences. Shapes depend on the number of sequences only, so a CUDA graph
of a step serves any lengths.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from underpaint.kernels.tiles import Ints, StoredKV

KEYS = 128
MIN_PIECE_KEYS = 64
"""Shorter pieces cost more to merge than they save."""
PROGRAMS = 264
"""Pieces times K/V heads aimed at: two on each of the 132 processors of an H200, see ``decode_attention``."""


@dataclass(frozen=True, eq=False)
class DecodePlan:
    """What ``decode_attention`` reads of a step, int32 on the device.

    ``pages``: (any, 2), first slot and valid rows of each page, the pages of a sequence together, full ones first.
    ``pieces``: (pieces, 5), sequence, the range of key tiles counted over ``pages``, whether that is all of the
    sequence, and the tile before which all are full; an unused piece is empty. ``merges``: (sequences, 2), the range of
    each sequence's pieces.
    """

    pages: Tensor
    pieces: Tensor
    merges: Tensor


def tile_keys(page_rows: int) -> int:
    """Keys of a tile: a page is whole tiles. 0 if this kernel cannot read such pages."""
    keys = min(KEYS, page_rows)
    return keys if keys >= 16 and page_rows % keys == 0 and keys & (keys - 1) == 0 else 0


def num_pieces(num_sequences: int, kv_heads: int) -> int:
    """Pieces that a step of so many sequences may have, at most."""
    return num_sequences + -(-PROGRAMS // kv_heads)


def plan_decode(num_pages: Ints, page_rows: int, kv_heads: int, num_full: Ints | None = None) -> tuple[Ints, Ints]:
    """``pieces`` and ``merges`` of a step whose sequences have so many pages each (0: one that is not there), of which
    the first ``num_full`` are full; by default all but the last."""
    sequences = len(num_pages)
    if num_full is None:
        num_full = np.maximum(num_pages - 1, 0)
    tiles = num_pages.astype(np.int64) * (page_rows // tile_keys(page_rows))
    count = -(-tiles // _piece_tiles(tiles, max(MIN_PIECE_KEYS // tile_keys(page_rows), 1), kv_heads))
    stop = np.cumsum(count)
    merges = np.stack([stop - count, stop], axis=1).astype(np.int32)
    sequence = np.repeat(np.arange(sequences), count)
    number = np.arange(len(sequence)) - merges[sequence, 0]
    step = -(-tiles // np.maximum(count, 1))[sequence]  # the pieces of a sequence are equally long
    first = (np.cumsum(tiles) - tiles)[sequence]
    full_stop = first + num_full[sequence] * (page_rows // tile_keys(page_rows))
    pieces = np.zeros((num_pieces(sequences, kv_heads), 5), np.int32)
    pieces[: len(sequence), 0] = sequence
    pieces[: len(sequence), 1] = first + number * step
    pieces[: len(sequence), 2] = first + np.minimum((number + 1) * step, tiles[sequence])
    pieces[: len(sequence), 3] = count[sequence] == 1
    pieces[: len(sequence), 4] = np.clip(full_stop, *pieces[: len(sequence), 1:3].T)
    return pieces, merges


def _piece_tiles(tiles: npt.NDArray[np.int64], least: int, kv_heads: int) -> int:
    """How many tiles a piece has at most: an even share, or somewhat more, up to twice as many, if that keeps all
    pieces on the processors at once."""
    even = max(-(-int(tiles.sum()) * kv_heads // PROGRAMS), least)
    longer = range(even, 2 * even + 1, -(-even // 16))
    return next((length for length in longer if int((-(-tiles // length)).sum()) * kv_heads <= PROGRAMS), even)


def decode_attention_reference(q: Tensor, stored: StoredKV, plan: DecodePlan, page_rows: int) -> Tensor:
    """See ``decode_attention``. In fp32, one sequence after the other."""
    tiles = page_rows // tile_keys(page_rows)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    shared = q.shape[1] // stored.k.shape[1]
    for sequence, (first, last) in enumerate(plan.merges.tolist()):
        if first == last:
            continue
        start, stop = int(plan.pieces[first, 1]) // tiles, int(plan.pieces[last - 1, 2]) // tiles
        pages = plan.pages[start:stop].tolist()
        slots = torch.cat([torch.arange(slot, slot + count, device=q.device) for slot, count in pages])
        k, v = (_read(x, s, slots) for x, s in ((stored.k, stored.k_scale), (stored.v, stored.v_scale)))
        k, v = (x.repeat_interleave(shared, dim=1) for x in (k, v))
        scores = torch.einsum("hd,khd->hk", q[sequence].float(), k) * q.shape[-1] ** -0.5
        out[sequence] = torch.einsum("hk,khd->hd", scores.softmax(dim=-1), v).to(q.dtype)
    return out


def _read(x: Tensor, scale: Tensor | None, slots: Tensor) -> Tensor:
    if scale is None:
        return x[slots].float()
    return x.view(torch.uint8)[slots].view(torch.float8_e4m3fn).float() * scale[slots][..., None]
