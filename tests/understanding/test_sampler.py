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
    penalise,
)

LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, -3.0])


def draw(options: SamplingOptions, num: int, logits: torch.Tensor = LOGITS) -> list[int]:
    sampler = TokenSampler.of(options, [])
    return [sampler.choose(logits) for _ in range(num)]


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
        tokens = choose_tokens(together, logits, logits.argmax(dim=-1))
        assert tokens == [sampler.choose(row) for sampler, row in zip(alone, logits, strict=True)]
        logits = torch.randn(4, 50, generator=generator) * 2


def test_repetition_penalty_on_both_signs_and_on_the_prompt() -> None:
    assert penalise(LOGITS, [0, 3], 2.0).tolist() == [1.0, 1.0, 0.5, -2.0, -3.0]
    sampler = TokenSampler.of(SamplingOptions(repetition_penalty=3.0), [0])
    assert [sampler.choose(LOGITS) for _ in range(3)] == [1, 0, 0]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1}, {"temperature": math.nan}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -1}, {"top_k": 1.5},
        {"max_tokens": 0}, {"repetition_penalty": 0}, {"repetition_penalty": math.inf}, {"stop": ("",)}, {"stop": "a"},
        {"temperature": "1"}, {"temperature": True},
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
