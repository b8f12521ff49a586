"""From the body of ``/v1/responses`` to what the other endpoints already understand: a dialogue, or a painting.

A model that talks answers in its dialogue, and paints there when it wants to. A picture is painted outside of it when
``tool_choice`` demands one, and always by a model that only paints. Then the last user message is the prompt, and its
pictures, after those that the answer before it had, are the references.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from underpaint.errors import BadParameter, BadRequest
from underpaint.server.config import ServerConfig
from underpaint.server.faults import MissingField, UnknownModel
from underpaint.server.media import Output
from underpaint.server.paint import PARAM_NAMES as PAINT_NAMES
from underpaint.server.paint import Atelier, check_model, legal_size
from underpaint.server.response_schema import (
    ImageTool,
    InputImage,
    InputMessage,
    Item,
    PaintedItem,
    ReasoningItem,
    ResponseBody,
    ToolChoice,
)
from underpaint.server.schema import (
    MAX_PROMPT_CHARACTERS,
    ChatBody,
    ChatMessage,
    ContentPart,
    ImageConfig,
    PaintBody,
    PictureOptions,
    PictureUrl,
)

TOOL = "tools.0"
THINK_TOKENS = {"low": 256, "medium": 1024, "high": 4096}
"""``reasoning.effort`` -> how long a thought may be."""
CHAT_NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "image_config": TOOL,
    "image_config.steps": f"{TOOL}.num_inference_steps",
    "image_config.width": f"{TOOL}.size",
    "image_config.height": f"{TOOL}.size",
    **{
        f"image_config.{name}": f"{TOOL}.{name}"
        for name in ("guidance_scale", "image_guidance_scale", "cfg_norm", "timestep_shift", "partial_images")
    },
}
PAINTING_NAMES: Mapping[str, str] = {
    "prompt": "input",
    "images": "input",
    **{name: f"{TOOL}.{name}" for name in PictureOptions.model_fields},
    **{name: f"{TOOL}.{param}" for name, param in PAINT_NAMES.items() if param == "size"},
}
"""What the other endpoints call a parameter -> what a client of this one calls it."""
CHAT_PICTURE_OPTIONS = frozenset(
    {"size", "background", "output_format", "num_inference_steps", "guidance_scale", "image_guidance_scale", "cfg_norm",
     "timestep_shift", "quality", "moderation", "partial_images"}
)  # fmt: skip
"""What the tool can be asked for within a dialogue. The rest belongs to paintings."""


@dataclass(frozen=True)
class Plan:
    """What to do: exactly one of ``chat`` and ``painting``. ``urls``: the pictures of the latter."""

    chat: ChatBody | None
    painting: PaintBody | None
    urls: tuple[str, ...]


def read_response(body: ResponseBody, atelier: Atelier, config: ServerConfig) -> Plan:
    """Raises BadRequest."""
    _refuse_storage(body)
    check_model(body.model, config)
    tool = body.tools[0] if body.tools else None
    if tool is not None and tool.model not in (None, config.model_id):
        raise UnknownModel(f"the model that paints is {config.model_id!r}", param=f"{TOOL}.model")
    demanded = body.tool_choice == "required" or isinstance(body.tool_choice, ToolChoice)
    if demanded and tool is None:
        raise BadParameter('tool_choice demands a tool: tools must have {"type": "image_generation"}', param="tools")
    if body.stream_options is not None and not body.stream:
        raise BadParameter("stream_options needs stream", param="stream_options")
    items = _items(body)
    if tool is not None and (demanded or (not atelier.talks and body.tool_choice != "none")):
        return _painting(body, tool, items)
    if not atelier.talks:
        raise BadParameter(
            "this model paints and writes no text; give it the tool image_generation, and leave it the choice",
            param="tools" if tool is None else "tool_choice",
        )
    return Plan(_chat(body, tool if body.tool_choice != "none" else None, items, atelier, config), None, ())


def _refuse_storage(body: ResponseBody) -> None:
    if body.store:
        raise BadParameter("responses are not stored; leave store out, and send the whole dialogue", param="store")
    if body.previous_response_id is not None:
        raise BadParameter(
            "responses are not stored; send the dialogue so far as input, with the output of each answer",
            param="previous_response_id",
        )
    if body.background:
        raise BadParameter("to be asked for again later, a painting goes to /v1/jobs", param="background")
    if body.include:
        raise BadParameter("there is nothing to include beside what a response has", param="include")


def _items(body: ResponseBody) -> list[Item]:
    if isinstance(body.input, str):
        return [InputMessage(role="user", content=body.input)]
    return body.input


def _painting(body: ResponseBody, tool: ImageTool, items: Sequence[Item]) -> Plan:
    """The last user message as a painting."""
    for name in ("temperature", "top_p", "max_output_tokens", "reasoning"):
        if getattr(body, name) is not None:
            raise BadParameter(f"{name} is for text, and this request paints", param=name)
    if body.instructions:
        raise BadParameter("a painting has no instructions; say it in the input", param="instructions")
    if any(isinstance(item, InputMessage) and item.role in ("system", "developer") for item in items):
        raise BadParameter("a painting has no system message; say it in the user's", param="input")
    last = items[-1]
    if not isinstance(last, InputMessage) or last.role != "user":
        raise BadParameter("the last of the input must be the user's message: it is the prompt", param="input")
    urls = _references(items)
    if tool.action == "generate" and urls:
        raise BadParameter("action generate takes no pictures, and the input has some", param=f"{TOOL}.action")
    if tool.action == "edit" and not urls:
        raise MissingField("action edit needs a picture in the input", param="input")
    text = "\n".join(_texts(last))
    if len(text) > MAX_PROMPT_CHARACTERS:
        raise BadParameter(f"a prompt may have {MAX_PROMPT_CHARACTERS} characters", param="input")
    options = tool.model_dump(include=set(PictureOptions.model_fields), exclude_unset=True)
    return Plan(None, PaintBody(prompt=text, stream=body.stream, **options), tuple(urls))


def _references(items: Sequence[Item]) -> list[str]:
    """The pictures of the last message, and before them those of the answer that it speaks about."""
    *before, last = items
    urls: list[str] = []
    for item in reversed(before):
        if isinstance(item, InputMessage) and item.role == "user":
            break
        urls = _urls(item) + urls
    return urls + _urls(last)


def _urls(item: Item) -> list[str]:
    if isinstance(item, PaintedItem):
        return [_url(item)]
    if isinstance(item, InputMessage) and not isinstance(item.content, str):
        return [part.image_url for part in item.content if isinstance(part, InputImage)]
    return []


def _url(item: PaintedItem) -> str:
    return f"data:image/{item.output_format or 'png'};base64,{item.result}"


def _texts(message: InputMessage) -> list[str]:
    if isinstance(message.content, str):
        return [message.content]
    return [part.text for part in message.content if not isinstance(part, InputImage)]


def _chat(
    body: ResponseBody, tool: ImageTool | None, items: Sequence[Item], atelier: Atelier, config: ServerConfig
) -> ChatBody:
    """The same dialogue for ``/v1/chat/completions``."""
    if body.max_tool_calls is not None and tool is None:
        raise BadParameter("max_tool_calls needs the tool image_generation", param="max_tool_calls")
    effort = (body.reasoning.effort if body.reasoning else None) or "none"
    values: dict[str, Any] = {
        "messages": _messages(body.instructions, items),
        "modalities": ["text", "image"] if tool else ["text"],
        "image_config": _image_config(tool, body.max_tool_calls, atelier, config) if tool else None,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "seed": tool.seed if tool else None,
        "stream": body.stream,
        "think": effort in THINK_TOKENS,
        "max_think_tokens": THINK_TOKENS.get(effort),
    }
    return ChatBody(**values)


def _image_config(tool: ImageTool, max_pictures: int | None, atelier: Atelier, config: ServerConfig) -> ImageConfig:
    """Raises BadParameter for options that a picture within a dialogue cannot have."""
    for name in tool.model_fields_set & (PictureOptions.model_fields.keys() - CHAT_PICTURE_OPTIONS - {"seed"}):
        if getattr(tool, name) is not None:
            raise BadParameter(
                f"{name} is for paintings; demand one with tool_choice image_generation, or leave it out",
                param=f"{TOOL}.{name}",
            )
    if tool.output_format not in (None, "png"):
        raise BadParameter("pictures within a dialogue are png", param=f"{TOOL}.output_format")
    if tool.action not in (None, "auto"):
        raise BadParameter("within a dialogue, the model sees for itself what to edit", param=f"{TOOL}.action")
    try:
        Output(background=tool.background or "auto").check(atelier.has_alpha)
        width, height = legal_size(tool.size or "auto", atelier.limits, config)
    except BadRequest as error:
        raise as_asked(error, PAINTING_NAMES) from error
    return ImageConfig(
        width=width,
        height=height,
        steps=tool.num_inference_steps,
        guidance_scale=tool.guidance_scale,
        image_guidance_scale=tool.image_guidance_scale,
        cfg_norm=tool.cfg_norm,
        timestep_shift=tool.timestep_shift,
        num_images=max_pictures,
        partial_images=tool.partial_images,
    )


def _messages(instructions: str | None, items: Sequence[Item]) -> list[ChatMessage]:
    """Messages as the chat reads them. What the assistant gave out item by item was one message."""
    messages = [ChatMessage(role="system", content=instructions)] if instructions else []
    for item in items:
        if isinstance(item, ReasoningItem):
            continue
        role = item.role if isinstance(item, InputMessage) else "assistant"
        parts = _parts(item)
        last = messages[-1] if messages else None
        if last is not None and last.role == role == "assistant":
            assert isinstance(last.content, list)
            last.content.extend(parts)
        else:
            messages.append(ChatMessage(role=role, content=parts))
    if not messages:
        raise BadParameter("the input has no message", param="input")
    return messages


def _parts(item: InputMessage | PaintedItem) -> list[ContentPart]:
    if isinstance(item, PaintedItem):
        return [_picture(_url(item))]
    if isinstance(item.content, str):
        return [ContentPart(type="text", text=item.content)]
    return [
        _picture(part.image_url) if isinstance(part, InputImage) else ContentPart(type="text", text=part.text)
        for part in item.content
    ]


def _picture(url: str) -> ContentPart:
    return ContentPart(type="image_url", image_url=PictureUrl(url=url))


def as_asked(error: BadRequest, names: Mapping[str, str]) -> BadRequest:
    """``error`` about the dialogue, or a part of it, as one about the input."""
    param = error.param or ""
    error.param = "input" if param.startswith("messages") else names.get(param, error.param)
    return error
