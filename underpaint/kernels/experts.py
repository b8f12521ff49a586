"""A mixture of experts without a look at the host: every row through the few experts that its router chose.

``route`` turns the router's logits into chosen experts, in ascending order, and their weights. A *pair* is a row and
one of its experts. Pairs of one expert stand together in tiles; ``expert_linear`` multiplies each tile by its expert's
weights. ``combine`` adds what the experts of a row said in ascending order of the experts, so that the sum of a row
does not depend on the other rows. Shapes depend on the number of rows only.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from underpaint.kernels.chain import chained, let_next_begin, wait_for_previous

FEW_PAIRS = 64
"""Up to here a pair is a tile by itself: nothing is to be sorted, and two that share an expert find it in the cache."""


@dataclass(frozen=True, eq=False)
class ExpertTiles:
    """Tiles of pairs: ``chosen`` (rows, num_chosen) int32, the expert of each pair. With ``order`` (pairs,) int32,
    pairs by expert, tile i is ``bounds[i]``: its expert, and the range of ``order``; an unused one is empty. Without
    ``order`` tile i is pair i."""

    chosen: Tensor
    order: Tensor | None
    bounds: Tensor | None
    rows: int

    @property
    def num_tiles(self) -> int:
        return self.chosen.numel() if self.bounds is None else len(self.bounds)


@triton.jit
def route_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, chosen_ptr, weights_ptr,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, CHOSEN: tl.constexpr, RENORMALISE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program i: row i. Of equally likely experts the first is chosen."""
    row = tl.program_id(0)
    expert = tl.arange(0, BLOCK)
    let_next_begin(CHAINED)
    wait_for_previous(CHAINED)
    logits = tl.load(logits_ptr + row * EXPERTS + expert, mask=expert < EXPERTS, other=float("-inf")).to(tl.float32)
    likely = tl.exp(logits - tl.max(logits, 0))
    likely = likely / tl.sum(likely, 0)
    # NaN, which is neither less nor more than others, counts as 0: else too few would be found, and the rest of the row
    # be whatever was in memory, which reads weights of no expert.
    left = tl.where(expert < EXPERTS, tl.where(likely == likely, likely, 0.0), -1.0)
    for _ in tl.static_range(CHOSEN):
        left = tl.where(expert == tl.argmax(left, 0), -1.0, left)
    is_chosen = (left < 0.0) & (expert < EXPERTS)
    if RENORMALISE:
        likely = likely / tl.sum(tl.where(is_chosen, likely, 0.0), 0)
    place = row * CHOSEN + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    tl.store(chosen_ptr + place, expert, mask=is_chosen)
    tl.store(weights_ptr + place, likely.to(weights_ptr.dtype.element_ty), mask=is_chosen)


@triton.jit
def expert_linear_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, out_ptr, chosen_ptr, order_ptr, bounds_ptr, scale_ptr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, PAIRS_PER_INPUT: tl.constexpr, GATED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (i, j): block i of outputs of tile j. GATED: the weights of an expert are a gate's rows and then as many
    others, see ``swiglu``. ``scale_ptr``: a factor for each pair, or None."""
    tile = tl.program_id(1)
    output = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    channel = tl.arange(0, BLOCK_IN)
    is_output = output < OUTPUTS
    let_next_begin(CHAINED)
    wait_for_previous(CHAINED)
    if order_ptr is None:
        expert = tl.load(chosen_ptr + tile)
        pair = (tile + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
        is_pair = tl.arange(0, BLOCK_ROWS) < 1
        start, stop = tile, tile + 1
    else:
        expert = tl.load(bounds_ptr + 3 * tile)
        start = tl.load(bounds_ptr + 3 * tile + 1)
        stop = tl.load(bounds_ptr + 3 * tile + 2)
        place = start + tl.arange(0, BLOCK_ROWS)
        is_pair = place < stop
        pair = tl.load(order_ptr + place, mask=is_pair, other=0).to(tl.int64)
    if start < stop:
        weights = weight_ptr + expert.to(tl.int64) * (INPUTS * OUTPUTS * (2 if GATED else 1))
        weights += output[None, :] * INPUTS + channel[:, None]
        xs = x_ptr + (pair // PAIRS_PER_INPUT)[:, None] * INPUTS + channel[None, :]
        acc = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
        up = tl.zeros([BLOCK_ROWS, BLOCK_OUT], tl.float32)
        for first in tl.range(0, INPUTS, BLOCK_IN, num_stages=STAGES):
            is_channel = channel < INPUTS - first
            inside = is_channel[:, None] & is_output[None, :]
            x = tl.load(xs + first, mask=is_pair[:, None] & is_channel[None, :], other=0.0)
            acc = tl.dot(x, tl.load(weights + first, mask=inside, other=0.0), acc, input_precision=PRECISION)
            if GATED:
                other = tl.load(weights + OUTPUTS * INPUTS + first, mask=inside, other=0.0)
                up = tl.dot(x, other, up, input_precision=PRECISION)
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        if GATED:
            gate = acc.to(dtype).to(tl.float32)
            acc = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
        if scale_ptr is not None:
            scale = tl.load(scale_ptr + pair, mask=is_pair, other=0.0).to(tl.float32)
            acc = acc.to(dtype).to(tl.float32) * scale[:, None]
        outs = out_ptr + pair[:, None] * OUTPUTS + output[None, :]
        tl.store(outs, acc.to(dtype), mask=is_pair[:, None] & is_output[None, :])


@triton.jit
def combine_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHOSEN: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (i, j): block j of row i; sums are rounded as they grow."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    let_next_begin(CHAINED)
    wait_for_previous(CHAINED)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    total = tl.zeros([BLOCK], dtype)
    for place in tl.static_range(CHOSEN):
        x = tl.load(x_ptr + (row * CHOSEN + place) * WIDTH + column, mask=inside, other=0.0)
        total = (total.to(tl.float32) + x.to(tl.float32)).to(dtype)
    tl.store(out_ptr + row * WIDTH + column, total, mask=inside)


def route(logits: Tensor, num_chosen: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """(rows, experts) logits -> the chosen experts of each row, ascending, (rows, num_chosen) int32, and their weights
    in the dtype of the logits: probabilities in fp32, with ``renormalise`` made to add up to 1."""
    num_rows, num_experts = logits.shape
    chosen = torch.empty(num_rows, num_chosen, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_rows, num_chosen, dtype=logits.dtype, device=logits.device)
    with torch.cuda.device_of(logits):
        route_kernel[(num_rows,)](
            logits, chosen, weights, EXPERTS=num_experts, BLOCK=triton.next_power_of_2(num_experts), CHOSEN=num_chosen,
            RENORMALISE=renormalise, num_warps=1, **chained(logits),
        )  # fmt: skip
    return chosen, weights


def make_tiles(chosen: Tensor, num_experts: int) -> ExpertTiles:
    """The tiles of (rows, num_chosen) chosen experts; none of it is looked at on the host."""
    pairs = chosen.flatten()
    num_pairs = len(pairs)
    if num_pairs <= FEW_PAIRS:
        return ExpertTiles(chosen, None, None, 16)
    rows = 16 if num_pairs < 16 * num_experts else 64
    expert, order = pairs.sort(stable=True)
    edges = torch.searchsorted(expert, torch.arange(num_experts + 1, device=pairs.device, dtype=torch.int32))
    start, count = edges[:-1], edges.diff()
    tile_stop = (-(-count // rows)).cumsum(0)
    tile = torch.arange(num_pairs // rows + min(num_experts, num_pairs), device=pairs.device)
    of = torch.searchsorted(tile_stop, tile, right=True)
    used = of < num_experts
    of = of.clamp_max(num_experts - 1)
    first = start[of] + (tile - tile_stop[of] - (-count[of] // rows)) * rows
    stop = torch.where(used, torch.minimum(first + rows, start[of] + count[of]), first)
    return ExpertTiles(chosen, order.int(), torch.stack([of, first, stop], dim=1).int(), rows)


def choose_tile(rows: int, dtype: torch.dtype) -> dict[str, int]:
    """The tile of ``expert_linear_kernel`` for ``rows`` pairs: what shared memory and registers hold."""
    if dtype == torch.float32:
        return {"BLOCK_ROWS": rows, "BLOCK_OUT": 32, "BLOCK_IN": 32, "STAGES": 2}
    if rows == 16:
        return {"BLOCK_ROWS": rows, "BLOCK_OUT": 64, "BLOCK_IN": 128, "STAGES": 3}
    return {"BLOCK_ROWS": rows, "BLOCK_OUT": 128, "BLOCK_IN": 64, "STAGES": 3}


def expert_linear(
    x: Tensor, weight: Tensor, tiles: ExpertTiles, gated: bool = False, scale: Tensor | None = None
) -> Tensor:
    """Each pair's input times its expert's ``weight`` (experts, outputs, inputs) -> (pairs, outputs); ``gated``:
    (pairs, outputs / 2). ``x``: (rows, inputs), or (pairs, inputs). ``scale``: (pairs,), multiplied onto the result."""
    num_pairs, (num_inputs, num_outputs) = tiles.chosen.numel(), (x.shape[1], weight.shape[1] // (2 if gated else 1))
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert num_pairs % len(x) == 0
    out = torch.empty(num_pairs, num_outputs, dtype=x.dtype, device=x.device)
    shape = choose_tile(tiles.rows, x.dtype)
    with torch.cuda.device_of(x):
        expert_linear_kernel[(triton.cdiv(num_outputs, shape["BLOCK_OUT"]), tiles.num_tiles)](
            x, weight, out, tiles.chosen, tiles.order, tiles.bounds, scale, INPUTS=num_inputs, OUTPUTS=num_outputs,
            PAIRS_PER_INPUT=num_pairs // len(x), GATED=gated, PRECISION="ieee", num_warps=4, **shape, **chained(x),
        )  # fmt: skip
    return out


def combine(x: Tensor, num_rows: int) -> Tensor:
    """(pairs, width), the pairs of a row together -> (rows, width), their sum."""
    num_pairs, width = x.shape
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    block = min(2048, triton.next_power_of_2(width))
    with torch.cuda.device_of(x):
        combine_kernel[(num_rows, triton.cdiv(width, block))](
            x, out, WIDTH=width, BLOCK=block, CHOSEN=num_pairs // num_rows, num_warps=max(block // 512, 1), **chained(x)
        )
    return out
