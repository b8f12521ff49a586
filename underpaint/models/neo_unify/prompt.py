"""What NEO-Unify reads: chat texts, their special tokens, and the sequences of tokens and pictures they become.

A picture is written ``<image>`` in a text. In a sequence it stands between the tokens ``<img>`` and ``</img>``; where
``<img>`` ends a sequence, the model is about to paint.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from underpaint.errors import BadParameter, CheckpointError, PromptTooLong
from underpaint.layout import Grid, Layout
from underpaint.models.neo_unify.vision import Picture
from underpaint.sampling.guidance import Branch

IMAGE_TAG = "<image>"
IMAGE_START, IMAGE_STOP, IMAGE_CONTEXT = "<img>", "</img>", "<IMG_CONTEXT>"
THINK_START, THINK_STOP = "<think>", "</think>"
TURN_START, TURN_STOP = "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (IMAGE_START, IMAGE_STOP, IMAGE_CONTEXT, THINK_START, THINK_STOP, TURN_START, TURN_STOP)

OPEN_THOUGHT = f"{THINK_START}\n"
NO_THOUGHT = f"{THINK_START}\n\n{THINK_STOP}\n\n"
AFTER_THOUGHT = f"\n\n{IMAGE_START}"
"""What follows a thought when a picture is to be painted."""

PAINTING_SYSTEM_MESSAGE = """\
You are an image generation and editing assistant that accurately understands and executes user intent.

You support two modes:

1. Think Mode:
If the task requires reasoning, you MUST start with a <think></think> block. \
Put all reasoning inside the block using plain text. DO NOT include any image tags. \
Keep it reasonable and directly useful for producing the final image.

2. Non-Think Mode:
If no reasoning is needed, directly produce the final image.

Task Types:

A. Text-to-Image Generation:
- Generate a high-quality image based on the user's description.
- Ensure visual clarity, semantic consistency, and completeness.
- DO NOT introduce elements that contradict or override the user's intent.

B. Image Editing:
- Use the provided image(s) as input or reference for modification or transformation.
- The result can be an edited image or a new image based on the reference(s).
- Preserve all unspecified attributes unless explicitly changed.

General Rules:
- For any visible text in the image, follow the language specified for the rendered text in the user's description, \
not the language of the prompt. If no language is specified, use the user's input language."""


@dataclass(frozen=True)
class Message:
    """One turn of a dialogue. ``text`` has an ``<image>`` for every picture of the turn."""

    speaker: Literal["user", "assistant"]
    text: str


def chat_text(messages: Sequence[Message], system: str = "") -> str:
    """The turns in ChatML, up to where the assistant answers."""
    head = f"{TURN_START}system\n{system}{TURN_STOP}\n" if system else ""
    turns = "".join(f"{TURN_START}{m.speaker}\n{m.text}{TURN_STOP}\n" for m in messages)
    return f"{head}{turns}{TURN_START}assistant\n"


def ask_text(question: str, num_pictures: int) -> str:
    """A question about pictures; those without a tag in it come first."""
    missing = check_tags(question, num_pictures)
    return chat_text([Message("user", f"{IMAGE_TAG}\n" * missing + question)])


def paint_text(prompt: str, num_pictures: int, think: bool) -> str:
    """The conditional text of a painting or, with pictures, of an edit. With ``think`` it ends where a thought begins,
    else where the picture begins."""
    text = chat_text([Message("user", with_tags(prompt, num_pictures))], PAINTING_SYSTEM_MESSAGE)
    return text + (OPEN_THOUGHT if think else NO_THOUGHT + IMAGE_START)


def interleave_text(prompt: str, num_pictures: int, system: str = "") -> str:
    """The conditional text of an answer in text and pictures, without a thought."""
    check_tags(system, 0)
    return chat_text([Message("user", with_tags(prompt, num_pictures))], system) + NO_THOUGHT


def pictures_text(num_pictures: int) -> str:
    """A user turn of pictures and nothing else: what guidance by pictures, or without any, compares with."""
    return chat_text([Message("user", IMAGE_TAG * num_pictures)])


def with_tags(prompt: str, num_pictures: int) -> str:
    """``prompt`` with a tag for every picture, as editing wants it: pictures without one come first, and two or more
    pictures without any are numbered."""
    missing = check_tags(prompt, num_pictures)
    if missing == num_pictures > 1:
        return "".join(f"Image-{i + 1}:{IMAGE_TAG}\n" for i in range(num_pictures)) + prompt
    return f"{IMAGE_TAG}\n" * missing + prompt


def check_tags(text: str, num_pictures: int) -> int:
    """How many of a message's pictures have no tag in its ``text``.

    Raises BadParameter for more tags than pictures, and for tokens that only the engine may write.
    """
    for token in (IMAGE_START, IMAGE_STOP, IMAGE_CONTEXT):
        if token in text:
            raise BadParameter(f"a message must not contain {token}; pass pictures as images", param="prompt")
    num_tags = text.count(IMAGE_TAG)
    if num_tags > num_pictures:
        message = f"a message has {num_tags} {IMAGE_TAG} tags and {num_pictures} images; leave out the tags in excess"
        raise BadParameter(message, param="prompt")
    return num_pictures - num_tags


@dataclass(frozen=True, eq=False)
class Passage:
    """One sequence: runs of token ids and pictures, in order."""

    parts: tuple[tuple[int, ...] | Picture, ...]

    @cached_property
    def layout(self) -> Layout:
        parts: list[int | Grid] = [part.grid if isinstance(part, Picture) else len(part) for part in self.parts]
        return Layout.of(parts)

    @cached_property
    def num_rows(self) -> int:
        """As of ``layout``, which no token that is written needs."""
        return sum(math.prod(part.grid) if isinstance(part, Picture) else len(part) for part in self.parts)

    @property
    def ends_in_text(self) -> bool:
        return bool(self.parts) and not isinstance(self.parts[-1], Picture)

    @property
    def last_position(self) -> int:
        """Where the last row stands on the t axis, see ``layout.neo_positions``."""
        return sum(1 if isinstance(part, Picture) else len(part) for part in self.parts) - 1

    @property
    def without_last_token(self) -> "Passage":
        """Of a passage that ends in text."""
        last = self.parts[-1]
        assert not isinstance(last, Picture)
        return Passage((*self.parts[:-1], last[:-1]) if len(last) > 1 else self.parts[:-1])

    @property
    def num_pictures(self) -> int:
        return sum(isinstance(part, Picture) for part in self.parts)

    @property
    def ids(self) -> list[int]:
        """The tokens of all texts, in order."""
        return [token for part in self.parts if not isinstance(part, Picture) for token in part]

    def content(self, start: int, stop: int) -> bytes:
        """What rows [start, stop) depend on among themselves: token ids, and pictures by content. Cuts no picture."""
        contents = []
        for segment, part in zip(self.layout.segments, self.parts, strict=True):
            first, last = max(start, segment.start) - segment.start, min(stop, segment.stop) - segment.start
            if first < last:
                contents.append(part.content.hex() if isinstance(part, Picture) else part[first:last])
        return repr(contents).encode()

    def followed_by(self, *more: tuple[int, ...] | Picture) -> "Passage":
        """This passage with text and pictures at its end. Text joins text: a run of text has no borders inside."""
        parts = list(self.parts)
        for part in more:
            last = parts[-1] if parts else None
            if isinstance(part, tuple) and isinstance(last, tuple):
                parts[-1] = last + part
            else:
                parts.append(part)
        return Passage(tuple(parts))


class PromptTokenizer:
    """Texts -> passages, and token ids -> text. Special tokens are looked up by name: checkpoints differ in ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self.image_start, self.image_stop, self._image_context = map(
            self._special, (IMAGE_START, IMAGE_STOP, IMAGE_CONTEXT)
        )
        self.think_start, self.think_stop, self.turn_stop = map(self._special, (THINK_START, THINK_STOP, TURN_STOP))

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Token ids of ``text``, special tokens in it included, and none added."""
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def passage(self, text: str, pictures: Sequence[Picture] = ()) -> Passage:
        """``text`` with its ``<image>`` tags replaced by ``pictures``, in order. Raises PromptTooLong.

        The builders of this module put as many tags in a text as there are pictures.
        """
        ids = self.tokenize(text.replace(IMAGE_TAG, f"{IMAGE_START}{IMAGE_CONTEXT}{IMAGE_STOP}"))
        places = [i for i, token in enumerate(ids) if token == self._image_context]
        assert len(places) == len(pictures), f"{len(places)} tags for {len(pictures)} pictures"
        if len(ids) - len(places) > self._max_tokens:
            raise PromptTooLong(len(ids) - len(places), self._max_tokens)
        parts: list[tuple[int, ...] | Picture] = []
        start = 0
        for place, picture in zip(places, pictures, strict=True):
            parts += [ids[start:place], picture]
            start = place + 1
        return Passage((*parts, ids[start:]) if start < len(ids) else tuple(parts))

    def _special(self, token: str) -> int:
        ids = self.tokenize(token)
        if len(ids) != 1 or self._tokenizer.convert_ids_to_tokens(ids[0]) != token:
            raise CheckpointError(f"the tokenizer does not know the token {token}")
        return ids[0]


def load_tokenizer(directory: Path, max_tokens: int) -> PromptTokenizer:
    """The tokenizer of a checkpoint directory. Raises CheckpointError."""
    try:
        # An empty config: transformers does not know the model of config.json, and must not run code that it names.
        config = PreTrainedConfig()
        tokenizer = AutoTokenizer.from_pretrained(
            directory, config=config, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{directory}: the tokenizer cannot be loaded: {error}") from error
    return PromptTokenizer(tokenizer, max_tokens)


def painting_branches(
    tokenizer: PromptTokenizer, prompt: str, pictures: Sequence[Picture], think: bool = False
) -> dict[Branch, Passage]:
    """What each branch of a painting or an edit reads, ending where the picture begins (or a thought, ``think``)."""
    return {
        Branch.CONDITIONAL: tokenizer.passage(paint_text(prompt, len(pictures), think), pictures),
        Branch.PICTURES: tokenizer.passage(pictures_text(len(pictures)) + IMAGE_START, pictures),
        Branch.UNCONDITIONAL: tokenizer.passage(pictures_text(0) + IMAGE_START),
    }


def interleaved_branches(
    tokenizer: PromptTokenizer, prompt: str, pictures: Sequence[Picture], system: str = ""
) -> dict[Branch, Passage]:
    """What each branch reads before an answer in text and pictures. The first two follow the answer, the pictures
    branch without its text; the unconditional one ends in ``<img>`` and never changes."""
    return {
        Branch.CONDITIONAL: tokenizer.passage(interleave_text(prompt, len(pictures), system), pictures),
        Branch.PICTURES: tokenizer.passage(pictures_text(len(pictures)), pictures),
        Branch.UNCONDITIONAL: tokenizer.passage(pictures_text(0) + IMAGE_START),
    }
