"""Compiles the Triton kernel ahead of time, without a GPU, and prints what it needs: one JSON object a case.

Run as a script by ``test_hybrid_attention_triton``: a compiler assertion would end the process.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from underpaint.kernels.hybrid_attention_triton import choose_tile, hybrid_attention_kernel

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10}
# (arch, dtype, stored K, stored V, head_dim, query heads a K/V head, few rows)
CASES = [
    (90, "bf16", "bf16", "bf16", 128, 1, False),
    (90, "bf16", "bf16", "bf16", 128, 4, False),
    (90, "bf16", "bf16", "fp8e4nv", 128, 1, False),
    (90, "bf16", "fp8e4nv", "fp8e4nv", 128, 1, False),
    (90, "bf16", "bf16", "bf16", 128, 4, True),
    (90, "bf16", "fp8e4nv", "fp8e4nv", 128, 4, True),
    (90, "bf16", "bf16", "bf16", 64, 1, False),
    (90, "fp32", "fp32", "fp32", 32, 2, False),
    (80, "bf16", "bf16", "bf16", 128, 1, False),
    (80, "fp16", "u8", "u8", 64, 1, False),
]


def compile_case(
    arch: int, dtype: str, stored_k: str, stored_v: str, head_dim: int, shared: int, few_rows: bool
) -> dict[str, Any]:
    tile = choose_tile(DTYPES[dtype], shared, few_rows, SHARED_MEMORY[arch])
    box = f"[{tile.keys}, {head_dim}]"
    constants: dict[str, Any] = {
        "HEADS": 8, "SHARED": shared, "HEAD_DIM": head_dim, "DIM": head_dim, "ROWS": tile.rows, "KEYS": tile.keys,
        "PRECISION": "ieee",
    }  # fmt: skip
    types = {
        "q_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "k_desc": f"tensordesc<{dtype}{box}>",
        "v_desc": f"tensordesc<{dtype}{box}>", "stored_k_desc": f"tensordesc<{stored_k}{box}>",
        "stored_v_desc": f"tensordesc<{stored_v}{box}>", "row_stop_ptr": "*i32", "work_ptr": "*i32",
        "prefix_tiles_ptr": "*i32", "piece_out_ptr": "*fp32", "piece_lse_ptr": "*fp32", "q_stride": "i32",
        "out_stride": "i32", "scale": "fp32",
    }  # fmt: skip
    for name, stored in (("k_scale_ptr", stored_k), ("v_scale_ptr", stored_v)):
        if stored in ("fp8e4nv", "u8"):
            types[name] = "*fp32"
        else:
            constants[name] = None
    names = hybrid_attention_kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = [n for n, t in types.items() if t.startswith("*") or n.endswith("stride")]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(
        hybrid_attention_kernel, signature, {(names.index(n),): value for n, value in constants.items()}, attributes
    )
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    case = {"arch": arch, "dtype": dtype, "stored": f"{stored_k}/{stored_v}", "head_dim": head_dim, "shared": shared}
    return {
        **case, "few_rows": few_rows, "tile": [tile.rows, tile.keys, tile.num_warps, tile.num_stages],
        "shared_memory": compiled.metadata.shared, "shared_memory_limit": SHARED_MEMORY[arch],
        "wgmma": compiled.asm["ptx"].count("wgmma.mma_async"), "tma": compiled.asm["ptx"].count("cp.async.bulk.tensor"),
        **resources(compiled.asm["cubin"]),
    }  # fmt: skip


def resources(cubin: bytes) -> dict[str, int]:
    """Registers a thread, and bytes of stack (where spills go) and local memory a thread."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", report)
    assert found, report
    return dict(zip(("registers", "stack", "local"), map(int, found.groups()), strict=True))


if __name__ == "__main__":
    for case in CASES:
        print(json.dumps(compile_case(*case)), flush=True)
