"""The Hopper kernel in e4m3 behind ``attend``, for who names it: compute capability 9.0, bfloat16, head_dim 64 or 128.

Rows of every pass, also those that are kept as a prefix, attend to keys and values in e4m3. Prefixes in pages of rows
are packed anew in every layer; in pages of tiles (``kv_codec`` fp8_tiles) they are read in place. Only groups of few
rows, which wait for memory, attend in 16 bits, in passes that are planned without room over pages of rows.

Queries and keys of a pass that keeps nothing, as denoising steps are, become e4m3 where they are finished, see
``kv_pack_tiles``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from underpaint.attention.batch import RowGroup
from underpaint.attention.planned import Kernel, PlannedPass
from underpaint.kernels import hybrid_attention_fp8
from underpaint.kernels.head_form import HeadForm
from underpaint.kernels.kv_pack import kv_pack
from underpaint.kernels.kv_pack_tiles import kv_pack_tiles
from underpaint.kernels.pack_e4m3 import pack_launch, tiles_of
from underpaint.kernels.packed_tiles import PackedTiles, Stored
from underpaint.kernels.tiles import Group, Ints, Plan, Room, RowShape


class InPlace:
    """The kernel over prefixes in pages of tiles, all of whose groups are its own."""

    def plan_pass(
        self, groups: Sequence[Group], row_stop: Ints, row_shape: RowShape, *, room: Room | None = None
    ) -> Plan:
        return hybrid_attention_fp8.plan_pass(groups, row_stop, row_shape, room=room, apart=False)

    def hybrid_attention(self, q: Tensor, k: Tensor, v: Tensor, stored: Stored | None, plan: Plan) -> Tensor:
        return hybrid_attention_fp8.hybrid_attention(q, k, v, stored, plan)


class TilingPass(PlannedPass):
    """Attention of a pass that can also finish products itself."""

    def finish(self, layer: int, qkv: Tensor, kv_heads: int, form: HeadForm, rotary: Tensor) -> Tensor:
        """See ``ProductAttend``; no row of the pass is kept."""
        q, k, v = qkv.split([qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
        stored, plan = self.of_layer(RowShape.of(q, k), layer)
        launch = plan.launches[0]
        if len(plan.launches) > 1 or launch.shape.kernel != "fp8":
            kv_pack(qkv, kv_heads, form, rotary, None)
            return self(q, k, v, layer)
        tiles = tiles_of(k, stored, launch)
        queries, q_power, k_power = kv_pack_tiles(qkv, kv_heads, form, rotary, launch, tiles)
        pack_launch(k, v, stored, launch, tiles, k_power)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        hybrid_attention_fp8.run_packed(queries, tiles, stored, out, plan.row_stop, launch, q_power)
        return out


def prepare(groups: tuple[RowGroup, ...], room: Room | None = None) -> TilingPass:
    """See ``Prepare`` and ``PlannedPass``."""
    in_place = any(isinstance(group.prefix.stored(0), PackedTiles) for group in groups)
    kernel: Kernel = InPlace() if in_place else hybrid_attention_fp8
    return TilingPass(kernel, groups, room)


def fp8(q: Tensor, k: Tensor, v: Tensor, groups: tuple[RowGroup, ...], layer: int) -> Tensor:
    """See ``Backend``. Plans for this one call; for all layers of a pass use ``prepare``."""
    return prepare(groups)(q, k, v, layer)
