"""What clients may send: every field is honoured or refused, and an unknown one is named.

``quality``, ``style``, ``moderation``, ``user`` and ``safety_identifier`` are accepted because OpenAI's clients send
them, and have no effect. JSON is read strictly: "2" is not 2. In a form everything is text, and read as what it means.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator

from underpaint.server.config import Priority
from underpaint.server.media import Background, OutputFormat

MAX_PROMPT_CHARACTERS = 32_000
PRIORITY = "in line, high is a minute ahead of normal, and low a minute behind; without effect when nobody waits"
MAX_WHOLE = 2**53 - 1
"""The largest whole number that every reader of JSON takes exactly. Beyond 64 bits none can be told to a worker."""
Number = Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=MAX_WHOLE)]
Side = Annotated[int, Field(ge=-MAX_WHOLE, le=MAX_WHOLE)]
"""Of a picture, in pixels; which of these can be painted, the model says, and names the nearest."""


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @field_validator("*")
    @classmethod
    def _check_unicode(cls, value: Any) -> Any:
        """Half of a UTF-16 pair can be told neither to a worker nor back to the client, whatever field it is in."""
        texts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        for text in texts if isinstance(texts, list) else [texts]:
            if isinstance(text, str) and not _is_unicode(text):
                raise ValueError("has a character that is no Unicode, half of a UTF-16 pair")
        return value


def _is_unicode(text: str) -> bool:
    if text.isascii():  # at once, also of a picture of many megabytes
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class PictureOptions(Body):
    """How to paint, and how to send it. See ``Pipeline.__call__`` for what the engines make of their own options."""

    size: str | None = Field(default="auto", max_length=32, description="WIDTHxHEIGHT in pixels, or auto")
    background: Background | None = None
    output_format: OutputFormat | None = None
    output_compression: int | None = Field(default=None, ge=0, le=100)
    partial_images: int | None = Field(default=None, ge=0, le=3)
    quality: str | None = Field(default=None, description="no effect")
    moderation: str | None = Field(default=None, description="no effect")
    seed: int | None = Field(default=None, ge=0, le=2**63 - 11, description="of picture i: seed + i")
    num_inference_steps: Count | None = None
    negative_prompt: str | None = Field(default=None, max_length=MAX_PROMPT_CHARACTERS)
    true_cfg_scale: Number | None = None
    guidance_scale: Number | None = None
    image_guidance_scale: Number | None = None
    cfg_norm: str | None = None
    timestep_shift: Number | None = None
    reference_resolution: Side | None = None
    think: bool | None = None
    max_think_tokens: Count | None = None


class PaintBody(PictureOptions):
    """A painting. Beside OpenAI's fields, those of ``PictureOptions``."""

    prompt: str = Field(max_length=MAX_PROMPT_CHARACTERS)
    model: str | None = None
    n: int | None = Field(default=1, ge=1, le=10)
    response_format: Literal["b64_json", "url"] | None = None
    stream: bool | None = None
    priority: Priority | None = Field(default=None, description=PRIORITY)
    style: str | None = Field(default=None, description="no effect")
    user: str | None = Field(default=None, description="no effect")
    safety_identifier: str | None = Field(default=None, description="no effect")


class ImageUrl(Body):
    """A picture by data URL, or by https URL from a host that the server allows."""

    image_url: str


class EditBody(PaintBody):
    """An edit, in JSON. In a form the pictures are the files ``image`` or ``image[]``, and there is no ``images``."""

    images: list[ImageUrl]
    mask: Any = Field(default=None, description="refused: say in the prompt what to change")


class JobBody(PaintBody):
    """A painting, or an edit of ``images``, that is asked for again later."""

    images: list[ImageUrl] = []
    stream: Literal[False] | None = Field(default=None, description="true is refused: a job has events of its own")
    detach: bool = Field(default=False, description="go on although nobody asks for it")


def _is_text(value: object) -> str:
    return "<text>" if isinstance(value, str) else "<list>"


one_or_many = Discriminator(_is_text)
"""Tells a text from what may stand in its place, so that a complaint is about the form that was sent."""


class PictureUrl(Body):
    url: str
    detail: str | None = Field(default=None, description="no effect")


class ContentPart(Body):
    """A text or a picture of a message."""

    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: PictureUrl | None = None


class ChatMessage(Body):
    """``reasoning_content`` of an earlier answer is accepted, and not read again."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Annotated[str, Tag("<text>")] | Annotated[list[ContentPart], Tag("<list>")], one_or_many]
    name: str | None = Field(default=None, description="no effect")
    refusal: None = None
    reasoning_content: str | None = Field(default=None, description="no effect")


class ImageConfig(Body):
    """How the pictures of an answer are painted. ``width`` and ``height`` together, or ``aspect_ratio`` and
    ``image_size`` (the side whose square is the area). ``partial_images``: previews of each, in a stream."""

    aspect_ratio: str | None = Field(default=None, pattern=r"^[1-9]\d{0,2}:[1-9]\d{0,2}$")
    image_size: Literal["0.5K", "1K", "2K"] | None = None
    width: Side | None = None
    height: Side | None = None
    steps: Count | None = None
    guidance_scale: Number | None = None
    image_guidance_scale: Number | None = None
    cfg_norm: str | None = None
    timestep_shift: Number | None = None
    seed: int | None = Field(default=None, ge=0, le=2**63 - 11)
    num_images: int | None = Field(default=None, ge=1, le=10)
    partial_images: int | None = Field(default=None, ge=0, le=3)


class StreamOptions(Body):
    include_usage: bool | None = None


class ChatBody(Body):
    """A dialogue to go on with."""

    messages: list[ChatMessage] = Field(min_length=1)
    model: str | None = None
    modalities: list[Literal["text", "image"]] | None = None
    image_config: ImageConfig | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=0, le=MAX_WHOLE)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10, allow_inf_nan=False)
    stop: Annotated[Annotated[str, Tag("<text>")] | Annotated[list[str], Tag("<list>")], one_or_many] | None = None
    seed: int | None = Field(default=None, ge=0, le=2**63 - 11)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    think: bool | None = None
    max_think_tokens: Count | None = None
    n: Literal[1] | None = None
    frequency_penalty: float | None = Field(default=None, ge=0, le=0)
    presence_penalty: float | None = Field(default=None, ge=0, le=0)
    logprobs: Literal[False] | None = None
    priority: Priority | None = Field(default=None, description=PRIORITY)
    user: str | None = Field(default=None, description="no effect")
    safety_identifier: str | None = Field(default=None, description="no effect")
