"""``copy_rows`` under Triton's interpreter against plain indexing: a script, because the interpreter is chosen when
Triton is imported. Argument: a seed."""

import sys

import torch

from underpaint.kernels.page_copy import copy_rows, copy_rows_reference, upload

NUM_SLOTS = 90
CASES: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((8, 128), torch.bfloat16),
    ((3, 24), torch.uint8),
    ((2, 16), torch.float32),
    ((3,), torch.float32),
    ((8,), torch.float32),
    ((32, 128), torch.float16),
]


def check(shape: tuple[int, ...], dtype: torch.dtype, num_rows: int) -> None:
    """Gather, scatter and both at once; rows that are not meant stay as they were."""
    size = NUM_SLOTS * torch.Size(shape).numel() * dtype.itemsize
    src = [torch.randint(256, (size,), dtype=torch.uint8).view(dtype).view(NUM_SLOTS, *shape) for _ in range(4)]
    row_bytes = src[0][0].nbytes
    some, others = torch.randperm(NUM_SLOTS)[:num_rows], torch.randperm(NUM_SLOTS)[:num_rows]
    for src_rows, dst_rows in ((some, others), (some, None), (None, others)):
        got, want = ([torch.full_like(x, 7) for x in src] for _ in range(2))
        table = upload([(a.data_ptr(), b.data_ptr()) for a, b in zip(src, got, strict=True)], torch.device("cpu"))
        copy_rows(table[1:], row_bytes, num_rows, src_rows, dst_rows)
        copy_rows(table[:1], row_bytes, num_rows, src_rows, dst_rows)
        copy_rows_reference([x if src_rows is not None else x[:num_rows] for x in src], want, src_rows, dst_rows)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), (shape, dtype, num_rows)


if __name__ == "__main__":
    torch.manual_seed(int(sys.argv[1]))
    for shape, dtype in CASES:
        for num_rows in (0, 1, 37, NUM_SLOTS):
            check(shape, dtype, num_rows)
