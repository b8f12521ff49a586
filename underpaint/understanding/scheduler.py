"""Who has pages, and which rows go into the next pass.

A reply that cannot get another page lets the youngest wait, resting ones too: its pages go, its tokens stay, and it is
read again when there is room. So the oldest dialogue always goes on, and none holds pages while it waits for an older
one.
"""

from collections import deque
from collections.abc import Iterator

from underpaint.errors import BudgetTooSmall, OutOfPages
from underpaint.kv.pool import pages_for
from underpaint.kv.tree import PrefixTree
from underpaint.understanding.reading import Reading, next_key
from underpaint.understanding.reply import Reply
from underpaint.understanding.runner import Chunk


class Scheduler:
    """Replies that wait for pages, and those that are ``active``, in order of admission: resting ones keep their
    pages. ``preemptions`` counts how often pages were taken from one."""

    def __init__(self, tree: PrefixTree, max_batch_rows: int) -> None:
        self.active: list[Reply] = []
        self.preemptions = 0
        self.tree = tree
        self._pool = tree.pool
        self._max_batch_rows = max_batch_rows
        self._waiting: deque[Reply] = deque()

    @property
    def idle(self) -> bool:
        return not self._waiting and all(reply.resting for reply in self.active)

    def __iter__(self) -> Iterator[Reply]:
        """Over all replies that have not ended; they may be removed meanwhile."""
        return iter([*self._waiting, *self.active])

    def add(self, reply: Reply) -> None:
        """Queue a reply whose units are known. Raises BudgetTooSmall if it could never be read."""
        self._check_budget(reply)
        self._waiting.append(reply)

    def remove(self, reply: Reply) -> None:
        """A reply has ended, whatever its state was: its pages go, its units stay in the tree."""
        for replies in (self._waiting, self.active):
            if reply in replies:
                replies.remove(reply)
        self._close(reply)

    def admit(self) -> list[Reply]:
        """The oldest first, while there are pages to read a passage whole. Younger ones make room for it. Who would
        read what another is reading waits until it is read, once for both. Returns those that have outgrown the pool,
        with their error, to be ended."""
        outgrown: list[Reply] = []
        while (reply := self._next()) is not None:
            if self._read_from_here(reply):
                self._waiting.remove(reply)
                self.active.append(reply)
            elif self._outgrown(reply):
                self._waiting.remove(reply)
                outgrown.append(reply)
            else:
                youngest = max(self.active, key=lambda active: active.born, default=None)
                if youngest is None or youngest.born <= reply.born:
                    break
                self._preempt(youngest)
        return outgrown

    def next_chunks(self) -> list[Chunk]:
        """Replies that are being written first, a row each, then those that are being read, oldest first. The first of
        these goes beside rows that are written even if its picture leaves no room for them: else it would wait as long
        as anybody writes."""
        unread = {reply: reply.num_unread for reply in self.active if not reply.resting}
        going = sorted((reply for reply, num_rows in unread.items() if num_rows), key=lambda reply: unread[reply] > 1)
        chunks: list[Chunk] = []
        rows = 0
        for reply in going:
            room = self._max_batch_rows - rows
            if reply not in self.active or (chunks and room <= 0):
                continue
            start = reply.num_read
            # Of a row alone the layout is not needed: that of a reply being written changes with every token.
            stop = start + 1 if unread[reply] == 1 else reply.passage.layout.chunk_stop(start, max(room, 1))
            if stop - start > room and any(chunk.num_rows > 1 for chunk in chunks):
                continue
            if self._grow(reply, stop, chunks):
                chunks.append(Chunk(reply, start, stop))
                rows += stop - start
        return chunks

    def read_again(self) -> None:
        """A turn broke in the middle: whoever was under way gives its pages back, keeps its tokens, and is read again.
        What rests is whole."""
        for reply in [active for active in self.active if not active.resting]:
            self._preempt(reply)

    def _check_budget(self, reply: Reply, *others: Reply) -> None:
        """Raises BudgetTooSmall if an empty pool could not hold a reply, its next token, and ``others`` beside it."""
        units = {unit for one in (reply, *others) for unit in one.units}
        rows = [unit.num_rows for unit in units]
        rows += [reply.num_behind_units + 1, *(other.num_behind_units for other in others)]
        needed = sum(pages_for(num_rows, self._pool.page_rows) for num_rows in rows)
        if needed > self._pool.num_pages:
            raise BudgetTooSmall(needed * self._pool.page_bytes, self._pool.num_pages * self._pool.page_bytes)

    def _next(self) -> Reply | None:
        """The oldest that waits, of those whose next unit nobody is reading."""
        if not self._waiting:
            return None
        coming = {unit.key for active in self.active if not active.resting for unit in active.units_to_come()}
        wanted = {reply: next_key(self.tree, reply.units, reply.passage.num_rows) for reply in self._waiting}
        free = [reply for reply, key in wanted.items() if key not in coming]
        return min(free, key=lambda waiting: waiting.born, default=None)

    def _read_from_here(self, reply: Reply) -> bool:
        """Begin to read a reply behind what is in the tree; False if there are no pages for the rest of it."""
        reading = Reading(self.tree)
        reading.find(reply.units, reply.passage.num_rows)
        if reading.pages_to_read(reply.units, reply.passage.num_rows) > self.tree.available_pages:
            reading.close()
            return False
        reply.reading = reading
        self.tree.hits += reading.num_shared  # now: whoever waits finds them again at every turn
        return True

    def _outgrown(self, reply: Reply) -> bool:
        """Whether a reply that was let wait could by now not even have the pool for its own dialogue, whose branches
        keep their pages for each other. That is then its error."""
        try:
            self._check_budget(reply, *(other for other in self if other.born == reply.born and other is not reply))
        except BudgetTooSmall as error:
            reply.error = error
            return True
        return False

    def _grow(self, reply: Reply, stop: int, chunks: list[Chunk]) -> bool:
        """Make room for rows up to ``stop``, sparing the replies of ``chunks``; False if the reply must wait, or was
        itself the youngest."""
        assert reply.reading is not None
        while True:
            try:
                reply.reading.grow(reply.units, stop)
                return True
            except OutOfPages:
                spared = [chunk.reply for chunk in chunks]
                victim = max((o for o in self.active if o not in spared), key=lambda other: other.born)
                if victim.born <= reply.born:
                    victim = reply  # others of the same dialogue are no use to it without their pages
                self._preempt(victim)
                if victim is reply:
                    return False

    def _preempt(self, reply: Reply) -> None:
        """Take a reply's pages; it waits with all its tokens. A resting one will be read again, and rest again."""
        self._close(reply)
        reply.rests_as, reply.finish = reply.finish or reply.rests_as, None
        self.active.remove(reply)
        self._waiting.append(reply)
        self.preemptions += 1

    def _close(self, reply: Reply) -> None:
        if reply.reading is not None:
            reply.reading.close()
            reply.reading = None
