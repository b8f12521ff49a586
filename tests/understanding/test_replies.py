"""The understanding engine on the golden checkpoints: what it says does not depend on chunks, company or preemption."""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from neo_unify.cases import CONFIG, TOLERANCE, VARIANTS, difference, golden, small_pictures
from PIL import Image
from torch import Tensor

from underpaint.attention import each_layer, piecewise
from underpaint.errors import BudgetTooSmall, Cancelled, EngineFailure
from underpaint.kv.codec import CODECS
from underpaint.kv.pool import PagePool
from underpaint.kv.tree import PrefixTree
from underpaint.models.neo_unify import NeoUnify, Passage
from underpaint.models.neo_unify.prompt import ask_text
from underpaint.understanding.engine import UnderstandingEngine
from underpaint.understanding.reply import Reply
from underpaint.understanding.sampler import SamplingOptions, TokenSampler, choose_tokens, keep

DrawImage = Callable[..., Image.Image]
EMBEDDING = "language_model.model.embed_tokens.weight"


def make_engine(model: NeoUnify, num_pages: int = 200, max_batch_rows: int = 4096) -> UnderstandingEngine:
    codec = CODECS[CONFIG.kv_codec]
    page_bytes = model.page_rows * model.cache_shape.row_bytes(codec)
    pool = PagePool(model.cache_shape, codec, num_pages * page_bytes, "cpu", model.page_rows)
    return UnderstandingEngine(model, PrefixTree(pool), each_layer(piecewise), max_batch_rows)


def make_reply(model: NeoUnify, passage: Passage, max_tokens: int = 12, **options: Any) -> Reply:
    sampling = SamplingOptions(max_tokens=max_tokens, **options)
    stops = frozenset({model.tokenizer.turn_stop})
    return Reply(passage, TokenSampler.of(sampling, ()), stop_tokens=stops, keep_logits=True)


def finish(engine: UnderstandingEngine, *replies: Reply) -> None:
    for _ in range(10_000):
        if all(reply.resting for reply in replies):
            return
        engine.turn()
    raise AssertionError("it does not end")


def assert_nothing_taken(engine: UnderstandingEngine) -> None:
    assert engine.idle
    assert not any(node.users for node in engine.scheduler.tree)
    assert engine.pool.used_bytes == engine.scheduler.tree.used_bytes


def unlike_passages(model: NeoUnify, draw_image: DrawImage) -> Iterator[Passage]:
    """Eight requests: short, longer than a page, with one picture and with two, some with a common beginning."""
    first, second = small_pictures(draw_image)
    long = "how many shapes are there? describe the picture in one sentence. " * 4
    texts: list[tuple[str, list[Any]]] = [
        ("hello", []),
        (long, []),
        (long + "again", []),
        ("<image> what is it?", [first]),
        ("<image> what is it, please?", [first]),
        ("<image> and <image>: compare", [first, second]),
        (long + "<image>" + long, [second]),
        ("a", []),
    ]
    for text, pictures in texts:
        yield model.tokenizer.passage(ask_text(text, len(pictures)), pictures)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("max_batch_rows", [64, 4096])
def test_golden_question(variant: str, max_batch_rows: int) -> None:
    """The greedy ids of the reference implementation, whether the prompt is read whole or in chunks."""
    g = golden(variant)
    case = g.cases["vqa"]
    picture = g.model.question_picture(g.image(case["image"]))
    passage = g.model.tokenizer.passage(ask_text(case["question"], 1), [picture])
    engine = make_engine(g.model, max_batch_rows=max_batch_rows)
    reply = make_reply(g.model, passage, max_tokens=16)
    engine.submit(reply)
    finish(engine, reply)
    assert reply.ids == g.tensors["vqa/greedy_ids"].tolist()
    assert difference(reply.logits[0], g.tensors["vqa/logits_last"][0]) < TOLERANCE
    assert "".join(reply.take_deltas()).strip() == case["greedy_text"].strip()
    assert_nothing_taken(engine)


@pytest.mark.parametrize("variant", VARIANTS)
def test_eight_unlike_requests_in_one_batch_equal_each_alone(variant: str, draw_image: DrawImage) -> None:
    model = golden(variant).model
    passages = list(unlike_passages(model, draw_image))
    together = [make_reply(model, passage) for passage in passages]
    engine = make_engine(model, max_batch_rows=100)
    for reply in together:
        engine.submit(reply)
    finish(engine, *together)
    assert engine.passes < 40, "they were not batched"
    for reply, passage in zip(together, passages, strict=True):
        alone, own = make_reply(model, passage), make_engine(model)
        own.submit(alone)
        finish(own, alone)
        assert reply.ids == alone.ids
        assert difference(torch.stack(reply.logits), torch.stack(alone.logits)) < TOLERANCE
    assert_nothing_taken(engine)


def test_chunks_at_every_boundary(draw_image: DrawImage) -> None:
    model = golden("dense").model
    passage = list(unlike_passages(model, draw_image))[5]
    whole = make_reply(model, passage)
    engine = make_engine(model)
    engine.submit(whole)
    finish(engine, whole)
    for rows in range(1, passage.num_rows + 1):
        engine = make_engine(model, max_batch_rows=rows)
        reply = make_reply(model, passage, max_tokens=3)
        engine.submit(reply)
        finish(engine, reply)
        assert reply.ids == whole.ids[:3]
        assert difference(torch.stack(reply.logits), torch.stack(whole.logits[:3])) < TOLERANCE


def test_a_large_picture_does_not_wait_until_nobody_writes(draw_image: DrawImage) -> None:
    """It fills a pass, or more than one, and others write without end."""
    model = golden("dense").model
    picture = small_pictures(draw_image)[0]
    num_rows = picture.grid[0] * picture.grid[1]
    for max_batch_rows in (num_rows, num_rows // 2):
        engine = make_engine(model, max_batch_rows=max_batch_rows)
        writing = make_reply(model, model.tokenizer.passage(ask_text("hello", 0)), max_tokens=100)
        writing.forced = iter([20] * 100)
        asking = make_reply(model, model.tokenizer.passage(ask_text("what is it?", 1), [picture]), max_tokens=1)
        engine.submit(writing)
        while not writing.ids:
            engine.turn()
        engine.submit(asking)
        finish(engine, asking)
        assert len(writing.ids) < 20
        finish(engine, writing)
        assert_nothing_taken(engine)


def test_a_second_turn_reads_only_what_is_new(draw_image: DrawImage) -> None:
    """The dialogue so far is found in pages: pictures by their pixels, text by its pages, the answer too."""
    model = golden("dense").model
    engine = make_engine(model)
    passage = list(unlike_passages(model, draw_image))[6]
    first = make_reply(model, passage, max_tokens=150)
    first.forced = iter([9, 10, 11] * 50)
    engine.submit(first)
    finish(engine, first)
    more = first.passage.followed_by(model.tokenizer.tokenize("<|im_end|>\n<|im_start|>user\nand now?<|im_end|>\n"))
    second = make_reply(model, more)
    before = engine.rows_read
    engine.submit(second)
    finish(engine, second)
    new = more.num_rows - passage.num_rows
    assert engine.rows_read - before - len(second.ids) < model.page_rows + 30 < new
    fresh, own = make_reply(model, more), make_engine(model)
    own.submit(fresh)
    finish(own, fresh)
    assert second.ids == fresh.ids
    assert difference(torch.stack(second.logits), torch.stack(fresh.logits)) < TOLERANCE


@pytest.mark.parametrize("max_batch_rows", [20, 4096])
def test_what_several_begin_with_is_read_once_though_they_come_together(
    draw_image: DrawImage, max_batch_rows: int
) -> None:
    """Who comes second waits for the picture, not for the first one's answer; others are not kept from going on."""
    model = golden("dense").model
    drawn = list(unlike_passages(model, draw_image))
    passages = [drawn[i] for i in (3, 4, 0)]
    replies = first, second, _ = [make_reply(model, passage, max_tokens=8) for passage in passages]
    for reply in replies:
        reply.forced = iter([9, 10] * 4)
    engine = make_engine(model, max_batch_rows=max_batch_rows)
    for reply in replies:
        engine.submit(reply)
    shared = first.units[0].stop
    assert second.units[0].key == first.units[0].key
    while not second.ids:
        engine.turn()
        assert second.reading is None or second.num_read >= shared
    assert not first.ended
    finish(engine, *replies)
    assert engine.rows_read == sum(passage.num_rows + 8 for passage in passages) - shared
    for reply, passage in zip(replies, passages, strict=True):
        alone, own = make_reply(model, passage, max_tokens=8), make_engine(model)
        alone.forced = iter([9, 10] * 4)
        own.submit(alone)
        finish(own, alone)
        assert difference(torch.stack(reply.logits), torch.stack(alone.logits)) < TOLERANCE
    assert_nothing_taken(engine)


def test_who_waits_for_what_another_reads_goes_on_without_it(draw_image: DrawImage) -> None:
    model = golden("dense").model
    passage = list(unlike_passages(model, draw_image))[6]
    first, second = (make_reply(model, passage, max_tokens=4) for _ in range(2))
    engine = make_engine(model, max_batch_rows=20)
    engine.submit(first)
    engine.submit(second)
    engine.turn()
    assert first.num_read
    assert second.reading is None
    engine.drop(first)
    finish(engine, second)
    assert second.error is None
    assert_nothing_taken(engine)


def test_preemption_loses_nothing(draw_image: DrawImage) -> None:
    """A pool too small for all: the youngest wait with their tokens, and everyone says what it says alone."""
    model = golden("dense").model
    passages = list(unlike_passages(model, draw_image))[:5]
    rng = random.Random(1)
    forced = [[rng.randrange(20, 200) for _ in range(300)] for _ in passages]
    engine = make_engine(model, num_pages=10)
    replies = [make_reply(model, passage, max_tokens=300) for passage in passages]
    for reply, ids in zip(replies, forced, strict=True):
        reply.forced = iter(ids)
        engine.submit(reply)
    finish(engine, *replies)
    assert engine.scheduler.preemptions > 0
    for reply, ids in zip(replies, forced, strict=True):
        assert reply.error is None
        assert reply.ids == ids
    roomy = make_engine(model)
    alone = make_reply(model, passages[-1], max_tokens=300)
    alone.forced = iter(forced[-1])
    roomy.submit(alone)
    finish(roomy, alone)
    assert difference(torch.stack(replies[-1].logits), torch.stack(alone.logits)) < TOLERANCE
    assert_nothing_taken(engine)


def test_what_can_never_fit_is_refused_or_ends_with_a_sentence(draw_image: DrawImage) -> None:
    model = golden("dense").model
    passages = list(unlike_passages(model, draw_image))
    engine = make_engine(model, num_pages=2)
    too_long = model.tokenizer.passage(ask_text("how many shapes are there? " * 40, 0))
    with pytest.raises(BudgetTooSmall):
        engine.submit(make_reply(model, too_long))
    grows, other = make_reply(model, passages[0], max_tokens=1000), make_reply(model, passages[7], max_tokens=5)
    grows.forced = iter([20] * 1000)
    for reply in (grows, other):
        engine.submit(reply)
    finish(engine, grows, other)
    assert isinstance(grows.error, BudgetTooSmall)
    assert len(grows.ids) > model.page_rows
    assert other.error is None
    assert_nothing_taken(engine)


def test_a_dialogue_that_outgrows_the_pool_beside_its_own_branches_is_told_so(draw_image: DrawImage) -> None:
    """Its branches are no older than it, and keep their pages for it: it would wait for them for ever."""
    model = golden("dense").model
    passages = list(unlike_passages(model, draw_image))
    engine = make_engine(model, num_pages=4)
    branch, grows = Reply(passages[0]), make_reply(model, passages[0], max_tokens=1000)
    grows.born, grows.forced = branch.born, iter([20] * 1000)
    other = make_reply(model, passages[7], max_tokens=5)
    for reply in (branch, grows, other):
        engine.submit(reply)
    finish(engine, branch, grows, other)
    assert isinstance(grows.error, BudgetTooSmall)
    assert len(grows.ids) > model.page_rows
    assert branch.error is other.error is None
    engine.drop(branch)
    assert_nothing_taken(engine)


def test_300_random_aborts_leak_no_page(draw_image: DrawImage, seed: int) -> None:
    model = golden("dense").model
    passages = list(unlike_passages(model, draw_image))
    engine = make_engine(model, num_pages=12, max_batch_rows=64)
    rng = random.Random(seed)
    live: list[Reply] = []
    aborted = 0
    while aborted < 300:
        while len(live) < 5:
            live.append(make_reply(model, rng.choice(passages), max_tokens=rng.randint(1, 6)))
            engine.submit(live[-1])
        for _ in range(rng.randint(0, 2)):
            engine.turn()
        victim = rng.choice(live)
        aborted += not victim.ended
        engine.drop(victim)
        assert victim.finish is not None or isinstance(victim.error, Cancelled)
        live = [reply for reply in live if not reply.ended]
    finish(engine, *live)
    assert all(reply.error is None for reply in live)
    assert_nothing_taken(engine)
    engine.scheduler.tree.clear()
    assert engine.pool.used_bytes == 0


def test_stop_texts_and_limits() -> None:
    model = golden("dense").model
    tokenize = model.tokenizer.tokenize
    passage = model.tokenizer.passage(ask_text("hello", 0))
    said = tokenize("describe the picture in one sentence")
    for stop, max_tokens, text, finish_reason in (
        ((" in one",), 100, "describe the picture", "stop"),
        (("never said",), len(said), "describe the picture in one sentence", "length"),
        ((), 2, model.tokenizer.detokenize(said[:2]), "length"),
    ):
        engine = make_engine(model)
        reply = make_reply(model, passage, max_tokens=max_tokens, stop=stop)
        reply.forced = iter([*said, model.tokenizer.turn_stop])
        engine.submit(reply)
        finish(engine, reply)
        assert "".join(reply.take_deltas()) == text
        assert reply.finish == finish_reason
        assert_nothing_taken(engine)


def test_text_comes_with_the_next_token_and_the_first_at_once() -> None:
    """Nothing is lost of one that is cancelled."""
    model = golden("dense").model
    said = model.tokenizer.tokenize("describe the picture in one sentence")
    texts = [model.tokenizer.detokenize(said[:count]) for count in range(len(said) + 1)]
    engine = make_engine(model)
    reply = make_reply(model, model.tokenizer.passage(ask_text("hello", 0)), max_tokens=100)
    reply.forced = iter(said)
    engine.submit(reply)
    text = ""
    while len(reply.ids) < len(said):
        engine.turn()
        text += "".join(reply.take_deltas())
        assert text == texts[max(len(reply.ids) - 1, min(len(reply.ids), 1))]
    reply.cancel()
    engine.turn()
    assert reply.ended
    assert text + "".join(reply.take_deltas()) == texts[-1]
    assert_nothing_taken(engine)


def test_a_pause_keeps_the_pages_until_it_goes_on_or_ends(draw_image: DrawImage) -> None:
    """The token to pause at is read; then a picture is put behind it, and the reply goes on as if it had been there."""
    model = golden("dense").model
    tokenizer = model.tokenizer
    picture = small_pictures(draw_image)[0]
    engine = make_engine(model)
    reply = make_reply(model, tokenizer.passage(ask_text("draw", 0)), max_tokens=8)
    reply.pause_tokens = frozenset({tokenizer.image_start})
    reply.forced = iter([20, 21, tokenizer.image_start])
    engine.submit(reply)
    finish(engine, reply)
    assert reply.finish == "pause"
    assert reply.reading is not None
    assert reply.num_unread == 0
    assert reply.reading.view().num_rows == reply.passage.num_rows
    engine.resume(reply, picture, (tokenizer.image_stop,))
    finish(engine, reply)
    whole = tokenizer.passage(ask_text("draw", 0)).followed_by(
        (20, 21, tokenizer.image_start), picture, (tokenizer.image_stop,)
    )
    alone, own = make_reply(model, whole, max_tokens=5), make_engine(model)
    own.submit(alone)
    finish(own, alone)
    assert reply.ids[3:] == alone.ids
    assert difference(torch.stack(reply.logits[3:]), torch.stack(alone.logits)) < TOLERANCE
    assert_nothing_taken(engine)


def test_a_choice_that_breaks_ends_its_own_reply(draw_image: DrawImage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither whoever turns the engine is hit, nor the others in the pass."""
    model = golden("dense").model
    passages = list(unlike_passages(model, draw_image))
    engine = make_engine(model)
    good, bad = make_reply(model, passages[0]), make_reply(model, passages[7])

    def choose(samplers: Sequence[TokenSampler], logits: Tensor, likeliest: Tensor) -> list[int | None]:
        if bad.sampler in samplers:
            raise RuntimeError("probabilities that are no numbers")
        return choose_tokens(samplers, logits, likeliest)

    monkeypatch.setattr("underpaint.understanding.engine.choose_tokens", choose)
    for reply in (good, bad):
        engine.submit(reply)
    finish(engine, good, bad)
    assert isinstance(bad.error, EngineFailure)
    assert good.error is None
    assert good.ids
    assert_nothing_taken(engine)


@pytest.mark.parametrize("failure", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_a_choice_that_breaks_draws_nothing_anew(
    failure: type[BaseException], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for the choice of two together is short, or somebody presses Ctrl-C: both go on as their seeds say."""
    model = golden("dense").model
    calls = itertools.count(1)

    def fail(*args: Any) -> Any:
        if next(calls) == 3:
            raise failure("injected")
        return keep(*args)

    def tell() -> list[list[int]]:
        engine = make_engine(model)
        passage = model.tokenizer.passage(ask_text("hello", 0))
        replies = [make_reply(model, passage, temperature=2.0, seed=seed + i) for i in range(2)]
        for reply in replies:
            engine.submit(reply)
        for _ in range(2):
            with suppress(KeyboardInterrupt):
                finish(engine, *replies)
        return [reply.ids for reply in replies]

    expected = tell()
    monkeypatch.setattr("underpaint.understanding.sampler.keep", fail)
    assert tell() == expected
    assert next(calls) > 3


@pytest.mark.parametrize("nth", [2, 4, 9])
@pytest.mark.parametrize("place", ["pass", "choice"])
def test_ctrl_c_in_the_thread_that_turns_harms_no_other_reply(
    nth: int, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While they are read, and while they are written: they say what they say without it."""
    model = golden("dense").model
    calls = itertools.count(1)

    def broken(do: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if next(calls) == nth:
                raise KeyboardInterrupt
            return do(*args)

        return call

    def tell(engine: UnderstandingEngine) -> list[list[int]]:
        texts = [ask_text("how many shapes are there? " * 12 + str(i), 0) for i in range(2)]
        replies = [make_reply(model, model.tokenizer.passage(text), max_tokens=10) for text in texts]
        for reply in replies:
            engine.submit(reply)
        for _ in range(2):
            with suppress(KeyboardInterrupt):
                finish(engine, *replies)
        assert_nothing_taken(engine)
        return [reply.ids for reply in replies]

    expected = tell(make_engine(model, max_batch_rows=64))
    engine = make_engine(model, max_batch_rows=64)
    if place == "pass":
        monkeypatch.setattr(engine.runner, "run", broken(engine.runner.run))
    else:
        monkeypatch.setattr("underpaint.understanding.engine.choose_tokens", broken(choose_tokens))
    assert tell(engine) == expected
    assert next(calls) > nth


@pytest.fixture
def poisoned() -> Iterator[tuple[NeoUnify, int]]:
    """A model with one row of its embedding damaged, and the token that it is of."""
    model = golden("dense").model
    token = model.tokenizer.tokenize("purple")[0]
    weight = model.network.get_parameter(EMBEDDING)
    sound = weight[token].clone()
    with torch.no_grad():
        weight[token] = torch.nan
        yield model, token
        weight[token] = sound


@pytest.mark.parametrize("by_steps", [True, False])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_k": 5, "repetition_penalty": 1.3, "seed": 3}])
def test_logits_that_are_not_finite_end_their_own_reply(
    poisoned: tuple[NeoUnify, int], draw_image: DrawImage, by_steps: bool, value: float, options: dict[str, Any]
) -> None:
    """One reads the damaged row, one is led to it while it writes. The others say what they say alone, also those that
    get the pages that held no numbers."""
    model, token = poisoned
    model.network.get_parameter(EMBEDDING)[token] = value
    passages = list(unlike_passages(model, draw_image))
    assert all(token not in passage.ids for passage in passages)
    engine = make_engine(model, num_pages=60)
    if not by_steps:
        engine.runner.decoder = None
    reads = make_reply(model, passages[1].followed_by((token, 20, 21)), **options)
    writes = make_reply(model, passages[0], **options)
    writes.forced = iter([20, 21, token, 22])
    before, after = (
        [make_reply(model, passage, max_tokens=20, **options) for passage in passages[start:stop]]
        for start, stop in ((1, 4), (4, 8))
    )
    for reply in (reads, *before, writes):
        engine.submit(reply)
    finish(engine, reads, writes, *before)
    engine.scheduler.tree.clear()
    for reply in after:
        engine.submit(reply)
    finish(engine, *after)
    assert_nothing_taken(engine)
    for reply, num_tokens in ((reads, 0), (writes, 3)):
        assert isinstance(reply.error, EngineFailure)
        assert str(reply.error).startswith(f"token {num_tokens + 1} cannot be chosen: its logits are not finite")
        assert len(reply.ids) == num_tokens
    for reply, passage in zip([*before, *after], passages[1:], strict=True):
        alone, own = make_reply(model, passage, max_tokens=20, **options), make_engine(model)
        own.submit(alone)
        finish(own, alone)
        assert reply.ids == alone.ids
        # With some seeds one of them comes to say the damaged token itself, and could not go on from it alone either.
        stuck = reply.ids[-1:] == [token] and len(reply.ids) < 20
        assert (reply.error is not None) == (alone.error is not None) == stuck
    assert sum(reply.error is None for reply in (*before, *after)) > 3


def test_the_penalty_is_for_the_tokens_that_were_forced() -> None:
    """Not for those that would have been chosen: here it forbids what was said, and nothing else."""
    model = golden("dense").model
    passage = model.tokenizer.passage(ask_text("hello", 0))
    said = [30, 31, 32]

    def tell(penalty: float) -> Reply:
        engine, reply = make_engine(model), make_reply(model, passage, max_tokens=4, repetition_penalty=penalty)
        reply.forced = iter(said)
        engine.submit(reply)
        finish(engine, reply)
        return reply

    plain, penalised = tell(1.0), tell(1e30)
    overruled = [int(logits.argmax()) for logits in plain.logits[:3]]
    assert not set(overruled) & set(said)
    last = penalised.logits[3]
    expected = last.clone()
    expected[said] = -torch.inf
    assert penalised.ids == [*said, int(expected.argmax())]
    assert penalised.sampler is not None
    assert penalised.sampler.seen == {*said, penalised.ids[3]}


def test_a_hit_is_counted_once_however_long_a_reply_waits(
    draw_image: DrawImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = golden("dense").model
    passage = list(unlike_passages(model, draw_image))[5]
    engine = make_engine(model)
    first, waits = make_reply(model, passage, max_tokens=1), make_reply(model, passage, max_tokens=1)
    engine.submit(first)
    finish(engine, first)
    before = engine.scheduler.tree.hits
    engine.submit(waits)
    with monkeypatch.context() as full:
        full.setattr(PrefixTree, "available_pages", 0)
        for _ in range(20):
            engine.turn()
        assert waits.reading is None
    finish(engine, waits)
    assert waits.error is None
    assert 0 < engine.scheduler.tree.hits - before <= len(waits.units)
