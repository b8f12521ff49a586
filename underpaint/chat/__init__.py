"""Dialogues with a model that talks and paints: text and pictures as they come."""

from underpaint.chat.chat import Chat
from underpaint.chat.options import MAX_PICTURES, AnswerOptions, PaintingOptions
from underpaint.chat.parts import Part, PicturePart, PreviewPart, TextPart

__all__ = [
    "MAX_PICTURES",
    "AnswerOptions",
    "Chat",
    "PaintingOptions",
    "Part",
    "PicturePart",
    "PreviewPart",
    "TextPart",
]
