"""The pass of understanding: rows of many replies, packed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from underpaint.attention import Prepare, RowGroup
from underpaint.capture.reads import ReadGraphs
from underpaint.kv.keeping import KeepingAttention
from underpaint.kv.pool import PagePool
from underpaint.models.neo_unify import NeoUnify
from underpaint.understanding.decoding import Decoder, DecodeRow
from underpaint.understanding.reply import Reply
from underpaint.understanding.sampler import likeliest_tokens


@dataclass(frozen=True, eq=False)
class Chunk:
    """Rows [start, stop) of a reply's passage that go into a pass; their K and V go to the end of its reading."""

    reply: Reply
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def decodes(self) -> bool:
        """It is one token, the last of the passage."""
        passage = self.reply.passage
        return self.num_rows == 1 and self.stop == passage.num_rows and passage.ends_in_text


class Runner:
    """Runs chunks through the model, into pages of ``pool``. ``decoder``: None where decode does not run by steps."""

    def __init__(self, model: NeoUnify, pool: PagePool, backend: Prepare, read_graphs: ReadGraphs | None) -> None:
        self.read_graphs = read_graphs
        self._model = model
        self._pool = pool
        self._backend = backend
        if read_graphs:
            read_graphs.warm_up(model.num_hidden, model.dtype, (1,))
        self.decoder = Decoder(model, pool) if Decoder.can_serve(model, pool) else None

    def run(self, chunks: list[Chunk]) -> tuple[Tensor, Tensor]:
        """(chunks, vocab_size) logits behind the last row of each chunk, and ``likeliest_tokens`` of them. Valid until
        the next pass."""
        if self.decoder is not None and all(chunk.decodes for chunk in chunks):
            rows = [_decode_row(chunk.reply) for chunk in chunks]
            if self.decoder.takes(rows):
                return self.decoder.step(rows)
        return self._pass(chunks)

    @torch.inference_mode()
    def _pass(self, chunks: list[Chunk]) -> tuple[Tensor, Tensor]:
        """Of any chunks, planned for their rows."""
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
            first += chunk.num_rows
            last.append(first - 1)
        read = torch.cat(rows), torch.cat(rotary)
        hidden = self.read_graphs.run(*read, torch.cat(slots), groups) if self.read_graphs else None
        if hidden is None:
            attend = KeepingAttention(self._pool, torch.cat(slots), self._backend(tuple(groups)))
            hidden = self._model.network.understand(*read, attend)
        logits = self._model.network.logits(hidden[torch.tensor(last, device=hidden.device)])
        return logits, likeliest_tokens(logits)


def _decode_row(reply: Reply) -> DecodeRow:
    passage, reading = reply.passage, reply.reading
    assert reading is not None
    last = passage.parts[-1]
    assert isinstance(last, tuple)
    return DecodeRow(last[-1], passage.last_position, reading.pages())
