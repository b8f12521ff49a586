"""Compiles row-wise quantisation for Hopper, without a GPU; one JSON object a width. See ``compile_report``."""

import json
from typing import Any

import triton
from compile_report import resources
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from underpaint.kernels.quantise import num_warps, quantise_rows_kernel

WIDTHS = (4096, 12288)


def compile_width(width: int) -> dict[str, Any]:
    block = triton.next_power_of_2(width)
    constants = {"WIDTH": width, "BLOCK": block, "NATIVE": True, "CHAINED": True}
    types = {"x_ptr": "*bf16", "out_ptr": "*u8", "scale_ptr": "*fp32", "x_stride": "i32"}
    names = quantise_rows_kernel.arg_names
    source = ASTSource(
        quantise_rows_kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in types},
    )
    options = {"num_warps": num_warps(block), "launch_pdl": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = compiled.asm["ptx"]
    counts = {
        "conversions": ptx.count("cvt.rn.satfinite.e4m3x2.f32"),
        "loads": ptx.count("ld.global"),
        "wide_loads": ptx.count("ld.global.v4.b32"),
    }
    return {"width": width, **counts, **resources(compiled.asm["cubin"])}


if __name__ == "__main__":
    for width in WIDTHS:
        print(json.dumps(compile_width(width)), flush=True)
