"""Captions, and the tokenizer and template that carry them."""

import random

import pytest
from transformers import PreTrainedTokenizerFast

from pocket import captions
from pocket.pool import TOKENS, tokenize
from pocket.scenes import BACKGROUNDS, COLOURS, SHAPES, SIZES
from pocket.tasks import KINDS, TASKS, Example, draw_kind
from pocket.tokenizer import SPECIAL_TOKENS, SYSTEM_PROMPT, SYSTEM_TURN, build_tokenizer, full_prompt

ALL_KINDS = [(kind, number) for number, kinds in enumerate(KINDS) for kind in kinds]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


def examples(kind: str, count: int) -> list[Example]:
    rng = random.Random(11)
    return [draw_kind(rng, "train", kind) for _ in range(count)]


def is_chinese(prompt: str) -> bool:
    return any("\u4e00" <= character <= "\u9fff" for character in prompt)


def test_words_match_the_tables() -> None:
    assert captions.SHAPES_EN == SHAPES
    assert captions.COLOURS_EN == COLOURS
    assert captions.BACKGROUNDS_EN == BACKGROUNDS
    assert captions.SIZES_EN == SIZES


@pytest.mark.parametrize(("kind", "num_references"), ALL_KINDS)
def test_every_kind_has_both_languages_and_survives_the_tokenizer(
    kind: str, num_references: int, tokenizer: PreTrainedTokenizerFast
) -> None:
    drawn = examples(kind, 150)
    chinese = sum(is_chinese(example.prompt) for example in drawn)
    assert 40 < chinese < 110
    for example in drawn:
        text = full_prompt(example.prompt, num_references)
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    prompts = [example.prompt for example in drawn]
    _, lengths = tokenize(tokenizer, prompts, num_references, TOKENS[num_references])
    assert int(lengths.max()) <= TOKENS[num_references]


def test_words_are_single_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    words = [*captions.COLOURS_ZH, *captions.SHAPES_ZH, *captions.CELLS_ZH]
    words += [f" {word}" for word in (*COLOURS, *SHAPES)]
    assert all(len(tokenizer(word).input_ids) == 1 for word in words)


def test_tokenizer_is_deterministic(tokenizer: PreTrainedTokenizerFast) -> None:
    assert build_tokenizer().get_vocab() == tokenizer.get_vocab()


def test_special_tokens_are_in_order(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))
    assert ids == list(range(ids[0], ids[0] + len(SPECIAL_TOKENS)))
    assert len(tokenizer) == ids[-1] + 1


def test_chat_template_gives_the_system_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    message = [{"role": "system", "content": [{"type": "text", "text": SYSTEM_PROMPT}]}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == SYSTEM_TURN


def test_prompt_template() -> None:
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert full_prompt("", 0) == f"{SYSTEM_TURN}<|im_start|>user\n <|im_end|>\n<|im_start|>assistant\n"
    two = full_prompt("go", len(TASKS) - 1)
    assert f"user\n<image1>{image} <image2>{image}go<|im_end|>" in two


def test_wording_varies() -> None:
    thing = examples("t2i", 1)[0].target.things[0]
    scene = examples("t2i", 1)[0].target
    for language in captions.LANGUAGES:
        assert len({captions.caption(scene, language, random.Random(seed)) for seed in range(30)}) >= 3
        assert len({captions.recolour(thing, 1, language, random.Random(seed)) for seed in range(30)}) == 2
