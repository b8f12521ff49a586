"""The understanding engine: reads passages in chunks and goes on token by token, for all requests at once.

A pass holds one row of every reply that is being written, and chunks of those that are being read. A reply that cannot
get another page lets the youngest wait, resting ones too: its pages go, its tokens stay, and it is read again when
there is room. So the oldest dialogue always goes on, and none holds pages while it waits for an older one.
"""

import time
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from underpaint.attention import Prepare, RowGroup
from underpaint.capture.reads import ReadGraphs
from underpaint.errors import (
    PASS_FAILURES,
    BudgetTooSmall,
    DeadlinePassed,
    EngineFailure,
    OutOfMemory,
    OutOfPages,
    UnderpaintError,
)
from underpaint.kv.keeping import KeepingAttention
from underpaint.kv.pool import pages_for
from underpaint.kv.tree import PrefixTree
from underpaint.models.neo_unify import NeoUnify, Picture
from underpaint.understanding.decoding import Decoder, DecodeRow
from underpaint.understanding.reading import Reading
from underpaint.understanding.reply import Finish, Reply
from underpaint.understanding.sampler import choose_tokens


@dataclass(frozen=True, eq=False)
class Chunk:
    """Rows [start, stop) of a reply's passage that go into a pass; their K and V go to the end of its reading."""

    reply: Reply
    start: int
    stop: int

    @property
    def decodes(self) -> bool:
        """It is one token, the last of the passage."""
        passage = self.reply.passage
        return self.stop - self.start == 1 and self.stop == passage.num_rows and passage.ends_in_text


class UnderstandingEngine:
    """Not for several threads at once: whoever calls ``turn`` holds a lock. ``Reply.cancel`` needs none."""

    def __init__(
        self,
        model: NeoUnify,
        tree: PrefixTree,
        backend: Prepare,
        max_batch_rows: int,
        read_graphs: ReadGraphs | None = None,
    ) -> None:
        """``read_graphs``: for short passes that are no steps of decode; None: they run as they are."""
        self.passes = 0
        self.rows_read = 0
        self.preemptions = 0
        self._model = model
        self._tree = tree
        self.pool = tree.pool
        self._backend = backend
        self._max_batch_rows = max_batch_rows
        self._read_graphs = read_graphs
        if read_graphs:
            read_graphs.warm_up(model.num_hidden, model.dtype, (1,))
        self.decoder = Decoder(model, self.pool) if Decoder.can_serve(model, self.pool) else None
        self._waiting: deque[Reply] = deque()
        self._active: list[Reply] = []  # in order of admission; resting ones keep their pages
        self._untold: list[Reply] = []  # their newest token is not text yet

    @property
    def idle(self) -> bool:
        return not self._waiting and all(reply.resting for reply in self._active)

    def submit(self, reply: Reply) -> None:
        """Queue a reply. Raises BudgetTooSmall if it could never be read."""
        reply.units = self._model.units(reply.passage)
        self._check_budget(reply)
        self._waiting.append(reply)

    def turn(self) -> None:
        """End what is over, admit what fits, and run one pass."""
        self._end_overdue()
        self._admit()
        chunks = self._next_chunks()
        if chunks:
            self._run(chunks)

    def drop(self, reply: Reply) -> None:
        """End a reply now, whatever its state; nothing stays taken. One that has ended is left as it is."""
        if reply.ended:
            return
        if not reply.resting:
            reply.cancel()
        if reply in self._waiting:
            self._waiting.remove(reply)
        self._end(reply)

    def resume(self, reply: Reply, *more: tuple[int, ...] | Picture) -> None:
        """Let a reply that paused, or was read, go on with ``more`` behind it."""
        reply.resume(*more)
        reply.units = self._model.units(reply.passage)

    def _check_budget(self, reply: Reply, *others: Reply) -> None:
        """Raises BudgetTooSmall if an empty pool could not hold a reply, its next token, and ``others`` beside it."""
        units = {unit for one in (reply, *others) for unit in one.units}
        rows = [unit.num_rows for unit in units]
        rows += [reply.num_behind_units + 1, *(other.num_behind_units for other in others)]
        needed = sum(pages_for(num_rows, self.pool.page_rows) for num_rows in rows)
        if needed > self.pool.num_pages:
            raise BudgetTooSmall(needed * self.pool.page_bytes, self.pool.num_pages * self.pool.page_bytes)

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for reply in [*self._waiting, *self._active]:
            if reply.error is None and reply.deadline is not None and now > reply.deadline and not reply.resting:
                seconds = reply.deadline - reply.born
                reply.error = DeadlinePassed(f"not done in {seconds:.1f} s; {len(reply.ids)} tokens were written")
            if reply.error is not None:
                self.drop(reply)

    def _admit(self) -> None:
        """The oldest first, while there are pages to read a passage whole. Younger ones make room for it."""
        while self._waiting:
            reply = min(self._waiting, key=lambda waiting: waiting.born)
            reading = Reading(self._tree)
            reading.find(reply.units, reply.passage.num_rows)
            if reading.pages_to_read(reply.units, reply.passage.num_rows) <= self._tree.available_pages:
                reply.reading = reading
                self._tree.hits += reading.num_shared  # now: whoever waits finds them again at every turn
                self._waiting.remove(reply)
                self._active.append(reply)
                continue
            reading.close()
            if self._outgrown(reply):
                continue
            youngest = max(self._active, key=lambda active: active.born, default=None)
            if youngest is None or youngest.born <= reply.born:
                return
            self._preempt(youngest)

    def _outgrown(self, reply: Reply) -> bool:
        """End a reply that was let wait and by now could not even have the pool for its own dialogue, whose branches
        keep their pages for each other."""
        branches = [o for o in (*self._active, *self._waiting) if o.born == reply.born and o is not reply]
        try:
            self._check_budget(reply, *branches)
        except BudgetTooSmall as error:
            reply.error = error
            self.drop(reply)
            return True
        return False

    def _next_chunks(self) -> list[Chunk]:
        """Replies that are being written first, a row each, then those that are being read, oldest first."""
        unread = {reply: reply.num_unread for reply in self._active if not reply.resting}
        going = sorted((reply for reply, num_rows in unread.items() if num_rows), key=lambda reply: unread[reply] > 1)
        chunks: list[Chunk] = []
        rows = 0
        for reply in going:
            room = self._max_batch_rows - rows
            if reply not in self._active or (chunks and room <= 0):
                continue
            start = reply.num_read
            # Of a row alone the layout is not needed: that of a reply being written changes with every token.
            stop = start + 1 if unread[reply] == 1 else reply.passage.layout.chunk_stop(start, max(room, 1))
            if chunks and stop - start > room:
                continue
            if self._grow(reply, stop, chunks):
                chunks.append(Chunk(reply, start, stop))
                rows += stop - start
        return chunks

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
                victim = max((o for o in self._active if o not in spared), key=lambda other: other.born)
                if victim.born <= reply.born:
                    victim = reply  # others of the same dialogue are no use to it without their pages
                self._preempt(victim)
                if victim is reply:
                    return False

    def _preempt(self, reply: Reply) -> None:
        """Take a reply's pages; it waits with all its tokens. A resting one will be read again, and rest again."""
        assert reply.reading is not None
        reply.reading.close()
        reply.reading = None
        reply.rests_as, reply.finish = reply.finish or reply.rests_as, None
        self._active.remove(reply)
        self._waiting.append(reply)
        self.preemptions += 1

    def _run(self, chunks: list[Chunk]) -> None:
        """One pass; if it breaks, one pass for each, so that only those that break fail."""
        try:
            logits, likeliest = self._forward(chunks)
        except PASS_FAILURES as error:
            if len(chunks) > 1:
                for chunk in chunks:
                    self._run([chunk])
                return
            self._fail(chunks[0].reply, error)
            return
        # Until the tokens are asked for the device is at work: what it need not wait for is done here.
        self._tell()
        for chunk in chunks:
            assert chunk.reply.reading is not None
            chunk.reply.reading.settle(chunk.reply.units)
        asking = [row for row, chunk in enumerate(chunks) if self._asks(chunk.reply)]
        if len(asking) < len(chunks):
            logits, likeliest = logits[asking], likeliest[asking]
        self._go_on([chunks[row].reply for row in asking], logits, likeliest)

    def _forward(self, chunks: list[Chunk]) -> tuple[Tensor, Tensor]:
        """(chunks, vocab_size) logits behind the last row of each chunk, and the likeliest token of each."""
        self.passes += 1
        self.rows_read += sum(chunk.stop - chunk.start for chunk in chunks)
        if self.decoder is not None and all(chunk.decodes for chunk in chunks):
            rows = [_decode_row(chunk.reply) for chunk in chunks]
            if self.decoder.takes(rows):
                return self.decoder.step(rows)
        return self._pass(chunks)

    @torch.inference_mode()
    def _pass(self, chunks: list[Chunk]) -> tuple[Tensor, Tensor]:
        """Of any chunks, see ``_forward``."""
        rows, rotary, groups, slots, last = [], [], [], [], []
        first = 0
        for chunk in chunks:
            passage, reading = chunk.reply.passage, chunk.reply.reading
            assert reading is not None
            prefix = reading.view().before(chunk.start)
            rows.append(self._model.embed(passage, chunk.start, chunk.stop))
            rotary.append(self._model.rotary(passage.layout, chunk.start, chunk.stop))
            groups.append(RowGroup.of(passage.layout, chunk.stop, first, prefix, self._model.device))
            slots.append(reading.slots(chunk.start))
            first += chunk.stop - chunk.start
            last.append(first - 1)
        read = torch.cat(rows), torch.cat(rotary)
        hidden = self._read_graphs.run(*read, torch.cat(slots), groups) if self._read_graphs else None
        if hidden is None:
            attend = KeepingAttention(self.pool, torch.cat(slots), self._backend(tuple(groups)))
            hidden = self._model.network.understand(*read, attend)
        logits = self._model.network.logits(hidden[torch.tensor(last, device=hidden.device)])
        return logits, logits.argmax(dim=-1)

    def _asks(self, reply: Reply) -> bool:
        """Whether a reply wants a token. If all of it is read and it does not, it rests."""
        if reply.num_unread:
            return False
        if reply.rests_as is not None:
            reply.finish, reply.rests_as = reply.rests_as, None
            return False
        if reply.sampler is None:
            reply.finish = "read"
            return False
        if reply.ids and reply.ids[-1] in reply.pause_tokens and len(reply.ids) > reply.text_from:
            reply.finish = "pause"
            return False
        if len(reply.ids) >= reply.sampler.options.max_tokens:
            self._rest(reply, "length")
            return False
        return True

    def _go_on(self, replies: list[Reply], logits: Tensor, likeliest: Tensor) -> None:
        """Choose the next token of each, from a row of ``logits``; if that breaks, for each alone, as in ``_run``."""
        samplers = [reply.sampler for reply in replies if reply.sampler is not None]
        if not samplers:
            return
        try:
            tokens = choose_tokens(samplers, logits, likeliest)
        except PASS_FAILURES as error:
            if len(replies) > 1:
                for i, reply in enumerate(replies):
                    self._go_on([reply], logits[i : i + 1], likeliest[i : i + 1])
                return
            self._fail(replies[0], error)
            return
        for row, (reply, token) in enumerate(zip(replies, tokens, strict=True)):
            if reply.keep_logits:
                reply.logits.append(logits[row].clone())  # the next step writes over them
            self._append(reply, next(reply.forced, token))

    def _append(self, reply: Reply, token: int) -> None:
        reply.ids.append(token)
        if token in reply.stop_tokens:
            self._rest(reply, "stop")
            return
        pauses = token in reply.pause_tokens
        if not pauses:
            reply.transcript.add(token)
        reply.passage = reply.passage.followed_by((token,))
        if reply.num_behind_units >= self.pool.page_rows:
            reply.units = self._model.units(reply.passage)
        first = len(reply.ids) == reply.text_from + 1
        if not (pauses or first or reply.watch.stop):
            self._untold.append(reply)
        elif self._release_text(reply, last=pauses):
            self._rest(reply, "stop")

    def _tell(self) -> None:
        """Hand out the text of tokens whose text decides nothing, and that are not the first to be waited for."""
        untold, self._untold = self._untold, []  # first: what breaks here must not break every later turn as well
        for reply in untold:
            if not reply.ended:
                self._release_text(reply, last=False)

    def _release_text(self, reply: Reply, last: bool) -> bool:
        """Hand out settled text; True if a stop text came."""
        new, stopped = reply.watch.feed(reply.transcript.text(self._model.tokenizer.detokenize), last)
        if new:
            reply.deltas.append(new)
        return stopped

    def _rest(self, reply: Reply, finish: Finish) -> None:
        """A reply is complete: its text is settled, its pages go, its units stay in the tree."""
        self._release_text(reply, last=True)
        reply.finish = finish
        self._end(reply)

    def _fail(self, reply: Reply, error: Exception) -> None:
        if isinstance(error, UnderpaintError):
            reply.error = error
        elif isinstance(error, torch.OutOfMemoryError):
            reply.error = OutOfMemory("the device ran out of memory while reading: shorten the dialogue")
        else:
            reply.error = EngineFailure(f"the pass broke: {error}")
        self._end(reply)

    def _end(self, reply: Reply) -> None:
        self._release_text(reply, last=False)
        if reply in self._active:
            self._active.remove(reply)
        if reply.reading is not None:
            reply.reading.close()
            reply.reading = None
        reply.ended = True


def _decode_row(reply: Reply) -> DecodeRow:
    passage, reading = reply.passage, reply.reading
    assert reading is not None
    last = passage.parts[-1]
    assert isinstance(last, tuple)
    return DecodeRow(last[-1], passage.last_position, reading.pages())
