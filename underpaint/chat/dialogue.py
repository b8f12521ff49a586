"""Messages and images as the model reads them, up to where the assistant answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from PIL import Image

from underpaint.errors import BadParameter
from underpaint.models.neo_unify import CELL, MAX_SIDE, NeoUnify, Passage, Picture
from underpaint.models.neo_unify.prompt import (
    IMAGE_TAG,
    NO_THOUGHT,
    OPEN_THOUGHT,
    Message,
    chat_text,
    check_tags,
    with_tags,
)
from underpaint.models.neo_unify.vision import PixelBounds, read_picture, reference_bounds
from underpaint.request import check_text

OWN_SIZE = PixelBounds(CELL * CELL, MAX_SIDE * MAX_SIDE)


@dataclass(frozen=True, eq=False)
class Dialogue:
    """A dialogue up to here. ``ratio``: width and height of its last picture, which the next one takes after."""

    passage: Passage
    ratio: tuple[int, int]

    @property
    def pictures(self) -> list[Picture]:
        return [part for part in self.passage.parts if isinstance(part, Picture)]


@dataclass(frozen=True, eq=False)
class Reader:
    """Makes dialogues of what is sent. ``reads_only``: the answer has no pictures; ``think``: a thought comes first."""

    model: NeoUnify
    reads_only: bool
    think: bool

    def begin(self, messages: Sequence[Mapping[str, str]], images: Sequence[Image.Image]) -> Dialogue:
        """A dialogue that is told from its first message on. Raises BadParameter and PromptTooLong."""
        system, turns = read_messages(messages)
        check_tags(system, 0)
        missing = check_tags(" ".join(turn.text for turn in turns), len(images))
        turns[-1] = Message("user", self._placed(turns[-1].text, missing))
        speakers = [turn.speaker for turn in turns for _ in range(turn.text.count(IMAGE_TAG))]
        # What an answer painted is read back at the size it has, as where the dialogue was held here.
        pictures = [
            read_picture(image, OWN_SIZE) if speaker == "assistant" else self._picture(image, len(images))
            for image, speaker in zip(images, speakers, strict=True)
        ]
        passage = self.model.tokenizer.passage(chat_text(turns, system) + self._suffix, pictures)
        return Dialogue(passage, images[-1].size if images else (1, 1))

    def go_on(self, dialogue: Dialogue, text: str, images: Sequence[Image.Image]) -> Dialogue:
        """A dialogue with one more turn of the user's. Raises BadParameter and PromptTooLong."""
        check_text("messages", text)
        tokenizer = self.model.tokenizer
        turn = chat_text([Message("user", self._placed(text, check_tags(text, len(images))))])
        pictures = [self._picture(image, len(images)) for image in images]
        more = tokenizer.passage(f"\n{turn}{self._suffix}", pictures)
        passage = dialogue.passage.followed_by((tokenizer.turn_stop,), *more.parts)
        return Dialogue(passage, images[-1].size if images else dialogue.ratio)

    @property
    def _suffix(self) -> str:
        if self.think:
            return OPEN_THOUGHT
        return "" if self.reads_only else NO_THOUGHT

    def _picture(self, image: Image.Image, num_images: int) -> Picture:
        if self.reads_only:
            return self.model.question_picture(image)
        return read_picture(image, reference_bounds(num_images))

    def _placed(self, text: str, missing: int) -> str:
        """The text of a turn with tags in front for its ``missing`` pictures, numbered only if they may be edited."""
        if self.reads_only:
            return f"{IMAGE_TAG}\n" * missing + text
        return with_tags(text, text.count(IMAGE_TAG) + missing)


def read_messages(messages: Sequence[Mapping[str, str]]) -> tuple[str, list[Message]]:
    """The system message, and the turns. Raises BadParameter."""
    if not isinstance(messages, Sequence) or isinstance(messages, bytes | bytearray):
        kind = type(messages).__name__
        raise BadParameter(f"messages must be a text or a list of messages, not {kind}", param="messages")
    system = ""
    turns: list[Message] = []
    for i, message in enumerate(messages):
        role, content = _read_message(message, f"message {i + 1}")
        if role == "system" and i == 0:
            system = content
        elif role == "user":
            turns.append(Message("user", content))
        elif role == "assistant":
            turns.append(Message("assistant", content))
        else:
            sentence = f"message {i + 1} has the role {role!r}; use user, assistant, or system first"
            raise BadParameter(sentence, param="messages")
    if not turns or turns[-1].speaker != "user":
        raise BadParameter("the last message must be the user's", param="messages")
    return system, turns


def _read_message(message: Mapping[str, str], name: str) -> tuple[str | None, str]:
    """Its role, unchecked, and its text."""
    if isinstance(message, Mapping) and not message.keys() - {"role", "content"}:
        content = message.get("content")
        if isinstance(content, str):
            return message.get("role"), check_text("messages", content)
    raise BadParameter(f"{name} must have a role and a text as content, and nothing else", param="messages")
