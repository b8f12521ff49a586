"""Compiles the kernels of the fused path ahead of time for Hopper, without a GPU, and prints what each needs: one JSON
object a case. Run as a script by ``test_compiled``."""

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import triton
from compile_report import resources
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from underpaint.kernels.decode_attention import (
    MERGED,
    NUM_WARPS,
    choose_stages,
    decode_attention_kernel,
    merge_decode_kernel,
)
from underpaint.kernels.decode_plan import KEYS
from underpaint.kernels.experts import choose_tile, combine_kernel, expert_linear_kernel, route_kernel
from underpaint.kernels.kv_pack import choose_warps, kv_pack_kernel
from underpaint.kernels.norm_modulate import _sizes, add_rms_norm_kernel, gate_norm_modulate_kernel
from underpaint.kernels.skinny_linear import choose_shape, few_rows_kernel, one_row_kernel
from underpaint.kernels.swiglu import quantising_block, quantising_warps, swiglu_kernel, swiglu_quantised_kernel
from underpaint.kv.codec import CODECS, E4M3

SHARED_MEMORY = 227 << 10
Values = dict[str, Any]
PLAIN: Values = {"row_scale_ptr": None}
E4M3_OUT: Values = {"out_ptr": "*u8", "row_scale_ptr": "*fp32"}


def cases() -> Iterator[tuple[Any, Values, Values, dict[str, int]]]:
    """Kernel, types of arguments by name, values of constants, launch options; released sizes in bf16."""
    row = _sizes(4096)
    warps = {"num_warps": row.pop("num_warps")}
    streams = dict.fromkeys(
        ("x_ptr", "delta_ptr", "weight_ptr", "sum_ptr", "out_ptr", "gate_ptr", "scale_ptr"), "*bf16"
    )
    norm_types = {**streams, "stride": "i32", "eps": "fp32"}
    yield add_rms_norm_kernel, norm_types, {**row, **PLAIN}, warps
    yield add_rms_norm_kernel, {**norm_types, **E4M3_OUT}, row, warps
    strides = {"gate_stride": "i32", "scale_stride": "i32", "eps": "fp32", "limit": "fp32"}
    modulate_types = {**streams, "group_ptr": "*i64", **strides}
    yield gate_norm_modulate_kernel, modulate_types, {**row, "NORM": True, **PLAIN}, warps
    yield gate_norm_modulate_kernel, {**modulate_types, **E4M3_OUT}, {**row, "NORM": True}, warps
    swiglu_types = {"x_ptr": "*bf16", "out_ptr": "*bf16"}
    yield swiglu_kernel, swiglu_types, {"WIDTH": 12288, "BLOCK": 2048}, {"num_warps": 4}
    block = quantising_block(12288)
    quantising_types = {**swiglu_types, "out_ptr": "*u8", "scale_ptr": "*fp32"}
    whole_row: Values = {"WIDTH": 12288, "BLOCK": block}
    yield swiglu_quantised_kernel, quantising_types, whole_row, {"num_warps": quantising_warps(block)}
    for heads, kv_heads, adjacent, keep, page in (
        (4, 1, False, True, "bf16"), (4, 1, False, True, "u8"),  # a part of a row
        (32, 8, False, True, "bf16"), (32, 8, False, True, "u8"), (32, 8, False, False, ""),
        (32, 32, True, True, "bf16"), (32, 32, True, True, "u8"), (32, 32, True, False, ""),
    ):  # fmt: skip
        types = {"qkv_ptr": "*bf16", "weight_ptr": "*bf16", "rotary_ptr": "*fp32", "eps": "fp32"}
        types |= dict.fromkeys(("num_slots", "row_stride"), "i32")
        constants: Values = {"HEADS": heads, "KV_HEADS": kv_heads, "HEAD_DIM": 128, "ADJACENT": adjacent, "KEEP": keep}
        constants["PARTS"] = 8 // kv_heads or 1
        scales = dict.fromkeys(("k_scale_ptr", "v_scale_ptr"), "*fp32") if page == "u8" else {}
        if keep:
            types |= {"slots_ptr": "*i32", "page_k_ptr": f"*{page}", "page_v_ptr": f"*{page}", **scales}
        absent = dict.fromkeys({"slots_ptr", "page_k_ptr", "page_v_ptr", "k_scale_ptr", "v_scale_ptr"} - types.keys())
        yield kv_pack_kernel, types, {**constants, **absent}, {"num_warps": choose_warps(kv_heads, 128)}
    heads_of: Values = {"HEADS": 8, "SHARED": 4, "HEAD_DIM": 128, "DIM": 128}
    pieces = {"piece_out_ptr": "*fp32", "piece_lse_ptr": "*fp32"}
    for stored in (CODECS[name] for name in ("bf16", "fp8_v", "fp8")):
        types = {"q_ptr": "*bf16", "out_ptr": "*bf16", "pages_ptr": "*i32", "pieces_ptr": "*i32", **pieces}
        constants = {**heads_of, "ROWS": 16, "KEYS": KEYS, "PAGE_TILES": 128 // KEYS, "PRECISION": "ieee"}
        for name, dtype in (("k", stored.k_dtype), ("v", stored.v_dtype)):
            in_e4m3 = dtype == E4M3
            kind = "fp8e4nv" if in_e4m3 else "bf16"
            types |= {f"{name}_ptr": f"*{kind}", f"{name}_desc": f"tensordesc<{kind}[{KEYS}, 128]>"}
            if in_e4m3:
                types[f"{name}_scale_ptr"] = "*fp32"
            else:
                constants[f"{name}_scale_ptr"] = None
        yield (
            decode_attention_kernel, {**types, "q_stride": "i32", "scale": "fp32"}, constants,
            {"num_warps": NUM_WARPS, "num_stages": choose_stages(stored.k_dtype, stored.v_dtype)},
        )  # fmt: skip
    yield (
        merge_decode_kernel,
        {**pieces, "merges_ptr": "*i32", "out_ptr": "*bf16"},
        {**heads_of, "PIECES": MERGED},
        {"num_warps": 4},
    )
    for outputs, inputs, gated in (
        (6144, 4096, False),
        (12288, 4096, True),
        (4096, 12288, False),
        (151936, 4096, False),
    ):
        for num_rows in (1, 2):
            shape = choose_shape(num_rows, outputs, inputs, gated, torch.bfloat16)
            boxes = {"x_desc": (16, shape.inputs), "weight_desc": (shape.outputs, shape.inputs)}
            types = {name: f"tensordesc<bf16[{box[0]}, {box[1]}]>" for name, box in boxes.items()}
            types |= dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), "*bf16")
            types |= dict.fromkeys(("num_rows", "num_outputs", "out_stride"), "i32")
            constants = {
                "INPUTS": inputs, "BLOCK_OUT": shape.outputs, "BLOCK_IN": shape.inputs, "STAGES": shape.num_stages,
                "GATED": gated, "PRECISION": "ieee", "ROWS": 16,
            }  # fmt: skip
            yield one_row_kernel if num_rows == 1 else few_rows_kernel, types, constants, {"num_warps": shape.num_warps}


def expert_cases() -> Iterator[tuple[Any, Values, Values, dict[str, int]]]:
    """Of the A3B."""
    routing = {"logits_ptr": "*bf16", "chosen_ptr": "*i32", "weights_ptr": "*bf16"}
    router = {"EXPERTS": 128, "BLOCK": 128, "CHOSEN": 8, "RENORMALISE": True}
    yield route_kernel, routing, router, {"num_warps": 1}
    for rows in (16, 64):
        for gated in (True, False):
            shape = choose_tile(rows, torch.bfloat16)
            types = {"x_ptr": "*bf16", "weight_ptr": "*bf16", "out_ptr": "*bf16", "chosen_ptr": "*i32"}
            sorted_pairs = dict.fromkeys(("order_ptr", "bounds_ptr"), "*i32" if rows == 64 else None)
            types |= {name: kind for name, kind in sorted_pairs.items() if kind}
            constants: Values = {name: None for name, kind in sorted_pairs.items() if not kind}
            constants |= {"INPUTS": 2048, "OUTPUTS": 768} if gated else {"INPUTS": 768, "OUTPUTS": 2048}
            constants |= {"PAIRS_PER_INPUT": 8 if gated else 1, "GATED": gated, "PRECISION": "ieee", **shape}
            if gated:
                constants["scale_ptr"] = None
            else:
                types["scale_ptr"] = "*bf16"
            yield expert_linear_kernel, types, constants, {"num_warps": 4}
    yield (
        combine_kernel,
        {"x_ptr": "*bf16", "out_ptr": "*bf16"},
        {"WIDTH": 2048, "BLOCK": 2048, "CHOSEN": 8},
        {"num_warps": 4},
    )


def compile_case(kernel: Any, types: Values, constants: Values, options: dict[str, int]) -> Values:
    names = kernel.arg_names
    constants = {name: value for name, value in {**constants, "CHAINED": True, "NATIVE": True}.items() if name in names}
    types = {name: kind for name, kind in types.items() if name in names}
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = [n for n, kind in types.items() if kind.startswith("*") or n.endswith("stride")]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={**options, "launch_pdl": True})
    shown = {
        name: value for name, value in constants.items() if isinstance(value, int) and name not in ("CHAINED", "NATIVE")
    }
    ptx = compiled.asm["ptx"]
    return {
        "kernel": Path(kernel.__name__).name, "constants": shown, "shared_memory": compiled.metadata.shared,
        "shared_memory_limit": SHARED_MEMORY, "waits": ptx.count("griddepcontrol.wait"),
        "conversions": ptx.count("cvt.rn.satfinite.e4m3x2.f32"), "quantises": types.get("out_ptr") == "*u8",
        "prefetches": ptx.split("griddepcontrol.wait")[0].count("prefetch.global.L2"),
        "divisions": ptx.count("div.rn.f32"),
        "wide_loads": ptx.count("ld.global.v4") + ptx.count("cp.async.cg"), "tma": ptx.count("cp.async.bulk.tensor"),
        **resources(compiled.asm["cubin"]),
    }  # fmt: skip


if __name__ == "__main__":
    for case in chain(cases(), expert_cases()):
        print(json.dumps(compile_case(*case)), flush=True)
