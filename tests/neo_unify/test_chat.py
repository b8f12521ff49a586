"""Dialogues: the golden interleaves through the public API, turns that find each other in pages, and every end."""

import threading
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from PIL import Image

from neo_unify.cases import ROOT, TOLERANCE, cases_of, difference, golden
from underpaint import Chat, PaintingOptions, PicturePart, TextPart
from underpaint.chat import Part
from underpaint.errors import BadConfig, BadParameter, BadRequest, EngineFailure, PromptTooLong
from underpaint.models.neo_unify import Passage
from underpaint.understanding.reply import Reply

DrawImage = Callable[..., Image.Image]
SMALL = PaintingOptions(num_inference_steps=2, sizes=((64, 32), (32, 64)))
ONE = replace(SMALL, sizes=((64, 32),))


def make(variant: str = "dense", **options: Any) -> Chat:
    return Chat.from_pretrained(ROOT / variant, **{"kv_cache_bytes": 64 << 20, **options})


def text_of(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, TextPart) and not part.thought)


def pictures_of(parts: list[Part]) -> list[PicturePart]:
    return [part for part in parts if isinstance(part, PicturePart)]


def assert_nothing_taken(chat: Chat) -> None:
    service = chat.service
    assert service.generation.idle
    assert service.understanding
    assert service.understanding.idle
    assert service.tree.promised_pages == 0
    assert not any(node.users for node in service.tree)
    assert service.pool.used_bytes == service.tree.used_bytes


def draws(chat: Chat, text: str = "describe the picture") -> list[int]:
    """A script of tokens: some text, a picture, some text, a picture, and the end."""
    tokenizer = chat.service.neo.tokenizer
    words = tokenizer.tokenize(text)
    return [*words, tokenizer.image_start, *words, tokenizer.image_start, *words, tokenizer.turn_stop]


@pytest.mark.parametrize("read_graphs", ["off", "on"])
@pytest.mark.parametrize(("variant", "name"), cases_of(("interleave",)))
def test_golden_interleave(variant: str, name: str, read_graphs: str) -> None:
    """Logits that the script overruled, and both pictures, as the reference implementation made them."""
    g, chat = golden(variant), make(variant, read_graphs=read_graphs)
    case = g.cases[name]
    forced = g.tensors[f"{name}/forced_ids"].tolist()
    painting = PaintingOptions(
        guidance_scale=case["cfg_scale"], image_guidance_scale=case["img_cfg_scale"], cfg_norm=case["cfg_norm"],
        timestep_shift=case["timestep_shift"], num_inference_steps=case["num_steps"],
        sizes=tuple(tuple(size) for size in case["image_size"]),
    )  # fmt: skip
    images = [g.image(image) for image in case["images"]]
    parts = list(
        chat.send(
            case["prompt"], images, painting=painting, seed=case["seed"], forced_ids=forced, max_tokens=len(forced)
        )
    )
    assert chat.ids == forced
    assert difference(torch.stack(chat.logits), g.tensors[f"{name}/logits"]) < TOLERANCE
    for i, picture in enumerate(pictures_of(parts)):
        assert difference(picture.pixels, g.tensors[f"{name}/image{i}"][0]) < TOLERANCE
    engine = chat.service.understanding
    assert engine
    reads = engine.runner.read_graphs
    assert (reads is not None and reads.counts.hits > 0) == (read_graphs == "on")
    assert len(pictures_of(parts)) == 2
    expected = case["generated_text"].split("<image>")
    assert text_of(parts).strip() == "".join(expected).strip()
    assert_nothing_taken(chat)


@pytest.mark.parametrize("variant", ["dense", "moe", "pixelhead"])
def test_golden_question(variant: str) -> None:
    g, chat = golden(variant), make(variant)
    case = g.cases["vqa"]
    parts = list(chat.send(case["question"], [g.image(case["image"])], max_pictures=0, max_tokens=16))
    assert chat.ids == g.tensors["vqa/greedy_ids"].tolist()
    assert text_of(parts).strip() == case["greedy_text"].strip()
    assert chat.finish == "length"
    assert_nothing_taken(chat)


def test_the_next_turn_finds_the_dialogue_in_pages(draw_image: DrawImage, seed: int) -> None:
    """Text, pictures sent and pictures painted: a second turn reads little, and equals a dialogue told from the start
    by its token ids."""
    chat = make()
    list(chat.send("look at it", [draw_image(64, 64)], painting=SMALL, seed=seed, forced_ids=draws(chat) * 3))
    assert chat.service.understanding
    before = chat.service.understanding.rows_read
    dialogue = chat._dialogue
    assert dialogue
    second = list(chat.send("and now?", painting=SMALL, seed=seed + 1, forced_ids=draws(chat)))
    read = chat.service.understanding.rows_read - before
    fresh = make()
    assert (len(dialogue.pictures), dialogue.ratio) == (3, (32, 64))
    fresh._dialogue = dialogue
    told = list(fresh.send("and now?", painting=SMALL, seed=seed + 1, forced_ids=draws(chat)))
    assert fresh.service.understanding
    assert read < fresh.service.understanding.rows_read
    assert chat.ids == fresh.ids
    assert difference(torch.stack(chat.logits), torch.stack(fresh.logits)) < TOLERANCE
    for ours, theirs in zip(pictures_of(second), pictures_of(told), strict=True):
        assert difference(ours.pixels, theirs.pixels) < TOLERANCE
    assert_nothing_taken(chat)


def test_messages_begin_a_dialogue(draw_image: DrawImage) -> None:
    """A list of messages is the dialogue itself; tags place its pictures."""
    chat = make()
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "what is <image>?"},
        {"role": "assistant", "content": "a circle"},
        {"role": "user", "content": "and this?"},
    ]
    images = [draw_image(64, 64), draw_image(64, 96)]
    list(chat.send(messages, images, max_pictures=0, max_tokens=3))
    told = chat.ids
    assert chat._dialogue
    assert chat._dialogue.passage.num_pictures == 2
    list(chat.send(messages, images, max_pictures=0, max_tokens=3))
    assert chat.ids == told
    assert chat._dialogue.passage.num_pictures == 2, "a list begins anew"


def test_a_thought_is_told_apart_and_bounded() -> None:
    """A thought that the model does not close is closed for it; what follows is the answer."""
    chat = make()
    parts = list(chat.send("hello", max_pictures=0, think=True, max_think_tokens=5, max_tokens=4))
    thoughts = [part for part in parts if isinstance(part, TextPart) and part.thought]
    tokenizer = chat.service.neo.tokenizer
    assert chat._dialogue
    ids = chat._dialogue.passage.ids
    assert ids.count(tokenizer.think_start) == ids.count(tokenizer.think_stop) == 1
    assert ids.index(tokenizer.think_stop) - ids.index(tokenizer.think_start) <= 5 + 2
    assert thoughts or ids.index(tokenizer.think_stop) - ids.index(tokenizer.think_start) <= 2
    assert len(chat.ids) <= 4
    assert_nothing_taken(chat)


def said_again(**sampling: Any) -> tuple[int, int]:
    """Of a thought and the answer behind it: how many tokens there are, and how many stood somewhere before."""
    chat = make()
    list(chat.send("hello", max_pictures=0, think=True, max_think_tokens=12, max_tokens=8, seed=1, **sampling))
    assert chat._dialogue
    tokenizer, ids = chat.service.neo.tokenizer, chat._dialogue.passage.ids
    start, stop = ids.index(tokenizer.think_start) + 2, ids.index(tokenizer.think_stop)
    written = [*ids[start:stop], *chat.ids]
    return len(written), sum(token in ids[:start] or token in written[:i] for i, token in enumerate(written))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_k": 3}], ids=["greedy", "drawn"])
def test_the_penalty_is_for_all_that_was_said_thoughts_too(sampling: dict[str, Any]) -> None:
    """Here it is so large that it forbids."""
    written, again = said_again(**sampling)
    assert again > 0, "without it some token comes twice"
    written, again = said_again(repetition_penalty=1e30, **sampling)
    assert written > 12
    assert again == 0


def test_how_answers_end(draw_image: DrawImage) -> None:
    chat = make()
    script = draws(chat)
    for max_pictures, max_tokens, finish, pictures in (
        (10, 100, "stop", 2), (1, 100, "pictures", 1), (10, 4, "length", 0), (10, 100, "stop", 2),
    ):  # fmt: skip
        parts = list(
            chat.send(
                [{"role": "user", "content": "draw"}],
                painting=SMALL if max_pictures > 1 else ONE, seed=1, forced_ids=script, max_pictures=max_pictures,
                max_tokens=max_tokens,
            )
        )  # fmt: skip
        assert (chat.finish, len(pictures_of(parts))) == (finish, pictures)
        assert_nothing_taken(chat)


def test_pictures_have_the_sizes_asked_for_and_one_generator(seed: int) -> None:
    chat = make()
    parts = list(chat.send("draw", painting=SMALL, seed=seed, forced_ids=draws(chat)))
    first, second = pictures_of(parts)
    assert (first.image.size, second.image.size) == ((64, 32), (32, 64))
    again = list(make().send("draw", painting=SMALL, seed=seed, forced_ids=draws(chat)))
    for ours, theirs in zip(pictures_of(parts), pictures_of(again), strict=True):
        assert torch.equal(ours.pixels, theirs.pixels)


def test_an_abandoned_answer_leaves_the_dialogue_where_it_was(seed: int) -> None:
    """Closed after any number of parts: nothing stays taken, and the dialogue can go on from before."""
    chat = make()
    list(chat.send("hello", max_pictures=0, max_tokens=3))
    before = chat._dialogue
    for num_parts in range(7):
        answer = chat.send("draw", painting=SMALL, seed=seed, forced_ids=draws(chat))
        for _ in range(num_parts):
            next(answer)
        answer.close()  # type: ignore[attr-defined]
        assert_nothing_taken(chat)
        assert chat._dialogue is before
    list(chat.send("go on", max_pictures=0, max_tokens=3))


def test_pages_that_are_taken_while_the_text_is_handed_out_change_no_answer(seed: int) -> None:
    """The reply has paused, whoever asks still reads what was written, and an older one needs all pages."""
    page_bytes = make().service.pool.page_bytes
    alone, chat = make(), make(kv_cache_bytes=6 * page_bytes)
    service, tokenizer = chat.service, chat.service.neo.tokenizer
    assert service.understanding is not None
    older = Reply(Passage(((tokenizer.tokenize("how many shapes are there? ") * 200)[: 5 * service.pool.page_rows],)))
    options: dict[str, Any] = {"painting": ONE, "seed": seed, "max_pictures": 1, "forced_ids": draws(chat)}
    parts, expected = chat.send("draw", **options), list(alone.send("draw", **options))
    got = [next(parts)]
    while not all(reply.resting for reply in service.understanding.scheduler):
        service._turnstile.turn(service._turn)
    got.append(next(parts))
    service.submit_reply(older)
    service._turnstile.turn(service._turn)
    assert service.understanding.scheduler.preemptions, "its pages were not taken"
    service.drop_reply(older)
    got += parts
    assert text_of(got) == text_of(expected)
    assert len(pictures_of(got)) == len(pictures_of(expected))
    assert chat.finish == alone.finish
    assert_nothing_taken(chat)


def test_dialogues_in_threads_equal_each_alone(draw_image: DrawImage, seed: int) -> None:
    """Four dialogues with pictures over one service: text and pictures as alone."""
    shared = make()
    image = draw_image(64, 64)
    results: dict[int, list[Part]] = {}

    def talk(i: int, service: Any) -> None:
        chat = Chat(service)
        script = draws(chat, f"picture {i}")
        results[i] = list(chat.send(f"draw {i}", [image][: i % 2], painting=SMALL, seed=seed + i, forced_ids=script))

    threads = [threading.Thread(target=talk, args=(i, shared.service)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    together = dict(results)
    assert sorted(together) == [0, 1, 2, 3]
    for i in range(4):
        talk(i, make().service)
        assert text_of(together[i]) == text_of(results[i])
        for ours, theirs in zip(pictures_of(together[i]), pictures_of(results[i]), strict=True):
            assert difference(ours.pixels, theirs.pixels) < TOLERANCE
    assert_nothing_taken(shared)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_pictures": 11}, "must be from 0 to 10"),
        ({"max_think_tokens": 0}, "at least 1"),
        ({"temprature": 1.0}, "unknown parameters: temprature"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"messages": []}, "the last message must be the user's"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "the last message must be the user's"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "has the role 'tool'"),
        ({"messages": [{"role": "user", "content": 3}]}, "a text as content"),
        ({"messages": "see <image> and <image>", "images": [Image.new("RGB", (32, 32))]}, "leave out the tags"),
        ({"messages": "a <img>"}, "must not contain <img>"),
        ({"messages": [("user", "a")]}, "message 1 must have a role"),
        ({"messages": "half \ud83d a pair"}, "no Unicode"),
        ({"max_pictures": 1.5}, "max_pictures must be a whole number"),
        ({"max_think_tokens": 5}, "no effect without think"),
        ({"think": "yes"}, "think must be True or False"),
        ({"seed": -1}, "seed must be from 0 to"),
        ({"seed": 2**63}, "seed must be from 0 to"),
        ({"seed": "x"}, "seed must be a whole number"),
        ({"forced_ids": [-1]}, "forced_ids must be token ids below"),
        ({"forced_ids": [10**7]}, "forced_ids must be token ids below"),
        ({"forced_ids": "ab"}, "forced_ids must be token ids below"),
        ({"forced_ids": 5}, "forced_ids must be token ids below"),
        ({"forced_ids": None}, "forced_ids must be token ids below"),
        ({"forced_ids": [True]}, "forced_ids must be token ids below"),
        ({"messages": None}, "messages must be a text or a list of messages, not NoneType"),
        ({"messages": 5}, "messages must be a text or a list of messages, not int"),
        ({"messages": b"hello"}, "messages must be a text or a list of messages, not bytes"),
        ({"messages": {"role": "user", "content": "a"}}, "messages must be a text or a list of messages, not dict"),
        ({"messages": [None]}, "message 1 must have a role and a text as content"),
        ({"messages": ["hello"]}, "message 1 must have a role and a text as content"),
        ({"messages": [{"role": "user"}]}, "message 1 must have a role and a text as content"),
        ({"messages": [{"content": "a"}]}, "message 1 has the role None"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "message 1 has the role"),
        ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "message 1 must have .* and nothing else"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]},
            "message 2 has the role",
        ),
        ({"images": None}, "images must be a list"),
        ({"images": Image.new("RGB", (32, 32))}, "images must be a list"),
        ({"images": [None]}, "image 1 must be a PIL image"),
        ({"images": [Image.new("RGB", (32, 32)), 5]}, "image 2 must be a PIL image"),
        ({"images": [Image.new("RGB", (0, 0))]}, "image 1 is 0x0"),
        ({"images": ["/no/such/picture.png"]}, "there is no file"),
        ({"images": [b"no picture"]}, "image 1 is not an image file"),
        ({"max_tokens": "5"}, "max_tokens must be a whole number, not '5'"),
        ({"max_tokens": None}, "max_tokens must be a whole number, not None"),
        ({"max_tokens": 1.5}, "max_tokens must be a whole number, not 1.5"),
        ({"max_tokens": True}, "max_tokens must be a whole number, not True"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_pictures": None}, "max_pictures must be a whole number"),
        ({"max_pictures": True}, "max_pictures must be a whole number"),
        ({"think": True, "max_think_tokens": "5"}, "max_think_tokens must be a whole number"),
        ({"think": None}, "think must be True or False"),
        ({"stop": 5}, "stop must be a list of non-empty texts"),
        ({"stop": [5]}, "stop must be text"),
        ({"top_k": "5"}, "top_k must be a whole number"),
        ({"temperature": 10**400}, "temperature must be a number"),
        ({"painting": {"sizes": ((64, 64),)}}, "painting must be PaintingOptions"),
        ({"painting": replace(SMALL, guidance_scale=10**400)}, "guidance_scale must be a number"),
        ({"painting": SMALL, "max_pictures": 1}, "there are 2 sizes for max_pictures 1"),
    ],
)
def test_refused(options: dict[str, Any], sentence: str) -> None:
    """With one sentence, and the dialogue is where it was."""
    chat = make()
    list(chat.send("hello", max_pictures=0, max_tokens=2))
    before = chat._dialogue, chat.finish, list(chat.ids)
    with pytest.raises(BadRequest, match=sentence):
        chat.send(**{"messages": "hello", **options})
    assert (chat._dialogue, chat.finish, chat.ids) == before
    assert_nothing_taken(chat)
    list(chat.send("and now?", max_pictures=0, max_tokens=2))


@pytest.mark.parametrize(
    "given",
    [
        {"guidance_scale": 2.0}, {"image_guidance_scale": 2.0}, {"cfg_norm": "global"}, {"cfg_interval": (0.1, 0.9)},
        {"timestep_shift": 2.0}, {"num_inference_steps": 2}, {"sizes": ((64, 32),)}, {"num_previews": 1},
    ],
)  # fmt: skip
def test_painting_options_are_refused_where_no_picture_may_be(given: dict[str, Any]) -> None:
    """Options that ask for nothing are no contradiction, and each of those that do is named."""
    chat, (name,) = make(), given
    with pytest.raises(BadParameter, match=f"{name} has no effect with max_pictures 0") as caught:
        chat.send("hello", max_pictures=0, painting=PaintingOptions(**given))
    assert caught.value.param == name
    list(chat.send("hello", max_pictures=0, max_tokens=1, painting=PaintingOptions()))
    assert len(fields(PaintingOptions)) == 8, "an option that is not tried here"


@pytest.mark.parametrize("forced", [0, 3])
def test_an_answer_of_damaged_weights_ends_with_a_sentence(seed: int, forced: int) -> None:
    """Before its first token or behind a picture: the dialogue stays where it was, and can go on with sound weights."""
    chat = make()
    list(chat.send("hello", max_pictures=0, max_tokens=2))
    before = chat._dialogue
    tokenizer, head = (
        chat.service.neo.tokenizer,
        chat.service.neo.network.get_parameter("language_model.lm_head.weight"),
    )
    script = [*tokenizer.tokenize("hello")[:1], tokenizer.image_start, *tokenizer.tokenize("hello")[:1]][:forced]
    answer = chat.send("draw", painting=ONE, seed=seed, forced_ids=script)
    parts = [next(answer) for _ in script[:2]]
    sound = head[7].clone()
    with torch.inference_mode():
        head[7] = torch.nan
    with pytest.raises(EngineFailure, match="its logits are not finite"):
        parts += list(answer)
    with torch.inference_mode():
        head[7] = sound
    assert len(pictures_of(parts)) == (1 if forced else 0)
    assert chat.finish is None
    assert chat._dialogue is before
    assert_nothing_taken(chat)
    chat.service.tree.clear()
    list(chat.send("go on", max_pictures=0, max_tokens=3))


@pytest.mark.parametrize("max_pictures", [0, 10])
@pytest.mark.parametrize("token", ["<img>", "</img>", "<IMG_CONTEXT>", "<image>"])
@pytest.mark.parametrize("place", range(4))
def test_no_message_of_a_dialogue_may_hold_the_engines_tokens(place: int, token: str, max_pictures: int) -> None:
    """Not the last alone: whichever message has one, it would be a picture that is not there."""
    messages = [{"role": role, "content": "hello"} for role in ("system", "user", "assistant", "user")]
    messages[place]["content"] += token
    chat = make()
    images = [] if token == "<image>" else [Image.new("RGB", (32, 32))]
    with pytest.raises(BadParameter, match=f"must not contain {token}|leave out the tags"):
        chat.send(messages, images, max_pictures=max_pictures)


def test_a_later_question_about_pictures_places_them_as_the_first_does(draw_image: DrawImage) -> None:
    images = [draw_image(64, 64), draw_image(64, 32)]
    first, later = make(), make()
    question = later.service.neo.tokenizer.tokenize("<|im_start|>user\n<img>")
    list(later.send("hello", max_pictures=0, max_tokens=1))
    for chat in (first, later):
        list(chat.send("compare them", images, max_pictures=0, max_tokens=1))
        assert chat._dialogue
        before = next(part for part in chat._dialogue.passage.parts if isinstance(part, tuple))
        assert before[-len(question) :] == question


@pytest.mark.parametrize("max_pictures", [0, 1])
def test_the_dialogue_goes_on_without_the_picture_that_was_not_allowed(seed: int, max_pictures: int) -> None:
    """The answer ends where the model would paint one more, and a later turn sees no picture begin there."""
    chat = make()
    tokenizer = chat.service.neo.tokenizer
    painting = ONE if max_pictures else None
    list(chat.send("draw", painting=painting, seed=seed, max_pictures=max_pictures, forced_ids=draws(chat) * 2))
    assert chat.finish == "pictures"
    assert chat.ids[-1] == tokenizer.image_start
    assert chat._dialogue
    passage = chat._dialogue.passage
    assert passage.ids.count(tokenizer.image_start) == passage.num_pictures == max_pictures
    list(chat.send("and now?", max_pictures=0, max_tokens=2))
    assert chat._dialogue.passage.ids.count(tokenizer.image_start) == max_pictures
    assert_nothing_taken(chat)


def test_a_thought_keeps_no_pages_while_the_answer_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = make()
    tokenizer = chat.service.neo.tokenizer
    engine = chat.service.understanding
    assert engine
    words = tokenizer.tokenize("describe the picture")
    append = engine._append
    script = iter([*words, tokenizer.think_stop, *words, tokenizer.turn_stop])
    monkeypatch.setattr(engine, "_append", lambda reply, token: append(reply, next(script)))
    parts = chat.send("hello", max_pictures=0, think=True)
    for part in parts:
        if isinstance(part, TextPart) and not part.thought:
            break
    assert len(engine.scheduler.active) == 1
    list(parts)
    assert_nothing_taken(chat)


def test_painting_options_are_checked() -> None:
    chat = make()
    for options, sentence in (
        ({"cfg_norm": "x"}, "cfg_norm"),
        ({"sizes": ((100, 64),)}, "width is 100"),
        ({"guidance_scale": -1.0}, "guidance_scale"),
        ({"num_inference_steps": 0}, "at least 1"),
        ({"guidance_scale": "x"}, "guidance_scale must be a number"),
        ({"image_guidance_scale": None}, "image_guidance_scale must be a number"),
        ({"timestep_shift": 0}, "timestep_shift must be above 0"),
        ({"timestep_shift": None}, "timestep_shift must be a number"),
        ({"cfg_interval": (0.1,)}, "cfg_interval must be two times"),
        ({"cfg_interval": "ab"}, "cfg_interval must be two times"),
        ({"cfg_interval": ("a", "b")}, "cfg_interval must be a number"),
        ({"cfg_interval": (0.5, 0.1)}, "the lower first"),
        ({"sizes": ((64,),)}, "sizes must be pairs"),
        ({"sizes": 5}, "sizes must be pairs"),
        ({"sizes": None}, "sizes must be pairs"),
        ({"sizes": ((64, "x"),)}, "height must be a whole number of pixels"),
        ({"num_previews": 1.5}, "num_previews must be a whole number"),
    ):
        with pytest.raises(BadRequest, match=sentence):
            chat.send("draw", painting=PaintingOptions(**options))


def test_a_long_message_is_refused_before_it_is_read() -> None:
    chat = make(max_prompt_tokens=50)
    with pytest.raises(PromptTooLong, match="the limit is 50"):
        chat.send("hello " * 100)


def test_a_model_that_does_not_talk_is_refused(checkpoint: Any) -> None:
    with pytest.raises(BadConfig, match="Qwen-Image paints but does not talk"):
        Chat.from_pretrained(checkpoint)
