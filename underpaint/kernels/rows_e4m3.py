"""Rows of Q as ``hybrid_attention_fp8`` multiplies them: in e4m3, with a scale each unless they come so."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TILE_ROWS = gl.constexpr(64)
"""Lanes of a consumer, a warpgroup."""
E4M3_MAX = gl.constexpr(448.0)
SMALLEST_ROW = gl.constexpr(2.0**-40)
"""The largest value of a row of Q counts as at least this, so that no scale is 0."""


@gluon.jit
def load_rows(  # type: ignore[no-untyped-def]
    q_ptr, q_stride, first_row, num_rows, head, PART: gl.constexpr,
    HEADS: gl.constexpr, SHARED: gl.constexpr, HEAD_DIM: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """(64, HEAD_DIM) as they are, the lanes of consumer PART; 0 in those beyond the rows, and behind the last pair."""
    lane = PART * TILE_ROWS + gl.arange(0, TILE_ROWS, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LAYOUT))
    start = (first_row + lane // SHARED).to(gl.int64) * q_stride + (head * SHARED + lane % SHARED) * HEAD_DIM
    used = (lane // SHARED < num_rows) & (head < HEADS)
    return gl.load(q_ptr + start[:, None] + column[None, :], mask=used[:, None], other=0.0)


@gluon.jit
def quantised(rows, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """e4m3 of rows, and the scale of each, in the layout of the rows of scores. Rows that are e4m3 already have no
    scale of their own."""
    layout: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    if rows.dtype == gl.float8e4nv:
        return rows, gl.full([TILE_ROWS], 1.0, gl.float32, layout=layout)
    else:
        x = rows.to(gl.float32)
        scale = gl.maximum(gl.max(gl.abs(x), 1), SMALLEST_ROW) / E4M3_MAX
        return (x * (1.0 / scale)[:, None]).to(gl.float8e4nv), gl.convert_layout(scale, layout)
