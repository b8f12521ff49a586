"""Which blocks of an arena are free."""

from bisect import bisect_left


class FreeBlocks:
    """Which of ``num_blocks`` blocks are free: ranges in order, none touching the next, given out first fit."""

    def __init__(self, num_blocks: int) -> None:
        self.num_free = num_blocks
        self.ranges: list[tuple[int, int]] = [(0, num_blocks)] if num_blocks else []

    def take(self, count: int) -> int | None:
        """The first of ``count`` blocks in a row, or None."""
        for i, (start, stop) in enumerate(self.ranges):
            if stop - start >= count:
                self.ranges[i : i + 1] = [(start + count, stop)] if stop - start > count else []
                self.num_free -= count
                return start
        return None

    def give(self, start: int, count: int) -> None:
        """Blocks [start, start + count), taken before, are free again."""
        stop = start + count
        i = bisect_left(self.ranges, (start, stop))
        before, after = self.ranges[:i], self.ranges[i:]
        assert not before or before[-1][1] <= start, "given back twice"
        assert not after or stop <= after[0][0], "given back twice"
        if before and before[-1][1] == start:
            start = before.pop()[0]
        if after and after[0][0] == stop:
            stop = after.pop(0)[1]
        self.ranges = [*before, (start, stop), *after]
        self.num_free += count
