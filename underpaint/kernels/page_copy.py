"""Copying rows between pages: the same rows of many tensors in one launch, by address.

What a page pool stores of a token is a row in each of its planes (K and V of every layer). To hand over a prefix, rows
at scattered slots are gathered, scattered, or copied from pool to pool, bit by bit. Addresses instead of tensors,
because the source may be the memory of another process, on another device.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_BYTES = 32 << 10
"""What a program copies at a time."""
ALIGNMENT = 16


@triton.jit
def copy_rows_kernel(  # type: ignore[no-untyped-def]
    addresses_ptr,  # (planes, 2) int64: of the source, of the destination
    src_rows_ptr,  # (rows,) int64, or None: 0, 1, 2, ...
    dst_rows_ptr,
    num_rows,
    WORD: tl.constexpr,  # type of the unit of copying
    WORDS: tl.constexpr,  # a row
    COLUMNS: tl.constexpr,  # WORDS, up to a power of two
    ROWS: tl.constexpr,
):
    plane = tl.program_id(1)
    src = tl.load(addresses_ptr + 2 * plane).to(tl.pointer_type(WORD))
    dst = tl.load(addresses_ptr + 2 * plane + 1).to(tl.pointer_type(WORD))
    src = tl.multiple_of(src, 16)
    dst = tl.multiple_of(dst, 16)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = row < num_rows
    src_row = row if src_rows_ptr is None else tl.load(src_rows_ptr + row, mask=valid, other=0)
    dst_row = row if dst_rows_ptr is None else tl.load(dst_rows_ptr + row, mask=valid, other=0)
    column = tl.arange(0, COLUMNS)
    inside = valid[:, None] & (column < WORDS)[None, :]
    words = tl.load(src + src_row[:, None] * WORDS + column[None, :], mask=inside, other=0)
    tl.store(dst + dst_row[:, None] * WORDS + column[None, :], words, mask=inside)


def upload(pairs: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """(planes, 2) int64 on ``device``: addresses for ``copy_rows``, of the source and the destination of each plane.

    Once for many launches: an upload from plain memory waits for all that its stream has yet to do.
    """
    assert not any(address % ALIGNMENT for pair in pairs for address in pair)
    return torch.tensor(pairs, dtype=torch.int64).view(-1, 2).to(device)


def copy_rows(
    addresses: Tensor, row_bytes: int, num_rows: int, src_rows: Tensor | None, dst_rows: Tensor | None
) -> None:
    """Copy row ``src_rows[i]`` of a source to row ``dst_rows[i]`` of its destination, for every i and every plane.

    ``addresses``: see ``upload``. ``src_rows``, ``dst_rows``: (num_rows,) int64; None: the rows lie one after the
    other. ``row_bytes`` is a multiple of 4. Runs on the current device and stream, where all tensors are.
    """
    assert row_bytes % 4 == 0
    if not num_rows:
        return
    word_bytes = 8 if row_bytes % 8 == 0 else 4
    words = row_bytes // word_bytes
    columns = triton.next_power_of_2(words)
    rows = max(BLOCK_BYTES // (columns * word_bytes), 1)
    copy_rows_kernel[(triton.cdiv(num_rows, rows), len(addresses))](
        addresses, src_rows, dst_rows, num_rows,
        WORD=tl.int64 if word_bytes == 8 else tl.int32, WORDS=words, COLUMNS=columns, ROWS=rows, num_warps=8,
    )  # fmt: skip


def copy_rows_reference(
    src: Sequence[Tensor], dst: Sequence[Tensor], src_rows: Tensor | None, dst_rows: Tensor | None
) -> None:
    """The same on tensors of (rows, ...) each, by torch's indexing."""
    for one, other in zip(src, dst, strict=True):
        rows = one if src_rows is None else one.index_select(0, src_rows)
        if dst_rows is None:
            other[: len(rows)] = rows
        else:
            other[dst_rows] = rows[: len(dst_rows)]
