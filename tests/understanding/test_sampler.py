"""Sampling options do what they say; stop texts end an answer wherever they begin."""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from underpaint.errors import BadParameter
from underpaint.understanding.sampler import (
    SamplingOptions,
    StopWatch,
    TokenSampler,
    Transcript,
    choose_tokens,
    keep,
    likeliest_tokens,
    penalise,
)

LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, -3.0])


def choose(sampler: TokenSampler, logits: torch.Tensor) -> int | None:
    """A token from (vocab_size,) logits, which is then part of the answer."""
    (token,) = choose_tokens([sampler], logits[None], likeliest_tokens(logits[None]))
    if token is not None:
        sampler.seen.add(token)
    return token


def draw(options: SamplingOptions, num: int, logits: torch.Tensor = LOGITS) -> list[int | None]:
    sampler = TokenSampler.of(options, [])
    return [choose(sampler, logits) for _ in range(num)]


def test_temperature_zero_is_greedy() -> None:
    assert draw(SamplingOptions(), 3) == [0, 0, 0]


def test_frequencies_follow_the_probabilities(seed: int) -> None:
    num = 4000
    drawn = torch.bincount(torch.tensor(draw(SamplingOptions(temperature=1.3, seed=seed), num)), minlength=5) / num
    want = (LOGITS / 1.3).softmax(0)
    assert (drawn - want).abs().max() < 5 * (0.25 / num) ** 0.5


def test_a_seed_repeats_and_another_differs(seed: int) -> None:
    options = SamplingOptions(temperature=2.0, seed=seed)
    assert draw(options, 50) == draw(options, 50)
    assert draw(options, 50) != draw(SamplingOptions(temperature=2.0, seed=seed + 1), 50)


def kept(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """(vocab_size,) probabilities in the order of the tokens."""
    probabilities, order = keep(logits[None], torch.tensor([top_k]), torch.tensor([top_p]))
    return torch.zeros_like(logits).scatter(0, order[0], probabilities[0])


def test_top_k_and_top_p_keep_what_they_say() -> None:
    assert (kept(LOGITS, 2, 1.0) > 0).tolist() == [True, True, False, False, False]
    probabilities = LOGITS.softmax(0)
    reaches_two = float(probabilities[0]) + 1e-4
    assert (kept(LOGITS, 0, reaches_two) > 0).tolist() == [True, True, False, False, False]
    assert kept(LOGITS, 0, 1e-9).tolist() == [1.0, 0, 0, 0, 0]
    torch.testing.assert_close(kept(LOGITS, 0, 1.0), probabilities)
    shuffled = LOGITS[[3, 0, 4, 2, 1]]
    torch.testing.assert_close(kept(shuffled, 3, 0.9), kept(LOGITS, 3, 0.9)[[3, 0, 4, 2, 1]])


def test_rows_of_a_batch_are_chosen_as_if_alone(seed: int) -> None:
    """Greedy and drawn, penalised or not, of different temperatures: company changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, 50, generator=generator) * 2
    every = [
        SamplingOptions(),
        SamplingOptions(temperature=0.7, top_k=9, seed=seed),
        SamplingOptions(repetition_penalty=1.5),
        SamplingOptions(temperature=1.5, top_p=0.8, repetition_penalty=2.0, seed=seed),
    ]
    together = [TokenSampler.of(options, [3, 4]) for options in every]
    alone = [TokenSampler.of(options, [3, 4]) for options in every]
    for _ in range(30):
        tokens = choose_tokens(together, logits, likeliest_tokens(logits))
        assert tokens == [choose(sampler, row) for sampler, row in zip(alone, logits, strict=True)]
        for sampler, token in zip(together, tokens, strict=True):
            assert token is not None
            sampler.seen.add(token)
        logits = torch.randn(4, 50, generator=generator) * 2


def test_repetition_penalty_on_both_signs_and_on_the_prompt() -> None:
    assert penalise(LOGITS, [0, 3], 2.0).tolist() == [1.0, 1.0, 0.5, -2.0, -3.0]
    sampler = TokenSampler.of(SamplingOptions(repetition_penalty=3.0), [0])
    assert [choose(sampler, LOGITS) for _ in range(3)] == [1, 0, 0]


def test_choosing_says_nothing_about_what_was_seen() -> None:
    """What comes into the dialogue may be another token."""
    sampler = TokenSampler.of(SamplingOptions(repetition_penalty=3.0), [4])
    assert choose_tokens([sampler], LOGITS[None], likeliest_tokens(LOGITS[None])) == [0]
    assert sampler.seen == {4}


EVERY_WAY = [
    SamplingOptions(),
    SamplingOptions(repetition_penalty=2.0),
    SamplingOptions(temperature=1.0, seed=1),
    SamplingOptions(temperature=1.0, top_k=2, top_p=0.5, repetition_penalty=2.0, seed=1),
]


@pytest.mark.parametrize("options", EVERY_WAY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "poison", [{1: math.nan}, {4: math.inf}, {0: -math.inf, 3: math.nan}, dict.fromkeys(range(5), -math.inf)]
)
def test_from_logits_that_are_not_finite_there_is_no_token(
    options: SamplingOptions, dtype: torch.dtype, poison: dict[int, float]
) -> None:
    """And a sound row beside them is chosen from as if alone."""
    sound = LOGITS.to(dtype)
    broken = sound.clone()
    for token, value in poison.items():
        broken[token] = value
    samplers = [TokenSampler.of(options, [0, 4]) for _ in range(3)]
    logits = torch.stack([broken, sound, broken])
    first, second, third = choose_tokens(samplers, logits, likeliest_tokens(logits))
    assert first is third is None
    assert second is not None
    assert second == choose(TokenSampler.of(options, [0, 4]), sound)


def test_a_token_that_is_impossible_is_no_fault() -> None:
    logits = torch.tensor([-math.inf, 1.0, -math.inf])
    for options in EVERY_WAY:
        assert draw(options, 5, logits) == [1] * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-40, 1.0, 1e39, 1e308])
@pytest.mark.parametrize("penalty", [5e-324, 1e-40, 1.0, 1e39, 1e308])
def test_options_however_extreme_are_honoured(dtype: torch.dtype, temperature: float, penalty: float) -> None:
    """Beyond fp32, and beyond the logits' own dtype: a penalty forbids or insists, a temperature levels or decides."""
    logits = torch.tensor([3.0, 1.0, 0.0, -2.0, -60_000.0], dtype=dtype)
    options = SamplingOptions(temperature=temperature, repetition_penalty=penalty, top_k=10**30, seed=5)
    tokens = []
    for seen in ([], [0, 2, 4]):
        for _ in range(10):
            tokens.append(choose(TokenSampler.of(options, seen), logits))
    assert all(token is not None and 0 <= token < 5 for token in tokens)
    if temperature <= 1e-40:
        assert tokens == [0] * 10 + [1 if penalty > 1 else 0] * 10


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1}, {"temperature": math.nan}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -1}, {"top_k": 1.5},
        {"max_tokens": 0}, {"repetition_penalty": 0}, {"repetition_penalty": math.inf}, {"stop": ("",)}, {"stop": "a"},
        {"temperature": "1"}, {"temperature": True}, {"temperature": 10**400}, {"temperature": None}, {"stop": 5},
        {"stop": None}, {"stop": (3,)}, {"stop": ("\ud83d",)}, {"stop": {"a"}}, {"max_tokens": None}, {"seed": 1.5},
        {"max_tokens": "5"}, {"max_tokens": 1.5}, {"max_tokens": True}, {"max_tokens": -3}, {"top_k": None},
        {"top_p": "x"}, {"repetition_penalty": [1]}, {"repetition_penalty": -1},
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadParameter):
        SamplingOptions(**options)


def follow(pieces: list[str], *stop: str) -> tuple[str, bool]:
    """Feed an answer that grows by ``pieces``; nothing that was released is ever taken back."""
    watch, text, released = StopWatch(stop), "", ""
    for i, piece in enumerate(pieces):
        text = text.rstrip("\ufffd") + piece
        new, stopped = watch.feed(text, last=i == len(pieces) - 1)
        released += new
        assert text.startswith(released)
        if stopped:
            return released, True
    return released, False


def test_stop_texts_across_tokens() -> None:
    assert follow(["one ", "EN", "D more"], "END") == ("one ", True)
    assert follow(["one ", "EN", "trance"], "END") == ("one ENtrance", False)
    assert follow(["aab", "ab", "c"], "abc", "xyz") == ("aab", True)
    assert follow(["x", "END", "y"], "y", "END") == ("x", True)
    assert follow(["one E"], "END") == ("one E", False)


def test_a_character_in_two_tokens_is_released_whole() -> None:
    watch = StopWatch(())
    assert watch.feed("a\ufffd", last=False) == ("a", False)
    assert watch.feed("a水", last=False) == ("水", False)
    assert watch.feed("a水\ufffd", last=True) == ("\ufffd", False)


def test_a_transcript_is_the_text_of_all_its_tokens(seed: int) -> None:
    """Bytes as tokens, in characters of one to four bytes, some of them cut for good."""
    rng = random.Random(seed)
    data = "".join(rng.choice("ab \n\u00e9\u4e2d\U0001f58c") for _ in range(300)).encode()
    data = bytes(byte for byte in data if rng.random() < 0.98)

    def detokenize(ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    transcript = Transcript()
    for count, byte in enumerate(data, start=1):
        transcript.add(byte)
        assert transcript.text(detokenize) == detokenize(data[:count])
