"""The understanding engine: reads passages in chunks and goes on token by token, for all requests at once.

A pass holds one row of every reply that is being written, and chunks of those that are being read.
"""

import time

import torch
from torch import Tensor

from underpaint.attention import Prepare
from underpaint.capture.reads import ReadGraphs
from underpaint.errors import PASS_FAILURES, DeadlinePassed, EngineFailure, OutOfMemory, UnderpaintError
from underpaint.kv.tree import PrefixTree
from underpaint.models.neo_unify import NeoUnify, Picture
from underpaint.understanding.decoding import Decoder
from underpaint.understanding.reply import Finish, Reply
from underpaint.understanding.runner import Chunk, Runner
from underpaint.understanding.sampler import choose_tokens
from underpaint.understanding.scheduler import Scheduler

NOT_FINITE = "its logits are not finite, as of a damaged checkpoint, or of one whose numbers overflow in this dtype"


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
        self.pool = tree.pool
        self.runner = Runner(model, tree.pool, backend, read_graphs)
        self.scheduler = Scheduler(tree, max_batch_rows)
        self._model = model
        self._untold: list[Reply] = []  # their newest token is not text yet

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    @property
    def decoder(self) -> Decoder | None:
        return self.runner.decoder

    def submit(self, reply: Reply) -> None:
        """Queue a reply. Raises BudgetTooSmall if it could never be read."""
        reply.units = self._model.units(reply.passage)
        self.scheduler.add(reply)

    def turn(self) -> None:
        """End what is over, admit what fits, and run one pass."""
        try:
            self._end_overdue()
            for reply in self.scheduler.admit():
                self._end(reply)
            chunks = self.scheduler.next_chunks()
            if chunks:
                self._run(chunks)
        except BaseException:
            # Ctrl-C, perhaps, in the thread of whoever turns: rows that were made room for may not be in pages.
            self.scheduler.read_again()
            raise

    def drop(self, reply: Reply) -> None:
        """End a reply now, whatever its state; nothing stays taken. One that has ended is left as it is."""
        if reply.ended:
            return
        if not reply.resting:
            reply.cancel()
        self._end(reply)

    def resume(self, reply: Reply, *more: tuple[int, ...] | Picture) -> None:
        """Let a reply that paused, or was read, go on with ``more`` behind it."""
        reply.resume(*more)
        reply.units = self._model.units(reply.passage)

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for reply in self.scheduler:
            if reply.error is None and reply.deadline is not None and now > reply.deadline and not reply.resting:
                seconds = reply.deadline - reply.born
                reply.error = DeadlinePassed(f"not done in {seconds:.1f} s; {len(reply.ids)} tokens were written")
            if reply.error is not None:
                self.drop(reply)

    def _run(self, chunks: list[Chunk]) -> None:
        """One pass; if it breaks, one pass for each, so that only those that break fail."""
        try:
            logits, likeliest = self._pass(chunks)
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

    def _pass(self, chunks: list[Chunk]) -> tuple[Tensor, Tensor]:
        """See ``Runner.run``."""
        self.passes += 1
        self.rows_read += sum(chunk.num_rows for chunk in chunks)
        return self.runner.run(chunks)

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
            if token is None:
                self._fail(reply, EngineFailure(f"token {len(reply.ids) + 1} cannot be chosen: {NOT_FINITE}"))
                continue
            if reply.keep_logits:
                reply.logits.append(logits[row].clone())  # the next step writes over them
            self._append(reply, next(reply.forced, token))

    def _append(self, reply: Reply, token: int) -> None:
        assert reply.sampler is not None
        reply.sampler.seen.add(token)
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
            reply.error.__cause__ = error
        self._end(reply)

    def _end(self, reply: Reply) -> None:
        self._release_text(reply, last=False)
        self.scheduler.remove(reply)
        reply.ended = True
