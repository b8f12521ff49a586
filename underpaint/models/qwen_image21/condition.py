"""What one guidance branch of Qwen-Image 2.1 paints from."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image
from torch import Tensor

from underpaint.kv.tree import Key, Unit, chain
from underpaint.layout import Grid, Layout
from underpaint.models.qwen_image21.encoder import EncodedPrompt


@dataclass(frozen=True, eq=False)
class Reference:
    """A reference picture at the size the model reads it. ``content`` identifies its pixels and its size.
    ``latents``: (tokens, channels) on ``grid``."""

    image: Image.Image
    content: bytes
    grid: Grid
    latents: Tensor


@dataclass(frozen=True, eq=False)
class Condition:
    """The prefix of one branch: ``layout`` without the target, ``text`` (text rows, context_dim) in order, ``latents``
    (tokens, channels) of each reference in order, and the ``units`` of its trunk."""

    layout: Layout
    text: Tensor
    latents: tuple[Tensor, ...]
    units: tuple[Unit, ...]


def content_of(image: Image.Image) -> bytes:
    """A digest of an RGBA picture's size and pixels."""
    return hashlib.sha256(repr(image.size).encode() + image.tobytes()).digest()


def prefix_layout(texts: Sequence[Sequence[int]], grids: Sequence[Grid]) -> Layout:
    """Texts and references in turn, ending in the prompt."""
    parts: list[int | Grid] = []
    for text, grid in zip(texts[:-1], grids, strict=True):
        parts += [len(text), grid]
    return Layout.of([*parts, len(texts[-1])])


def make_condition(prompt: EncodedPrompt, references: Sequence[Reference], root: Key) -> Condition:
    """Assemble a branch. ``root`` names the weights and everything else that K/V depend on.

    Special tokens stand at the borders of every reference, so the tokens of a trunk do not depend on the prompt, and a
    causal mask keeps its keys and values independent of it too.
    """
    texts = prompt.texts
    layout = prefix_layout(texts, [reference.grid for reference in references])
    contents = [
        repr((text, reference.grid)).encode() + reference.content
        for text, reference in zip(texts, references, strict=False)
    ]
    latents = tuple(reference.latents for reference in references)
    return Condition(layout, prompt.states, latents, chain(root, layout.trunk_units(), contents))
