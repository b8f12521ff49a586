"""Dialogues in text and two pictures: "draw a red circle, then move it to the right".

Everything between the user's turns is a function of what was asked, so that an answer can be compared word for word.
The templates are the engine's own (``underpaint.models.neo_unify.prompt``).
"""

import random
from dataclasses import dataclass

from pocket.captions import CELLS_EN, CELLS_ZH, COLOURS_EN, COLOURS_ZH, SHAPES_EN, SHAPES_ZH, Language, caption, name
from pocket.questions import QUESTION_KINDS, ask_about
from pocket.scenes import TRANSPARENT, Scene, Split
from pocket.tasks import KINDS, Example, draw_kind
from underpaint.models.neo_unify.prompt import (
    IMAGE_CONTEXT,
    IMAGE_START,
    IMAGE_STOP,
    IMAGE_TAG,
    NO_THOUGHT,
    TURN_STOP,
    interleave_text,
    pictures_text,
)

DIALOGUE_KINDS = ("then", "turns", "ask")
PICTURES = 2  # of every dialogue
READ_BACK = f"{IMAGE_CONTEXT}{IMAGE_STOP}"
"""What the engine puts behind the ``<img>`` of a finished picture."""

Script = tuple[tuple[str, bool], ...]
"""A sequence in pieces: text with special tokens, and whether the model writes it. ``IMAGE_CONTEXT`` stands once for
every picture."""


@dataclass(frozen=True)
class Dialogue:
    """``prompts``: the user's turns. ``answers``: what the model writes in each, with ``IMAGE_START`` where it paints
    one of ``scenes``. Kinds: "then" (both pictures in one answer), "turns" (one in each), "ask" (and then a question
    about the second, in the last turn)."""

    kind: str
    prompts: tuple[str, ...]
    answers: tuple[str, ...]
    scenes: tuple[Scene, Scene]

    @property
    def script(self) -> Script:
        """The whole dialogue as the engine reads and writes it."""
        pieces: list[tuple[str, bool]] = []
        for index, (prompt, answer) in enumerate(zip(self.prompts, self.answers, strict=True)):
            pieces.append((interleave_text(prompt, 0) if index == 0 else next_turn(prompt), False))
            parts = answer.split(IMAGE_START)
            for part in parts[:-1]:
                pieces += [(part + IMAGE_START, True), (READ_BACK, False)]
            pieces.append((parts[-1] + TURN_STOP, True))
        return tuple(pieces)


def next_turn(prompt: str) -> str:
    """What follows the ``<|im_end|>`` of an answer when the dialogue goes on, as ``underpaint.chat`` writes it."""
    return f"\n{interleave_text(prompt, 0)}".removesuffix(NO_THOUGHT) + NO_THOUGHT


def unprompted_script(kind: str) -> Script:
    """What guidance compares with: the pictures of a dialogue without its text. Within an answer they follow one
    another; those of earlier answers become the user's."""
    picture = IMAGE_START + READ_BACK
    before = pictures_text(0) + picture if kind == "then" else pictures_text(1).replace(IMAGE_TAG, picture)
    return ((before + IMAGE_START + READ_BACK, False),)


def draw_opaque(rng: random.Random, split: Split, kind: str) -> Example:
    """Like ``tasks.draw_kind``, without transparency: NEO-Unify paints and reads RGB."""
    while True:
        example = draw_kind(rng, split, kind)
        if all(scene.background != TRANSPARENT for scene in (*example.references, example.target)):
            return example


def draw_dialogue(rng: random.Random, split: Split, kind: str) -> Dialogue:
    """A dialogue of ``kind``, in the language of its edit; all of its scenes are of this side of the split."""
    while True:
        edit = draw_opaque(rng, split, rng.choice(KINDS[1]))
        language: Language = "en" if edit.prompt.isascii() else "zh"
        scenes = (edit.references[0], edit.target)
        drawn = caption(scenes[0], language, rng)
        change = _with_pronoun(edit, language, rng)
        first, second, end = _announcements(edit, language)
        if kind == "then":
            prompt = f"draw {drawn}, then {change}" if language == "en" else f"画{drawn}，然后{change}"
            answer = f"{first}{IMAGE_START}{second}{IMAGE_START}{end}"
            return Dialogue(kind, (prompt,), (answer,), scenes)
        prompts = (f"draw {drawn}" if language == "en" else f"画{drawn}", change)
        answers = (f"{first}{IMAGE_START}{end}", f"{second}{IMAGE_START}{end}")
        if kind == "turns":
            return Dialogue(kind, prompts, answers, scenes)
        asked = ask_about(rng.choice(QUESTION_KINDS), scenes[1], language, rng)
        if asked is not None:
            return Dialogue(kind, (*prompts, asked[0]), (*answers, asked[1]), scenes)


def _with_pronoun(edit: Example, language: Language, rng: random.Random) -> str:
    """The edit, sometimes with "it" for the only thing there is."""
    things = edit.references[0].things
    if len(things) > 1 or rng.random() < 0.5:
        return edit.prompt
    noun, pronoun = (f"the {name(things[0], 'en')}", "it") if language == "en" else (name(things[0], "zh"), "它")
    # What is added or painted over has no other name: only the first words are the thing's own.
    return edit.prompt.replace(noun, pronoun, 1) if edit.kind in ("recolour", "move") else edit.prompt


def _announcements(edit: Example, language: Language) -> tuple[str, str, str]:
    """What the model says before the first picture, before the second, and at the end of an answer."""
    before, after = edit.references[0], edit.target
    if language == "en":
        return "here is the picture:", f"now {_change_en(edit.kind, before, after)}:", "done"
    return "这是图片：", f"现在{_change_zh(edit.kind, before, after)}：", "完成"


def _changed(before: Scene, after: Scene) -> tuple[int, int]:
    """Numbers of the thing before and after; one that is added or gone counts for both."""
    if len(after.things) > len(before.things):
        return -1, len(after.things) - 1
    pairs = enumerate(zip(before.things, after.things, strict=False))
    index = next((i for i, (old, new) in pairs if old != new), len(before.things) - 1)
    return index, min(index, len(after.things) - 1)


def _change_en(kind: str, before: Scene, after: Scene) -> str:
    old, new = _changed(before, after)
    match kind:
        case "recolour":
            return f"the {SHAPES_EN[after.things[new].shape]} is {COLOURS_EN[after.things[new].colour]}"
        case "move":
            return f"the {SHAPES_EN[after.things[new].shape]} is moved to {CELLS_EN[after.things[new].cell]}"
        case "add":
            return f"with a {SHAPES_EN[after.things[new].shape]}"
        case "remove":
            return f"without the {SHAPES_EN[before.things[old].shape]}"
        case _:
            return "on another background"


def _change_zh(kind: str, before: Scene, after: Scene) -> str:
    old, new = _changed(before, after)
    match kind:
        case "recolour":
            return f"{SHAPES_ZH[after.things[new].shape]}是{COLOURS_ZH[after.things[new].colour]}"
        case "move":
            return f"{SHAPES_ZH[after.things[new].shape]}移到{CELLS_ZH[after.things[new].cell]}"
        case "add":
            return f"加上{SHAPES_ZH[after.things[new].shape]}"
        case "remove":
            return f"去掉{SHAPES_ZH[before.things[old].shape]}"
        case _:
            return "换了背景"


def dialogue_words() -> list[str]:
    """Words of dialogues beyond ``captions.lexicon``, for the tokenizer."""
    english = "draw then it here is picture now with without moved another done the a background"
    words = english.split()
    chinese = ["画", "然后", "它", "这是", "图片", "现在", "完成", "是", "换了"]
    return chinese + words + [f" {word}" for word in words] + ["：", "？"]
