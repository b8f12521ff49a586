"""How a model treats the heads of queries and keys before attention."""

from dataclasses import dataclass

import torch
from torch import Tensor

from underpaint.kernels.packed_tiles import tile_exponent

ROUNDINGS = 1.02
"""What a finished query or key may gain by being rounded three times, to seven bits or more."""


@dataclass(frozen=True, eq=False)
class HeadForm:
    """What ``kv_pack`` does with the heads of q and k.

    ``weight``: (2, head_dim), norm weights of q and of k. ``adjacent``: Qwen-Image's form: one norm a head, and
    channels 2 i and 2 i + 1 turn together. Else SenseNova-U1's: the two halves of a head are normalised apart; in the
    first half, and in each quarter of the second, the first channels turn with the last. ``query_exponent``,
    ``key_exponent``: of those in e4m3, see ``packed_tiles``. No value of a finished query or key is over 448 times that
    power of two, since a norm leaves n values with a sum of squares of at most n, and turning keeps it.
    """

    weight: Tensor
    eps: float
    adjacent: bool
    query_exponent: int
    key_exponent: int

    @classmethod
    def of(cls, weight: Tensor, eps: float, adjacent: bool) -> "HeadForm":
        """Reads the weights, so that a step need not."""
        normed_together = weight.shape[1] // (1 if adjacent else 2)
        largest = weight.float().abs().amax(dim=1).nan_to_num() * normed_together**0.5 * ROUNDINGS
        return cls(weight, eps, adjacent, *tile_exponent(largest).tolist())

    def to(self, dtype: torch.dtype) -> "HeadForm":
        return HeadForm(self.weight.to(dtype), self.eps, self.adjacent, self.query_exponent, self.key_exponent)
