"""Packed tiles, in plain PyTorch: keys and values in e4m3 as ``hybrid_attention_fp8`` reads them.

A *packed tile* is a key tile of one K/V head: codes of K (keys, head_dim), codes of V turned over (head_dim, keys), the
first half of the keys before the second, and its facts. Both have one power of two, the smallest with which their
largest value is at most 448 codes: e4m3 is a floating format, so that a finer scale would gain nothing. Keys that are
not valid are 0.

Along V's keys each 16 are ordered as the threads of Hopper's warpgroups hold the scores of 16 keys: bits 3 2 1 0 of a
key stand in its place in the order 2 1 3 0, see ``key_order``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from underpaint.kernels.tiles import StoredKV

FACT_PLACES = 32
"""Of a packed tile, fp32: K's power of two, V's exponent e, 2**-e; the rest is not written. TMA needs places of 128
bytes."""
ORDERED_KEYS = 16
"""So many keys are ordered among themselves: a tile has a multiple of them."""
E4M3 = torch.float8_e4m3fn
LEAST_EXPONENT, MOST_EXPONENT = -40, 120


def key_order(num_keys: int) -> Tensor:
    """(num_keys,) which key of a tile stands at each place of V's."""
    place = torch.arange(num_keys)
    return (place & ~15) | (place & 1) | ((place >> 1) & 6) | ((place & 2) << 2)


def tile_exponent(largest: Tensor) -> Tensor:
    """int32: the smallest with which values up to ``largest`` are at most 448 times its power of two."""
    mantissa, exponent = torch.frexp(largest)
    exponent = exponent - 9 + (mantissa > 0.875).to(exponent.dtype)  # 448 is 0.875 * 2**9
    return torch.where(largest == 0, LEAST_EXPONENT, exponent).clamp(LEAST_EXPONENT, MOST_EXPONENT)


def encode_tiles(x: Tensor) -> tuple[Tensor, Tensor]:
    """(tiles, keys, heads, head_dim) -> e4m3 of the same shape, and exponents (tiles, heads) int32: x is about e4m3 *
    2**exponent. What is not finite becomes NaN, and does not count where the exponent is chosen, or as the most."""
    x = x.float()
    exponent = tile_exponent(x.abs().nan_to_num(nan=0.0).amax(dim=(1, 3)))
    scaled = x * torch.exp2(-exponent.float())[:, None, :, None]
    return scaled.where(scaled.isfinite(), torch.nan).to(E4M3), exponent


@dataclass(frozen=True, eq=False)
class PackedTiles:
    """Tiles of all K/V heads, in one piece each.

    ``k``: e4m3 (tiles * kv_heads * keys, head_dim); ``v``: e4m3 (tiles * kv_heads * 2 * head_dim, keys / 2);
    ``facts``: fp32 (tiles * kv_heads, FACT_PLACES).
    """

    k: Tensor
    v: Tensor
    facts: Tensor
    kv_heads: int

    @classmethod
    def empty(
        cls, num_tiles: int, kv_heads: int, head_dim: int, keys: int, device: torch.device | str
    ) -> "PackedTiles":
        assert keys % ORDERED_KEYS == 0, f"a tile of {keys} keys"
        count = num_tiles * kv_heads
        k = torch.empty(count * keys, head_dim, dtype=E4M3, device=device)
        v = torch.empty(count * 2 * head_dim, keys // 2, dtype=E4M3, device=device)
        return cls(k, v, torch.empty(count, FACT_PLACES, device=device), kv_heads)

    @property
    def head_dim(self) -> int:
        return self.k.shape[1]

    @property
    def keys(self) -> int:
        return 2 * self.v.shape[1]

    def write(self, numbers: Tensor, k: Tensor, v: Tensor) -> None:
        """Fill the tiles of these ``numbers`` (tiles,) with (tiles, keys, heads, head_dim), 0 where there is no key."""
        halves = self.keys // 2
        k_codes, k_exponent = encode_tiles(k)
        v_codes, v_exponent = encode_tiles(v)
        turned = v_codes.view(torch.uint8)[:, key_order(self.keys).to(v.device)].unflatten(1, (2, halves))
        k_there, v_there = self._bytes()
        k_there[numbers] = k_codes.view(torch.uint8).transpose(1, 2)
        v_there[numbers] = turned.permute(0, 3, 1, 4, 2)
        exponents = v_exponent.float()
        facts = torch.stack([torch.exp2(k_exponent.float()), exponents, torch.exp2(-exponents)], dim=-1)
        self.facts.view(-1, self.kv_heads, FACT_PLACES)[numbers, :, : facts.shape[-1]] = facts

    def read(self, numbers: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of key ``keys[i]`` of tile ``numbers[i]``, (rows, heads, head_dim) fp32 each."""
        place = key_order(self.keys).argsort().to(keys.device)[keys]
        k_there, v_there = self._bytes()
        k = k_there[numbers, :, keys].view(E4M3).float()
        v = v_there[numbers, :, place // (self.keys // 2), :, place % (self.keys // 2)].view(E4M3).float()
        facts = self.facts.view(-1, self.kv_heads, FACT_PLACES)[numbers]
        return k * facts[..., 0, None], v * torch.exp2(facts[..., 1, None])

    def _bytes(self) -> tuple[Tensor, Tensor]:
        """K (tiles, heads, keys, head_dim) and V (tiles, heads, 2, head_dim, keys / 2) as bytes: indexed copies of
        float8 tensors are not implemented on every device."""
        halves = self.keys // 2
        k = self.k.view(torch.uint8).view(-1, self.kv_heads, self.keys, self.head_dim)
        return k, self.v.view(torch.uint8).view(-1, self.kv_heads, 2, self.head_dim, halves)


Stored = StoredKV | PackedTiles
"""Keys and values of one layer in the pages of a pool: row by row, or a packed tile a page."""


def rows_of(stored: Stored | None, k: Tensor, v: Tensor) -> StoredKV:
    """For a kernel that reads pages of rows only. Without any prefix, what is read of nothing: ``k`` and ``v``."""
    assert not isinstance(stored, PackedTiles), "pages of tiles are for attention in e4m3"
    return stored or StoredKV(k, v)
