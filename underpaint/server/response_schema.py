"""What clients may send to ``/v1/responses``: every field is honoured or refused, as in ``schema.py``.

``user``, ``safety_identifier``, ``service_tier``, ``prompt_cache_key`` and ``parallel_tool_calls`` have no effect.
``metadata`` comes back with the response.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from underpaint.server.config import Priority
from underpaint.server.schema import MAX_PROMPT_CHARACTERS, PRIORITY, Body, Count, PictureOptions, one_or_many


class InputText(Body):
    type: Literal["input_text"]
    text: str


class OutputText(Body):
    """A text of an earlier answer, as it was given out."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] | None = Field(default=None, description="no effect")
    logprobs: list[Any] | None = Field(default=None, description="no effect")


class InputImage(Body):
    """A picture by data URL, or by https URL from a host that the server allows."""

    type: Literal["input_image"]
    image_url: str
    detail: str | None = Field(default=None, description="no effect")


def kind_among(kinds: Sequence[str], default: str | None = None) -> Discriminator:
    """Tells by ``type`` which of several forms was sent, so that a complaint is about that form and its own fields."""

    def kind_of(value: object) -> str | None:
        kind = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", None)
        return f"<{kind}>" if kind in kinds else None

    return Discriminator(kind_of, "unknown_type", f"type must be one of {', '.join(kinds)}")


Part = Annotated[
    Annotated[InputText, Tag("<input_text>")]
    | Annotated[OutputText, Tag("<output_text>")]
    | Annotated[InputImage, Tag("<input_image>")],
    kind_among(("input_text", "output_text", "input_image")),
]


class InputMessage(Body):
    """A message of the dialogue. ``id``, ``status`` and ``phase`` of an earlier answer have no effect."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[Annotated[str, Tag("<text>")] | Annotated[list[Part], Tag("<list>")], one_or_many]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class PaintedItem(Body):
    """A picture of an earlier answer, as it was given out; all but ``result`` has no effect."""

    type: Literal["image_generation_call"]
    result: str = Field(description="base64")
    id: str | None = None
    status: str | None = None
    action: str | None = None
    background: str | None = None
    output_format: str | None = None
    quality: str | None = None
    revised_prompt: str | None = None
    size: str | None = None
    seed: int | None = None
    error: None = None


class ReasoningItem(Body):
    """A thought of an earlier answer; it is not read again."""

    type: Literal["reasoning"]
    id: str | None = None
    status: str | None = None
    summary: list[Any] | None = None
    content: list[Any] | None = None
    encrypted_content: str | None = None


Item = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[PaintedItem, Tag("<image_generation_call>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    kind_among(("message", "image_generation_call", "reasoning"), default="message"),
]


class ImageTool(PictureOptions):
    """OpenAI's tool, with the options of our engines beside it. ``action``: generate paints anew, edit needs a picture,
    auto edits where there is one."""

    type: Literal["image_generation"]
    model: str | None = None
    action: Literal["generate", "edit", "auto"] | None = None
    input_fidelity: str | None = Field(default=None, description="no effect")


class ToolChoice(Body):
    type: Literal["image_generation"]


class Reasoning(Body):
    """How long a thought before the answer may be; none and minimal are no thought."""

    effort: Literal["none", "minimal", "low", "medium", "high"] | None = None


class TextFormat(Body):
    type: Literal["text"]


class TextOptions(Body):
    format: TextFormat | None = None


class ResponseStreamOptions(Body):
    include_obfuscation: Literal[False] | None = None


class ResponseBody(Body):
    """A dialogue to go on with, or a picture to paint. Nothing is stored: the whole dialogue is sent every time."""

    input: Annotated[
        Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS), Tag("<text>")]
        | Annotated[list[Item], Field(min_length=1), Tag("<list>")],
        one_or_many,
    ]
    model: str | None = None
    instructions: str | None = None
    tools: list[ImageTool] | None = Field(default=None, max_length=1)
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("<text>")] | Annotated[ToolChoice, Tag("<list>")],
            one_or_many,
        ]
        | None
    ) = None
    max_tool_calls: int | None = Field(default=None, ge=1, le=10, description="pictures that the answer may have")
    max_output_tokens: Count | None = None
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    truncation: Literal["disabled"] | None = None
    store: bool | None = Field(default=None, description="true is refused")
    background: bool | None = Field(default=None, description="true is refused: use /v1/jobs")
    previous_response_id: str | None = Field(default=None, description="refused: nothing is stored")
    include: list[str] | None = Field(default=None, description="must be empty")
    top_logprobs: Literal[0] | None = None
    parallel_tool_calls: bool | None = Field(default=None, description="no effect")
    prompt_cache_key: str | None = Field(default=None, description="no effect")
    service_tier: Literal["auto", "default"] | None = Field(default=None, description="no effect")
    priority: Priority | None = Field(default=None, description=PRIORITY)
    user: str | None = Field(default=None, description="no effect")
    safety_identifier: str | None = Field(default=None, description="no effect")


def plain(model: BaseModel | None) -> Any:
    """A part of a body as it is told back to the client."""
    return None if model is None else model.model_dump(mode="json", exclude_none=True, exclude_unset=True)
