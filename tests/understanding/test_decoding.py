"""Decode by steps on buffers that do not move: what it says is what passes planned anew say, and nobody's rows mix."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from neo_unify.cases import TOLERANCE, VARIANTS, difference, golden
from PIL import Image

from underpaint.kernels.decode_plan import tile_keys
from underpaint.models.neo_unify import NeoUnify, Passage
from underpaint.understanding.decoding import SIZES, Decoder, DecodeRow, StepBuffers
from underpaint.understanding.engine import UnderstandingEngine
from underpaint.understanding.reply import Reply
from understanding.test_replies import assert_nothing_taken, finish, make_engine, make_reply, unlike_passages

DrawImage = Callable[..., Image.Image]


def planned(engine: UnderstandingEngine) -> UnderstandingEngine:
    """The same engine without steps: every pass is planned for its rows."""
    engine.runner.decoder = None
    return engine


def run(engine: UnderstandingEngine, model: NeoUnify, passages: list[Passage], **options: Any) -> list[Reply]:
    replies = [make_reply(model, passage, **options) for passage in passages]
    for reply in replies:
        engine.submit(reply)
    finish(engine, *replies)
    assert_nothing_taken(engine)
    return replies


@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_equal_planned_passes(variant: str, draw_image: DrawImage) -> None:
    """Eight dialogues together: the same tokens, the same logits; and almost all of it went by steps."""
    model = golden(variant).model
    passages = list(unlike_passages(model, draw_image))
    engine = make_engine(model)
    ours = run(engine, model, passages, max_tokens=40)
    theirs = run(planned(make_engine(model)), model, passages, max_tokens=40)
    assert engine.decoder is not None
    assert engine.decoder.plain_steps >= engine.passes - 3
    for a, b in zip(ours, theirs, strict=True):
        assert a.ids == b.ids
        assert difference(torch.stack(a.logits), torch.stack(b.logits)) < TOLERANCE


def test_tiles_that_a_plan_calls_full_are_full(draw_image: DrawImage) -> None:
    """Kernels do not mask them. Pictures leave pages partly filled in the middle of a dialogue."""
    model = golden("dense").model
    engine = make_engine(model)
    replies = [make_reply(model, passage, max_tokens=40) for passage in unlike_passages(model, draw_image)]
    for reply in replies:
        engine.submit(reply)
    assert engine.decoder is not None
    size, num_full, num_partial = model.page_rows, 0, 0
    while not all(reply.resting for reply in replies):
        engine.turn()
        for buffers in engine.decoder._buffers.values():
            counts = buffers.plan.pages[:, 1].repeat_interleave(size // tile_keys(size))
            for sequence, start, stop, _, full_stop in buffers.plan.pieces.tolist():
                assert start <= full_stop <= stop
                assert (counts[start:full_stop] == size).all()
                num_full += full_stop - start
                whole = buffers.plan.pieces[buffers.plan.pieces[:, 0] == sequence]
                num_partial += stop < int(whole[:, 2].max()) and bool((counts[full_stop:stop] < size).any())
    assert num_full
    assert num_partial, "no page was partly filled before the last piece"


def test_a_drawn_answer_is_the_same(draw_image: DrawImage, seed: int) -> None:
    model = golden("dense").model
    passages = list(unlike_passages(model, draw_image))[:3]
    options = {"max_tokens": 30, "temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "seed": seed}
    ours = run(make_engine(model), model, passages, **options)
    theirs = run(planned(make_engine(model)), model, passages, **options)
    assert [a.ids for a in ours] == [b.ids for b in theirs]


def test_a_step_leaves_the_pages_of_others_alone(draw_image: DrawImage) -> None:
    """What stands in every other slot of the pool is the same afterwards, to the bit; places without a row write
    nothing."""
    model = golden("dense").model
    engine = make_engine(model)
    for layer in range(engine.pool.shape.num_layers):
        for plane in (engine.pool.stored(layer).k, engine.pool.stored(layer).v):
            plane.fill_(7.0)  # memory may hold what the test before wrote to the same slots
    replies = [make_reply(model, passage, max_tokens=50) for passage in list(unlike_passages(model, draw_image))[:3]]
    for reply in replies:
        engine.submit(reply)
    while any(reply.num_unread != 1 for reply in replies):
        engine.turn()
    pool = engine.pool
    before = [(pool.stored(layer).k.clone(), pool.stored(layer).v.clone()) for layer in range(pool.shape.num_layers)]
    engine.turn()
    written = [int(reply.reading.slots(reply.num_read - 1)) for reply in replies if reply.reading is not None]
    assert len(set(written)) == 3
    others = torch.ones(len(before[0][0]), dtype=torch.bool)
    others[written] = False
    for layer, (k, v) in enumerate(before):
        stored = pool.stored(layer)
        for ours, theirs in ((stored.k, k), (stored.v, v)):
            # As bytes: slots that were never written may hold NaN, which equals nothing.
            assert torch.equal(ours[others].view(torch.uint8), theirs[others].view(torch.uint8))
            assert (ours[written] != theirs[written]).flatten(1).any(dim=1).all()


def test_more_replies_than_buffers_hold(draw_image: DrawImage) -> None:
    """They are served all the same, by planned passes."""
    model = golden("dense").model
    passage = list(unlike_passages(model, draw_image))[7]
    engine = make_engine(model, num_pages=400)
    replies = run(engine, model, [passage] * (SIZES[-1] + 1), max_tokens=3)
    assert engine.decoder is not None
    assert engine.decoder.plain_steps == 0
    alone = run(make_engine(model), model, [passage], max_tokens=3)[0]
    assert all(reply.ids == alone.ids for reply in replies)


def test_kept_logits_are_not_overwritten(draw_image: DrawImage) -> None:
    model = golden("dense").model
    reply = run(make_engine(model), model, list(unlike_passages(model, draw_image))[:1], max_tokens=8)[0]
    assert [int(logits.argmax()) for logits in reply.logits] == reply.ids


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[], StepBuffers]:
    """Buffers of a GPU, whose memory is apart from the host's, without a GPU."""
    zeros = torch.zeros

    def make(*size: Any, dtype: torch.dtype, **_: Any) -> torch.Tensor:
        return zeros(*size, dtype=dtype)

    monkeypatch.setattr("underpaint.understanding.decoding.torch.zeros", make)
    return lambda: StepBuffers(4, max_pages=8, head_dim=8, kv_heads=1, device="cuda")


def test_before_buffers_are_filled_no_row_is_anybodys_on_a_gpu_either(on_gpu: Callable[[], StepBuffers]) -> None:
    """A graph of more than 32 replies is captured when they come, by running the step: it must not write to slot 0,
    where the beginning of all dialogues may stand."""
    assert on_gpu().slots.tolist() == [-1] * 4


def test_what_a_step_reads_stays_until_it_was_brought_over(
    on_gpu: Callable[[], StepBuffers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A branch that is read one token further asks for none, so nobody waits for its step, which stands behind a
    denoising step. The next one must not overwrite what is still to be copied."""
    buffers, seen = on_gpu(), []

    class Event:
        def synchronize(self) -> None:
            seen.append(buffers._there["ids"].tolist())

    class Stream:
        def record_event(self) -> Event:
            return Event()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    rotary = np.ones((1, 4), np.complex64)
    for token in (5, 6):
        buffers.fill([DecodeRow(token, 0, np.array([[16, 1]], np.int32))], rotary, page_rows=16, kv_heads=1)
    assert seen == [[5, 0, 0, 0]]


def test_pages_that_are_no_whole_tiles_are_not_for_steps() -> None:
    model = golden("dense").model
    engine = make_engine(model)
    assert Decoder.can_serve(model, engine.pool)
    engine.pool.page_rows = 24
    assert not Decoder.can_serve(model, engine.pool)
