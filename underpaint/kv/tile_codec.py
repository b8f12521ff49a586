"""Keys and values in pages of tiles: in each layer a page is a packed tile, see ``kernels.packed_tiles``, and attention
in e4m3 reads it in place.

A page has one power of two for K and one for V of each head, which all its rows decide. So it is written as a whole and
once: by a prefix that is prefilled, whose units and tails begin new pages and go through one pass each, but not by text
that grows row by row. Behind its rows a page is 0, whatever was there before.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from underpaint.errors import BadConfig
from underpaint.kernels.packed_tiles import FACT_PLACES, ORDERED_KEYS, PackedTiles
from underpaint.kv.codec import CODECS, Carver, Codec

FACT_BYTES = 4 * FACT_PLACES


@dataclass(frozen=True)
class TileCodec:
    """K and V in e4m3, as packed tiles."""

    name: str = "fp8_tiles"

    def page_bytes(self, num_heads: int, head_dim: int, page_rows: int) -> int:
        """Bytes that a page takes in one layer, facts included."""
        return num_heads * (2 * page_rows * head_dim + FACT_BYTES)

    def layer(
        self, num_pages: int, page_rows: int, num_heads: int, head_dim: int, device: str, memory: Carver | None
    ) -> "TileLayer":
        """Pages of one layer, in memory of its own. Raises BadConfig."""
        assert memory is None, "pages of tiles are shared with no other process"
        if page_rows % ORDERED_KEYS:
            raise BadConfig(
                f"kv_codec {self.name} needs pages of a multiple of {ORDERED_KEYS} rows, and this checkpoint has pages "
                f"of {page_rows}"
            )
        return TileLayer(PackedTiles.empty(num_pages, num_heads, head_dim, page_rows, device))


FP8_TILES = TileCodec()
AnyCodec = Codec | TileCodec


def find_codec(name: str) -> AnyCodec:
    """The codec that ``kv_codec`` names."""
    return FP8_TILES if name == FP8_TILES.name else CODECS[name]


@dataclass(frozen=True, eq=False)
class TileLayer:
    """K and V of one layer, a tile a page."""

    stored: PackedTiles

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store (rows, heads, head_dim) keys and values at ``slots`` (rows,): whole pages, each from its first row."""
        if not len(slots):
            return
        page_rows = self.stored.keys
        key = slots % page_rows
        begins, follows = key == 0, slots.diff(prepend=slots[:1]) == 1
        assert (begins | follows).all(), "a page of tiles is written once, from its first row on"
        number = begins.cumsum(0) - 1
        pages = slots[begins] // page_rows
        tiles = [x.new_zeros(len(pages), page_rows, *x.shape[1:]) for x in (k, v)]
        for tile, x in zip(tiles, (k, v), strict=True):
            tile[number, key] = x
        self.stored.write(pages, *tiles)

    def read(self, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values at ``slots``, (rows, heads, head_dim) each, in ``dtype``."""
        page_rows = self.stored.keys
        k, v = self.stored.read(slots // page_rows, slots % page_rows)
        return k.to(dtype), v.to(dtype)
