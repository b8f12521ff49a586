"""FlashAttention 3 behind ``attend``, from the optional wheel ``fa3-fwd``: Hopper only, 16 bits.

It knows neither our mask nor pages. But text runs are causal and aligned to the end of their keys, and images see one
range, so a pass is at most two of its calls: one for all runs of text, one for all images. Where each begins goes into
``cu_seqlens``, how long it is into ``seqused``; ranges of keys may overlap. The keys of each group, prefix and own, are
first copied to one place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from underpaint.attention.batch import RowGroup


@dataclass(frozen=True, eq=False)
class _Launch:
    """Segments of one kind: where their rows and keys begin and how many there are, (segments,) int32."""

    causal: bool
    row_starts: Tensor
    key_starts: Tensor
    num_rows: Tensor
    num_keys: Tensor
    most_rows: int
    most_keys: int


def prepare(groups: tuple[RowGroup, ...]) -> "PreparedPass":
    """See ``Prepare``."""
    return PreparedPass(groups)


class PreparedPass:
    """Attention of one pass, layer by layer; an ``AttendPass``."""

    def __init__(self, groups: tuple[RowGroup, ...]) -> None:
        self._groups = groups
        self._launches: list[_Launch] | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """See ``Backend``."""
        if self._launches is None:
            self._launches = [*_plan(self._groups, q.device)]
        prefixes = {p: p.read(layer) for p in dict.fromkeys(group.prefix for group in self._groups)}
        keys = torch.cat([part for g in self._groups for part in (prefixes[g.prefix][0], k[g.rows])])
        values = torch.cat([part for g in self._groups for part in (prefixes[g.prefix][1], v[g.rows])])
        out = torch.empty_like(q)
        for launch in self._launches:
            fa3_forward(
                q, keys, values, out, launch.row_starts, launch.key_starts, launch.num_rows, launch.num_keys,
                launch.most_rows, launch.most_keys, causal=launch.causal,
            )  # fmt: skip
        return out


def _plan(groups: Sequence[RowGroup], device: torch.device) -> list[_Launch]:
    segments: dict[bool, list[tuple[int, int, int, int]]] = {True: [], False: []}
    num_keys = 0
    for group in groups:
        base = group.prefix.num_rows
        for call in group.calls:
            row = call.start - base + group.first
            segments[call.causal].append((row, num_keys, call.stop - call.start, call.stop))
        num_keys += base + group.num_rows
    num_rows = max(group.first + group.num_rows for group in groups)
    launches = []
    for causal, found in segments.items():
        if found:
            row_starts, key_starts, rows, keys = zip(*found, strict=True)
            columns = ([*row_starts, num_rows], [*key_starts, num_keys], rows, keys)
            a, b, c, d = (torch.tensor(column, dtype=torch.int32).to(device, non_blocking=True) for column in columns)
            launches.append(_Launch(causal, a, b, c, d, max(rows), max(keys)))
    return launches


def fa3_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    row_starts: Tensor,
    key_starts: Tensor,
    num_rows: Tensor | None,
    num_keys: Tensor | None,
    most_rows: int,
    most_keys: int,
    causal: bool,
) -> Tensor:
    """The wheel's varlen forward, into ``out``; rows of no segment are left as they are. Without ``num_rows`` and
    ``num_keys`` segments end where the next begins. Its registered operator refuses an output of ours, hence the one
    below it."""
    import_module("fa3_fwd._C")  # registers the operator

    head_dim = q.shape[-1]
    torch.ops.fa3_fwd.fwd(
        q, k, v, None, None, None, out, row_starts, key_starts, None, num_rows, num_keys, most_rows, most_keys,
        None, None, None, None, None, None, None, None, None, head_dim**-0.5, causal, -1, -1, 0, 0.0, True, None, 1,
        None, 0,
    )  # fmt: skip
    return out
