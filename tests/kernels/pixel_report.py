"""Compiles the kernels between the VAE's convolutions ahead of time for Hopper, without a GPU, at the widths of the
released model, and prints what each needs: one JSON object a case. Run as a script by ``test_pixel_rows``."""

import json
from collections.abc import Iterator
from typing import Any

import triton
from compile_report import resources
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from underpaint.kernels.pixel_rows import NUM_WARPS, add_residual_kernel, norm_silu_kernel, tile

WIDTHS = [144, 288, 576, 1152, 96, 192, 384, 768]
Values = dict[str, Any]


def cases(width: int) -> Iterator[tuple[Any, Values, Values]]:
    """Kernel, types of arguments by name, values of constants."""
    pointers = dict.fromkeys(("x_ptr", "bias_ptr", "gamma_ptr", "residual_ptr", "out_ptr"), "*bf16")
    counts = dict.fromkeys(("num_pixels", "num_columns"), "i32")
    strides = dict.fromkeys((f"{of}_{to}" for of in ("x", "residual", "out") for to in ("row", "pixel")), "i32")
    types = {**pointers, **counts, **strides}
    yield norm_silu_kernel, types, tile(width)
    yield norm_silu_kernel, types, {**tile(width), "bias_ptr": None}
    yield add_residual_kernel, types, {**tile(width), "residual_channel": 1}
    yield add_residual_kernel, {**types, "residual_channel": "i32"}, tile(width)


def compile_case(kernel: Any, types: Values, constants: Values) -> Values:
    names = kernel.arg_names
    types = {name: kind for name, kind in types.items() if name in names and name not in constants}
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = [name for name in types if name != "residual_channel"]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": NUM_WARPS})
    ptx = compiled.asm["ptx"]
    return {
        "kernel": kernel.__name__, "width": constants["WIDTH"], "piece": constants["PIECE"],
        "residual_channel": 2 if "residual_channel" in types else 1, "shared_memory": compiled.metadata.shared,
        "narrow_loads": ptx.count("ld.global") - ptx.count("ld.global.v4"),
        "stores": ptx.count("st.global"), "wide_stores": ptx.count("st.global.v4"),
        **resources(compiled.asm["cubin"]),
    }  # fmt: skip


if __name__ == "__main__":
    for width in WIDTHS:
        for case in cases(width):
            print(json.dumps(compile_case(*case)), flush=True)
