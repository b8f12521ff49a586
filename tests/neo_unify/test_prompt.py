"""Texts against the reference's own, tags, special tokens, and the passages they become."""

from pathlib import Path

import pytest

from neo_unify.cases import golden, text_of
from underpaint.errors import BadParameter, CheckpointError, PromptTooLong
from underpaint.layout import Layout
from underpaint.models.neo_unify import Passage, Picture
from underpaint.models.neo_unify.prompt import (
    IMAGE_START,
    Message,
    PromptTokenizer,
    ask_text,
    chat_text,
    interleave_text,
    interleaved_branches,
    load_tokenizer,
    paint_text,
    painting_branches,
    pictures_text,
    with_tags,
)
from underpaint.sampling.guidance import Branch

PROMPT = "a red circle left of a blue square on a green background"


@pytest.fixture
def tokenizer() -> PromptTokenizer:
    return golden("dense").model.tokenizer


@pytest.fixture
def picture() -> Picture:
    g = golden("dense")
    return g.model.question_picture(g.image("ref_b.png"))


def test_defect_n_texts_are_the_references() -> None:
    """The system message and the empty thought are there, for text-to-image and with a thought to come."""
    queries = golden("dense").facts["queries"]
    assert paint_text(PROMPT, 0, think=False) == queries["t2i_cond"]
    assert paint_text(PROMPT, 0, think=True) == queries["t2i_think"]
    assert pictures_text(0) + IMAGE_START == queries["t2i_uncond"]


def test_tags() -> None:
    assert with_tags("move it", 0) == "move it"
    assert with_tags("move it", 1) == "<image>\nmove it"
    assert with_tags("move it", 2) == "Image-1:<image>\nImage-2:<image>\nmove it"
    assert with_tags("put <image> into <image>", 2) == "put <image> into <image>"
    assert with_tags("use <image>", 3) == "<image>\n<image>\nuse <image>"
    assert ask_text("what?", 2) == chat_text([Message("user", "<image>\n<image>\nwhat?")])


@pytest.mark.parametrize("prompt", ["two <image> <image>", "<img>", "</img>", "<IMG_CONTEXT>"])
def test_tags_and_tokens_that_belong_to_no_picture_are_refused(prompt: str) -> None:
    for build in (
        lambda: paint_text(prompt, 1, think=False),
        lambda: ask_text(prompt, 1),
        lambda: interleave_text("draw", 0, system=prompt),
    ):
        with pytest.raises(BadParameter, match="a message"):
            build()


def test_dialogue() -> None:
    messages = [Message("user", "hello"), Message("assistant", "hi"), Message("user", "draw")]
    turns = [("system", "be brief"), ("user", "hello"), ("assistant", "hi"), ("user", "draw")]
    want = "".join(f"<|im_start|>{speaker}\n{text}<|im_end|>\n" for speaker, text in turns) + "<|im_start|>assistant\n"
    assert chat_text(messages, "be brief") == want
    assert (
        interleave_text("draw", 0) == "<|im_start|>user\ndraw<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_special_tokens_are_looked_up_by_name(tokenizer: PromptTokenizer) -> None:
    ids = golden("dense").facts["special_ids"]
    assert tokenizer.image_start == ids["<img>"]
    assert tokenizer.image_stop == ids["</img>"]
    assert tokenizer.think_start == ids["<think>"]
    assert tokenizer.think_stop == ids["</think>"]
    assert tokenizer.turn_stop == ids["<|im_end|>"]


def test_a_tokenizer_without_the_tokens_is_refused() -> None:
    class Words:
        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            return {"input_ids": [ord(c) for c in text]}

    with pytest.raises(CheckpointError, match="does not know the token <img>"):
        PromptTokenizer(Words(), 100)


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the tokenizer cannot be loaded"):
        load_tokenizer(tmp_path, max_tokens=20)


def test_long_prompts_are_refused_before_any_work() -> None:
    tokenizer = load_tokenizer(golden("dense").root, max_tokens=20)
    with pytest.raises(PromptTooLong, match="the limit is 20"):
        tokenizer.passage("a red circle " * 10)


def test_passages(tokenizer: PromptTokenizer, picture: Picture) -> None:
    passage = tokenizer.passage("a<image>b<image>", [picture, picture])
    start, stop = tokenizer.image_start, tokenizer.image_stop
    a, b = tokenizer.tokenize("a"), tokenizer.tokenize("b")
    assert passage.parts == ((*a, start), picture, (stop, *b, start), picture, (stop,))
    texts = (len(a) + 1, len(b) + 2, 1)
    assert passage.layout == Layout.of([texts[0], picture.grid, texts[1], picture.grid, texts[2]])
    assert passage.num_pictures == 2


def test_text_joins_text(picture: Picture) -> None:
    assert Passage(((1, 2),)).followed_by((3,), picture, (4,)).parts == ((1, 2, 3), picture, (4,))
    assert Passage(()).followed_by((1,)).parts == ((1,),)


def test_u23_branches_see_no_more_than_they_should(tokenizer: PromptTokenizer, picture: Picture) -> None:
    branches = painting_branches(tokenizer, "move it", [picture, picture])
    assert [branches[branch].num_pictures for branch in Branch] == [2, 2, 0]
    assert tokenizer.detokenize(text_of(branches[Branch.PICTURES].parts[0])).strip() == "user"
    unconditional = branches[Branch.UNCONDITIONAL]
    assert unconditional.parts == (tokenizer.tokenize(golden("dense").facts["queries"]["t2i_uncond"]),)
    assert all(text_of(passage.parts[-1])[-1] == tokenizer.image_start for passage in branches.values())


def test_interleaved_branches_wait_for_the_model_to_open_a_picture(tokenizer: PromptTokenizer) -> None:
    branches = interleaved_branches(tokenizer, "draw", [])
    ends = [text_of(branches[branch].parts[-1])[-1] == tokenizer.image_start for branch in Branch]
    assert ends == [False, False, True]
