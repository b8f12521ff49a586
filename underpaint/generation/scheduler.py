"""Which work goes into the next pass. Pure: it looks at sizes and turns, and touches nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Item(Generic[T]):
    """A piece of work that goes into a pass whole: the next step of a job, or the next chunks of an order's prefill.

    ``served``: a number that grows with every item ever served, as it stood when this owner was last; -1 for never.
    """

    owner: T
    num_rows: int
    served: int


def next_batch(items: Sequence[Item[T]], max_rows: int) -> list[Item[T]]:
    """The items of the next pass: those that waited longest, in order of arrival, as many as fit ``max_rows``.

    The first is always taken, so that work larger than a pass goes alone. Taking stops at the first that does not fit
    instead of looking for a smaller one behind it: so every item is served after at most as many turns as there are
    items, however large it is, and a short job takes as many steps as a long one beside it.
    """
    batch: list[Item[T]] = []
    rows = 0
    for item in sorted(items, key=lambda item: item.served):
        if batch and rows + item.num_rows > max_rows:
            break
        batch.append(item)
        rows += item.num_rows
    return batch
