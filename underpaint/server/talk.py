"""The work of an answer: from a checked dialogue to text and pictures, as they come."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from underpaint.chat import MAX_PICTURES, Chat, PaintingOptions, PreviewPart, TextPart
from underpaint.errors import BadParameter, BadRequest
from underpaint.images import fit_to_area
from underpaint.models.neo_unify.prompt import IMAGE_TAG
from underpaint.request import check_text
from underpaint.server.config import Kind, ServerConfig
from underpaint.server.errand import Errand
from underpaint.server.faults import rename_param
from underpaint.server.media import Output, reopen_images, send
from underpaint.server.news import Closing, Event, Opened, Preview, Said, Shown
from underpaint.server.paint import Atelier, check_model, check_pixels, check_previews, check_steps
from underpaint.server.schema import ChatBody, ChatMessage, ImageConfig

SIDES = {"0.5K": 512, "1K": 1024, "2K": 2048}
PARAM_NAMES = {
    "prompt": "messages",
    "images": "messages",
    "num_inference_steps": "image_config.steps",
    **{
        name: f"image_config.{name}"
        for name in ("width", "height", "guidance_scale", "image_guidance_scale", "cfg_norm", "timestep_shift")
    },
}
"""What the engines call a parameter -> what clients call it."""
FINISH = {"stop": "stop", "length": "length", "pictures": "length"}
"""Why the engine's answers end -> what OpenAI calls it."""


@dataclass(frozen=True)
class Answer:
    """A whole answer, its parts in order."""

    parts: tuple[Said | Shown, ...]
    finish: str
    num_prompt_tokens: int
    num_answer_tokens: int

    @property
    def usage(self) -> dict[str, int]:
        total = self.num_prompt_tokens + self.num_answer_tokens
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_answer_tokens,
            "total_tokens": total,
        }


class Talk(Struct, frozen=True, tag=True):
    """A dialogue, and how to go on with it: the arguments of ``Chat.send``. ``files``: its pictures, as they were
    sent."""

    turns: list[dict[str, str]]
    files: tuple[bytes, ...]
    painting: PaintingOptions
    max_pictures: int
    options: dict[str, Any]

    @property
    def kind(self) -> Kind:
        return "painting" if self.max_pictures else "text"

    def __call__(self, errand: Errand) -> Closing:
        """Answer. Raises BadRequest before any work; ``Opened`` tells that there was no reason to."""
        chat = Chat(errand.service)
        with errand.timed("plan"):
            parts = chat.send(
                self.turns, reopen_images(self.files), painting=self.painting, max_pictures=self.max_pictures,
                **self.options,
            )  # fmt: skip
        errand.emit(Opened())
        num_shown = 0
        with errand.timed("talk"), closing(parts):  # type: ignore[type-var]
            for part in parts:
                if isinstance(part, TextPart):
                    errand.emit(Said(part.text, part.thought))
                elif isinstance(part, PreviewPart):
                    errand.emit(Preview(num_shown, part.number, send(part.image, Output())))
                else:
                    errand.emit(Shown(send(part.image, Output())))
                    num_shown += 1
        assert chat.finish is not None
        return Closing(chat.finish, errand.claim.num_prompt_rows, errand.claim.num_answer_tokens)

    def result(self, events: Sequence[Event], closing: Closing | None) -> Answer:
        """The whole answer."""
        assert closing is not None
        parts = tuple(event for event in events if isinstance(event, Said | Shown))
        return Answer(parts, FINISH[closing.finish], closing.num_prompt_tokens, closing.num_answer_tokens)


@dataclass(frozen=True)
class Dialogue:
    """Messages as the model reads them: texts with a tag for each picture, and the pictures' URLs in order."""

    turns: list[dict[str, str]]
    urls: list[str]


def read_dialogue(body: ChatBody) -> Dialogue:
    """Raises BadParameter for parts that do not say what they are, and for tags that only the server may write."""
    turns: list[dict[str, str]] = []
    urls: list[str] = []
    for i, message in enumerate(body.messages):
        text, own = _read_message(message, f"messages.{i}")
        if own and message.role in ("system", "developer"):
            raise BadParameter("a system message has no pictures", param=f"messages.{i}")
        if i == len(body.messages) - 1 and text.startswith(f"{IMAGE_TAG}\n" * len(own)):
            text = text.removeprefix(f"{IMAGE_TAG}\n" * len(own))  # the model's own way to place them applies
        role = "system" if message.role == "developer" else message.role
        turns.append({"role": role, "content": text})
        urls += own
    return Dialogue(turns, urls)


def _read_message(message: ChatMessage, param: str) -> tuple[str, list[str]]:
    """The text of a message, with a tag where each of its pictures stands, and their URLs."""
    if isinstance(message.content, str):
        _check(message.content, param)
        return message.content, []
    text, urls = "", []
    for i, part in enumerate(message.content):
        name = f"{param}.content.{i}"
        if part.type == "text" and part.text is not None and part.image_url is None:
            _check(part.text, name)
            text += part.text
        elif part.type == "image_url" and part.image_url is not None and part.text is None:
            text += f"{IMAGE_TAG}\n"
            urls.append(part.image_url.url)
        else:
            raise BadParameter(f"{name}: a part of type {part.type} has {part.type}, and nothing else", param=name)
    return text, urls


def _check(text: str, param: str) -> None:
    check_text(param, text)
    if IMAGE_TAG in text:
        raise BadParameter(f"a text must not contain {IMAGE_TAG}; send pictures as image_url", param=param)


def read_talk(
    body: ChatBody, dialogue: Dialogue, files: tuple[bytes, ...], atelier: Atelier, config: ServerConfig
) -> Talk:
    """A body as work, checked as far as needs no model. ``files``: its pictures, whose headers were read.
    Raises BadRequest."""
    check_model(body.model, config)
    modalities = {"text"} if body.modalities is None else set(body.modalities)
    if not modalities:
        raise BadParameter("modalities is empty; an answer has at least text", param="modalities")
    if modalities == {"image"}:
        raise BadParameter("for pictures alone use /v1/images/generations; add text to modalities", param="modalities")
    paints = "image" in modalities
    if body.image_config is not None and not paints:
        raise BadParameter('image_config needs "image" in modalities', param="image_config")
    settings = body.image_config or ImageConfig()
    if body.max_tokens and body.max_completion_tokens and body.max_tokens != body.max_completion_tokens:
        raise BadParameter("max_completion_tokens and max_tokens differ; give one of them", param="max_tokens")
    if None not in (body.seed, settings.seed) and body.seed != settings.seed:
        raise BadParameter("seed and image_config.seed differ; give one of them", param="image_config.seed")
    if body.stream_options is not None and not body.stream:
        raise BadParameter("stream_options needs stream", param="stream_options")
    for text in body.stop or ():
        check_text("stop", text)
    given = {
        "max_tokens": body.max_completion_tokens or body.max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "repetition_penalty": body.repetition_penalty,
        "stop": (body.stop,) if isinstance(body.stop, str) else None if body.stop is None else tuple(body.stop),
        "seed": body.seed if settings.seed is None else settings.seed,
        "think": body.think,
        "max_think_tokens": body.max_think_tokens,
    }
    options = {name: value for name, value in given.items() if value is not None}
    if body.max_think_tokens is not None and not body.think:
        raise BadParameter("max_think_tokens has no effect without think", param="max_think_tokens")
    max_pictures = (settings.num_images or MAX_PICTURES) if paints else 0
    painting = _painting(settings, bool(body.stream), atelier, config)
    if paints and not painting.sizes:  # the model's own area, in whatever ratio
        check_pixels(atelier.defaults.reference_resolution**2, "image_config", config)
    return Talk(dialogue.turns, files, painting, max_pictures, options)


def _painting(settings: ImageConfig, streams: bool, atelier: Atelier, config: ServerConfig) -> PaintingOptions:
    """Raises BadRequest."""
    check_steps(settings.steps, "image_config.steps", config)
    num_previews = check_previews(settings.partial_images, "image_config.partial_images", streams)
    given = {
        "guidance_scale": settings.guidance_scale,
        "image_guidance_scale": settings.image_guidance_scale,
        "cfg_norm": settings.cfg_norm,
        "timestep_shift": settings.timestep_shift,
        "num_inference_steps": settings.steps,
    }
    sizes = _sizes(settings, atelier)
    for width, height in sizes:
        check_pixels(width * height, "image_config", config)
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    try:
        return PaintingOptions(sizes=sizes, num_previews=num_previews, **options)
    except BadRequest as error:
        raise rename_param(error, PARAM_NAMES) from error


def _sizes(settings: ImageConfig, atelier: Atelier) -> tuple[tuple[int, int], ...]:
    """Width and height of the pictures; none for the model's own choice."""
    if (settings.width is None) != (settings.height is None):
        raise BadParameter("width and height go together", param="image_config")
    by_ratio = settings.aspect_ratio is not None or settings.image_size is not None
    if settings.width is not None and settings.height is not None:
        if by_ratio:
            raise BadParameter("give width and height, or aspect_ratio and image_size", param="image_config")
        return ((settings.width, settings.height),)
    if not by_ratio:
        return ()
    across, down = (int(part) for part in (settings.aspect_ratio or "1:1").split(":"))
    side = SIDES[settings.image_size] if settings.image_size else atelier.defaults.reference_resolution
    return (fit_to_area(across, down, side, atelier.limits.side_multiple),)
