"""Compiles attention in e4m3 and its packing for sm_90 without a GPU, and prints what they need: one JSON object a
case. Run as a script by ``test_attention_fp8``: a compiler assertion would end the process."""

import json
from typing import Any

from compile_report import POINTERS, dump, report
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from underpaint.kernels import hybrid_attention_fp8
from underpaint.kernels.hybrid_attention_fp8 import hybrid_attention_fp8_kernel
from underpaint.kernels.kv_pack import choose_warps
from underpaint.kernels.kv_pack_tiles import kv_pack_tiles_kernel
from underpaint.kernels.pack_e4m3 import NUM_WARPS, pack_pages_kernel, pack_tiles_kernel
from underpaint.kernels.packed_tiles import FACT_PLACES

# head_dim, query heads a K/V head, prefixes in pages of tiles, queries in e4m3
ATTENTION_CASES = [
    (128, 1, False, False), (128, 1, True, True), (128, 4, False, False), (64, 8, True, False), (64, 8, False, True),
]  # fmt: skip
# stored K and V, head_dim, own keys packed already
PACKING_CASES = [("bf16", 128, False), ("fp8e4nv", 128, False), ("bf16", 64, False), ("bf16", 128, True)]
# query heads, K/V heads, Qwen-Image's form
FINISHING_CASES = [(32, 32, True), (32, 8, False)]


def compile_attention(head_dim: int, shared: int, in_place: bool, quantised: bool) -> dict[str, Any]:
    tile = hybrid_attention_fp8.choose_tile(head_dim)
    constants = {
        "HEADS": 8, "SHARED": shared, "HEAD_DIM": head_dim, "KEYS": tile.keys, "STAGES": tile.num_stages,
        "SLACK": hybrid_attention_fp8.SLACK, "IN_PLACE": in_place,
    }  # fmt: skip
    types = {
        **POINTERS, "q_ptr": "*fp8e4nv" if quantised else "*bf16", "out_ptr": "*bf16", "own_tile_ptr": "*i32",
        "q_stride": "i32", "num_own_tiles": "i32",
    }  # fmt: skip
    boxes = {
        "k_desc": ([tile.keys, head_dim], gl.float8e4nv),
        "v_desc": ([2 * head_dim, tile.keys // 2], gl.float8e4nv),
        "facts_desc": ([1, FACT_PLACES], gl.float32),
    }
    for name, (box, dtype) in boxes.items():
        kind = "fp32" if dtype == gl.float32 else "fp8e4nv"
        for array in (name, f"prefix_{name}"):
            types[array] = f"tensordesc<{kind}{box},{gl.NVMMASharedLayout.get_default_for(box, dtype)!r}>"
    options = {"num_warps": tile.num_warps}
    needs, cubin = report(GluonASTSource, hybrid_attention_fp8_kernel, types, constants, 90, options)
    return {"kernel": "fp8", "head_dim": head_dim, "shared": shared, **needs, **products(dump(cubin, "-sass"))}


def products(sass: str) -> dict[str, int]:
    """Of Hopper's products of bytes in machine code: how many there are, how many waits for them, and of the stretches
    before a wait in which scores are computed: how many exponentials stand behind the first product, and how often
    bytes are moved."""
    stretches = sass.split("WARPGROUP.DEPBAR.LE gsb0, 0x0")
    busy = [part[part.index("QGMMA") :] for part in stretches[:-1] if "QGMMA.64x64x32" in part]
    return {
        "products": sass.count("QGMMA"), "waits": len(stretches) - 1,
        "overlapped_exponentials": sum(part.count("MUFU.EX2") for part in busy),
        "moved_bytes": sum(part.count("PRMT") for part in busy),
    }  # fmt: skip


def compile_packing(stored: str, head_dim: int, values_only: bool) -> dict[str, Any]:
    constants: dict[str, Any] = {"HEADS": 8, "HEAD_DIM": head_dim, "KEYS": 128, "NATIVE": True, "CHAINED": True}
    types = {
        "k_ptr": "*bf16", "v_ptr": "*bf16", "stored_k_ptr": f"*{stored}", "stored_v_ptr": f"*{stored}",
        "own_tiles_ptr": "*i32", "prefix_tiles_ptr": "*i32", "k_out_ptr": "*u8", "v_out_ptr": "*u8",
        "facts_ptr": "*fp32", "num_own": "i32", "num_prefix": "i32",
        **dict.fromkeys(("k_stride", "v_stride", "stored_k_stride", "stored_v_stride"), "i32"),
    }  # fmt: skip
    for name in ("k_scale_ptr", "v_scale_ptr"):
        if stored == "bf16":
            constants[name] = None
        else:
            types[name] = "*fp32"
    if values_only:
        types["k_power"] = "fp32"
    else:
        constants["k_power"] = None
    options = {"num_warps": NUM_WARPS, "launch_pdl": True}
    needs, cubin = report(ASTSource, pack_tiles_kernel, types, constants, 90, options)
    return {"kernel": "packing", "stored": stored, "head_dim": head_dim, **needs, **packed(dump(cubin, "-sass"))}


def compile_pages(head_dim: int) -> dict[str, Any]:
    constants = {"HEADS": 8, "HEAD_DIM": head_dim, "KEYS": 128, "NATIVE": True, "CHAINED": True}
    types = {
        "k_ptr": "*bf16", "v_ptr": "*bf16", "slots_ptr": "*i32", "k_stride": "i32", "v_stride": "i32",
        "num_slots": "i32", "k_out_ptr": "*u8", "v_out_ptr": "*u8", "facts_ptr": "*fp32",
    }  # fmt: skip
    options = {"num_warps": NUM_WARPS, "launch_pdl": True}
    needs, cubin = report(ASTSource, pack_pages_kernel, types, constants, 90, options)
    return {"kernel": "packing", "stored": "pages", "head_dim": head_dim, **needs, **packed(dump(cubin, "-sass"))}


def compile_finishing(heads: int, kv_heads: int, adjacent: bool) -> dict[str, Any]:
    constants = {
        "HEADS": heads, "KV_HEADS": kv_heads, "HEAD_DIM": 128, "ADJACENT": adjacent, "KEYS": 128, "NATIVE": True,
        "CHAINED": True,
    }  # fmt: skip
    types = {
        "qkv_ptr": "*bf16", "weight_ptr": "*bf16", "rotary_ptr": "*fp32", "own_tiles_ptr": "*i32", "q_out_ptr": "*u8",
        "k_out_ptr": "*u8", "row_stride": "i32", "eps": "fp32", "q_power": "fp32", "k_power": "fp32",
    }  # fmt: skip
    options = {"num_warps": choose_warps(kv_heads, 128), "launch_pdl": True}
    needs, cubin = report(ASTSource, kv_pack_tiles_kernel, types, constants, 90, options)
    return {"kernel": "finishing", "adjacent": adjacent, **needs, **packed(dump(cubin, "-sass"))}


def packed(sass: str) -> dict[str, int]:
    return {
        "wide_stores": sass.count("STG.E.128"), "conversions": sass.count("F2FP.SATFINITE.E4M3"),
        "waits": sass.count("ACQBULK"),
    }  # fmt: skip


if __name__ == "__main__":
    for attention_case in ATTENTION_CASES:
        print(json.dumps(compile_attention(*attention_case)), flush=True)
    for packing_case in PACKING_CASES:
        print(json.dumps(compile_packing(*packing_case)), flush=True)
    for head_dim in (128, 64):
        print(json.dumps(compile_pages(head_dim)), flush=True)
    for finishing_case in FINISHING_CASES:
        print(json.dumps(compile_finishing(*finishing_case)), flush=True)
