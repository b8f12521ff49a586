"""What is told of a request while it is at work, from whoever works to the desk. All of it is data: it may cross the
border of a process."""

from typing import Literal

from msgspec import Struct

from underpaint.handover.messages import ErrorData
from underpaint.server.media import Sent


class Usage(Struct, frozen=True):
    """Tokens read (once for all pictures of a request) and painted."""

    text_tokens: int
    image_tokens: int
    output_tokens: int

    def as_json(self) -> dict[str, object]:
        read = self.text_tokens + self.image_tokens
        return {
            "input_tokens": read,
            "input_tokens_details": {"text_tokens": self.text_tokens, "image_tokens": self.image_tokens},
            "output_tokens": self.output_tokens,
            "total_tokens": read + self.output_tokens,
        }


class Begun(Struct, frozen=True, tag=True):
    """The request is legal, and its work begins. Nothing was sent before, so a refusal still has its own status."""


class Preview(Struct, frozen=True, tag=True):
    """``number`` counts the previews of picture ``index`` from 0."""

    index: int
    number: int
    picture: Sent


class Painted(Struct, frozen=True, tag=True):
    """A finished picture. The usage of the first one counts what was read for all."""

    index: int
    seed: int
    picture: Sent
    usage: Usage


class Opened(Struct, frozen=True, tag=True):
    """The dialogue is legal, and the answer begins."""


class Said(Struct, frozen=True, tag=True):
    """A piece of text; ``thought`` if it is not for the reader."""

    text: str
    thought: bool


class Shown(Struct, frozen=True, tag=True):
    """A painted picture of an answer."""

    picture: Sent


Event = Begun | Preview | Painted | Opened | Said | Shown
"""What clients are told, in the order in which it happens."""


class Closing(Struct, frozen=True):
    """What is known of an answer only at its end. ``finish``: as ``Chat.finish``."""

    finish: Literal["stop", "length", "pictures"]
    num_prompt_tokens: int
    num_answer_tokens: int


class News(Struct, frozen=True, tag=True):
    """Of one ``task``, by its id."""

    task: str


class Entered(News, frozen=True, tag=True):
    """Its work is at ``stage`` from now on."""

    stage: str


class Took(News, frozen=True, tag=True):
    """A stage of its work is done."""

    stage: str
    seconds: float


class Moved(News, frozen=True, tag=True):
    """Its pictures have all taken ``step`` of ``num_steps``."""

    step: int
    num_steps: int


class Told(News, frozen=True, tag=True):
    event: Event


class Ended(News, frozen=True, tag=True):
    """It is done; the events were its result, and ``closing`` completes an answer."""

    closing: Closing | None


class Failed(News, frozen=True, tag=True):
    error: ErrorData
