"""Compiles ``copy_rows_kernel`` for sm_90 without a GPU, for a row of SenseNova-U1's K and for one of its scales."""

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from underpaint.kernels.page_copy import copy_rows_kernel


def compile_ptx(word: tl.dtype, words: int, columns: int, rows: int) -> str:
    constants = {"WORD": word, "WORDS": words, "COLUMNS": columns, "ROWS": rows, "dst_rows_ptr": None}
    types = {"addresses_ptr": "*i64", "src_rows_ptr": "*i64", "num_rows": "i32"}
    names = copy_rows_kernel.arg_names
    source = ASTSource(
        copy_rows_kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in ("addresses_ptr", "src_rows_ptr")},
    )
    ptx: str = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
    return ptx


if __name__ == "__main__":
    data = compile_ptx(tl.int64, 256, 256, 16)
    assert "ld.global.v2.b64" in data, "16 bytes a load"
    assert "st.global.v2.b64" in data
    for ptx in (data, compile_ptx(tl.int64, 4, 4, 1024), compile_ptx(tl.int32, 3, 4, 2048)):
        assert ".local" not in ptx, "registers are spilled"
