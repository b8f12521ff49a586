"""Compiles the attention kernels ahead of time, without a GPU, and prints what they need: one JSON object a case.

Run as a script by ``test_compiled``, with the name of a kernel: a compiler assertion would end the process.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from underpaint.kernels import hybrid_attention_gluon
from underpaint.kernels.hybrid_attention_gluon import hybrid_attention_gluon_kernel
from underpaint.kernels.hybrid_attention_triton import choose_tile, hybrid_attention_kernel
from underpaint.kernels.tiles import RowShape

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10}
# Of the Triton kernel: arch, dtype, stored K, stored V, head_dim, query heads a K/V head, tiles for
TRITON_CASES = [
    (90, "bf16", "bf16", "bf16", 128, 1, "steps"),
    (90, "bf16", "bf16", "bf16", 128, 4, "steps"),
    (90, "bf16", "bf16", "bf16", 128, 1, "causal"),
    (90, "bf16", "bf16", "bf16", 128, 4, "causal"),
    (90, "bf16", "bf16", "bf16", 128, 4, "few rows"),
    (90, "bf16", "fp8e4nv", "fp8e4nv", 128, 4, "few rows"),
    (90, "bf16", "bf16", "bf16", 64, 1, "steps"),
    (90, "fp32", "fp32", "fp32", 32, 2, "steps"),
    (80, "bf16", "bf16", "bf16", 128, 1, "steps"),
    (80, "fp16", "u8", "u8", 64, 1, "few rows"),
]
# Of the Gluon kernel: head_dim, query heads a K/V head, stored K and V as packed tiles
GLUON_CASES = [
    (128, 1, False),
    (128, 4, False),
    (128, 1, True),
    (64, 1, False),
    (64, 8, False),
]
POINTERS = {
    "row_stop_ptr": "*i32", "work_ptr": "*i32", "prefix_tiles_ptr": "*i32", "queue_ptr": "*i32",
    "piece_out_ptr": "*fp32", "piece_lse_ptr": "*fp32", "scale": "fp32",
}  # fmt: skip


def compile_triton(
    arch: int, dtype: str, stored_k: str, stored_v: str, head_dim: int, shared: int, work: str
) -> dict[str, Any]:
    row_shape = RowShape(8 * shared, 8, head_dim, DTYPES[dtype], torch.device("cpu"))
    tile = choose_tile(row_shape, work == "few rows", work == "causal", SHARED_MEMORY[arch])
    box = f"[{tile.keys}, {head_dim}]"
    constants: dict[str, Any] = {
        "HEADS": 8, "SHARED": shared, "HEAD_DIM": head_dim, "DIM": head_dim, "ROWS": tile.rows, "KEYS": tile.keys,
        "K_PACKED": False, "V_PACKED": False, "PRECISION": "ieee",
    }  # fmt: skip
    types = {
        **POINTERS, "q_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "q_stride": "i32", "out_stride": "i32",
        "k_desc": f"tensordesc<{dtype}{box}>", "v_desc": f"tensordesc<{dtype}{box}>",
        "stored_k_desc": f"tensordesc<{stored_k}{box}>", "stored_v_desc": f"tensordesc<{stored_v}{box}>",
    }  # fmt: skip
    for name, stored in (("k_scale_ptr", stored_k), ("v_scale_ptr", stored_v)):
        if stored in ("fp8e4nv", "u8"):
            types[name] = "*fp32"
        else:
            constants[name] = None
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    case = {
        "kernel": "triton", "arch": arch, "dtype": dtype, "stored": f"{stored_k}/{stored_v}", "head_dim": head_dim,
        "shared": shared, "work": work, "tile": [tile.rows, tile.keys, tile.num_warps, tile.num_stages],
    }  # fmt: skip
    needs, _ = report(ASTSource, hybrid_attention_kernel, types, constants, arch, options)
    return {**case, **needs}


def compile_gluon(head_dim: int, shared: int, packed: bool) -> dict[str, Any]:
    tile = hybrid_attention_gluon.choose_tile(head_dim)
    constants = {
        "HEADS": 8, "SHARED": shared, "HEAD_DIM": head_dim, "KEYS": tile.keys, "STAGES": tile.num_stages,
        "K_PACKED": packed, "V_PACKED": packed,
    }  # fmt: skip
    q_box, key_box = [64 // shared, shared, head_dim], [tile.keys, head_dim]
    boxes = {"q_desc": q_box, **dict.fromkeys(("k_desc", "v_desc", "stored_k_desc", "stored_v_desc"), key_box)}
    types = {**POINTERS, "out_ptr": "*bf16"}
    for name, box in boxes.items():
        types[name] = f"tensordesc<bf16{box},{gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)!r}>"
    case = {"kernel": "gluon", "arch": 90, "dtype": "bf16", "head_dim": head_dim, "shared": shared, "packed": packed}
    options = {"num_warps": tile.num_warps}
    needs, cubin = report(GluonASTSource, hybrid_attention_gluon_kernel, types, constants, 90, options)
    return {**case, **needs, **products(cubin)}


def report(
    source: Any, kernel: Any, types: dict[str, str], constants: dict[str, Any], arch: int, options: dict[str, int]
) -> tuple[dict[str, Any], bytes]:
    """Compiled for ``arch``: resources and which of Hopper's instructions are there, and the machine code."""
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = [n for n in names if signature[n].startswith("*") or n.endswith("stride")]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    made = source(kernel, signature, {(names.index(n),): value for n, value in constants.items()}, attributes)
    compiled = triton.compile(made, target=GPUTarget("cuda", arch, 32), options=options)
    ptx, cubin = compiled.asm["ptx"], compiled.asm["cubin"]
    needs = {
        "shared_memory": compiled.metadata.shared, "shared_memory_limit": SHARED_MEMORY[arch],
        "wgmma": ptx.count("wgmma.mma_async"), "tma": ptx.count("cp.async.bulk.tensor"), **resources(cubin),
    }  # fmt: skip
    return needs, cubin


def dump(cubin: bytes, what: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, what, file.name], capture_output=True, text=True, check=True).stdout


def resources(cubin: bytes) -> dict[str, int]:
    """Registers a thread, and bytes of stack (where spills go) and local memory a thread."""
    text = dump(cubin, "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", text)
    assert found, text
    return dict(zip(("registers", "stack", "local"), map(int, found.groups()), strict=True))


def products(cubin: bytes) -> dict[str, Any]:
    """Of Hopper's matrix products in machine code: how many there are, how many end a group that can be waited for, and
    how many exponentials stand where the products of weights and values may still be running; and how long the loops
    around products are, in instructions, the shortest first."""
    sass = dump(cubin, "-sass")
    exponentials = 0
    for part in sass.split("WARPGROUP.DEPBAR.LE gsb0, 0x1")[1:]:
        exponentials += part.split("WARPGROUP.DEPBAR.LE gsb0, 0x0")[0].count("MUFU.EX2")
    groups = len(re.findall(r"HGMMA.*gsb0", sass))
    return {
        "products": sass.count("HGMMA"), "product_groups": groups, "overlapped_exponentials": exponentials,
        "loops": sorted(len(loop) for loop in loops(sass) if any("HGMMA" in line for line in loop)),
    }  # fmt: skip


def loops(sass: str) -> Iterator[list[str]]:
    """The instructions between a branch and the one before it that it leads to."""
    lines = re.findall(r"/\*([0-9a-f]{4,5})\*/ +(.*?);", sass)
    places = {int(address, 16): place for place, (address, _) in enumerate(lines)}
    for place, (_, line) in enumerate(lines):
        branch = re.fullmatch(r"(?:@!?U?P\d )?BRA.* 0x([0-9a-f]+) *", line)
        if branch and (start := places[int(branch[1], 16)]) < place:
            yield [line for _, line in lines[start : place + 1]]


if __name__ == "__main__":
    reports = {
        "triton": (compile_triton(*values) for values in TRITON_CASES),
        "gluon": (compile_gluon(*values) for values in GLUON_CASES),
    }
    for needs in reports[sys.argv[1]]:
        print(json.dumps(needs), flush=True)
