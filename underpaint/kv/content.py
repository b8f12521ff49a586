"""A cache from content to what was computed from it, bounded by bytes, least recently used out first."""

from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor


class ContentCache:
    """Tensors by content key. A value larger than the whole budget is returned but not kept."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.hits = 0
        self.misses = 0
        self._values: OrderedDict[bytes, Tensor] = OrderedDict()

    def get(self, key: bytes, compute: Callable[[], Tensor]) -> Tensor:
        """The value of ``key``, computed if it is not here. The caller must not write to it."""
        if key in self._values:
            self.hits += 1
            self._values.move_to_end(key)
            return self._values[key]
        self.misses += 1
        value = compute()
        if value.untyped_storage().nbytes() > value.nbytes:
            value = value.clone()  # a view would pin the whole tensor it was cut from
        if value.nbytes <= self.budget_bytes:
            self._values[key] = value
            self.used_bytes += value.nbytes
            while self.used_bytes > self.budget_bytes:
                self.used_bytes -= self._values.popitem(last=False)[1].nbytes
        return value
