"""Questions about scenes, their answers, and a strict judge, in English and Chinese.

A question has many wordings, its answer one: what the words for it are is a matter of language alone, so a model that
answers right writes exactly these characters.
"""

import random
from collections import Counter
from dataclasses import dataclass

from pocket.captions import (
    BACKGROUNDS_EN,
    BACKGROUNDS_ZH,
    CELLS_EN,
    CELLS_ZH,
    COLOURS_EN,
    COLOURS_ZH,
    LANGUAGES,
    SHAPES_EN,
    SHAPES_ZH,
    Language,
    full_name,
    name,
    place,
)
from pocket.scenes import MAX_THINGS, TRANSPARENT, Scene, Split, Thing, draw_scene

QUESTION_KINDS = ("shape", "colour", "where", "count")
# What training asks. A description says something about every part of a picture, so it teaches to see sooner than
# answers of one word do.
TRAINING_KINDS = (*QUESTION_KINDS, "describe", "describe")
NUMBERS_EN = ("zero", "one", "two", "three")
NUMBERS_ZH = ("零个", "一个", "两个", "三个")


@dataclass(frozen=True)
class Question:
    """``text`` asks about ``scene``; ``answer`` is the only right one."""

    kind: str
    text: str
    answer: str
    scene: Scene


def draw_opaque_scene(rng: random.Random, split: Split, num_things: int) -> Scene:
    """A scene with a background: NEO-Unify paints and reads RGB."""
    return draw_scene(rng, split, num_things, rng.randrange(TRANSPARENT))


def is_right(answer: str, question: Question) -> bool:
    """Whether an answer is the right one: the same words, whatever the case, the spaces around and a full stop."""
    return _plain(answer) == _plain(question.answer)


def _plain(answer: str) -> str:
    return " ".join(answer.casefold().strip().rstrip(".。").split())


def ask_about(kind: str, scene: Scene, language: Language, rng: random.Random) -> tuple[str, str] | None:
    """A question of ``kind`` and its answer; None if the scene does not allow one without ambiguity."""
    thing = rng.choice(scene.things)
    match kind:
        case "shape":
            return _ask_shape(thing, scene, language, rng)
        case "colour":
            return _ask_colour(thing, scene, language, rng)
        case "where":
            return _ask_where(thing, scene, language, rng)
        case "describe":
            return _ask_description(scene, language, rng)
        case _:
            return _ask_count(scene, language, rng)


def draw_question(rng: random.Random, split: Split, kind: str) -> Question:
    """A question of ``kind`` in either language about a scene of this side of the split."""
    language = rng.choice(LANGUAGES)
    while True:
        scene = draw_opaque_scene(rng, split, rng.randint(1, MAX_THINGS))
        asked = ask_about(kind, scene, language, rng)
        if asked is not None:
            return Question(kind, *asked, scene)


def _ask_shape(thing: Thing, scene: Scene, language: Language, rng: random.Random) -> tuple[str, str] | None:
    """By place, by colour if that names one thing, or of the only thing."""
    forms: list[str] = []
    if language == "en":
        forms += [f"what shape is {place(thing.cell)}?", f"which shape is {place(thing.cell)}?"]
        if _is_only(scene, colour=thing.colour):
            forms += [f"what shape is the {COLOURS_EN[thing.colour]} thing?"]
        if len(scene.things) == 1:
            forms += ["what shape is it?"]
        return rng.choice(forms), SHAPES_EN[thing.shape]
    forms += [f"{CELLS_ZH[thing.cell]}是什么形状？", f"{CELLS_ZH[thing.cell]}的图形是什么形状？"]
    if _is_only(scene, colour=thing.colour):
        forms += [f"{COLOURS_ZH[thing.colour]}的图形是什么形状？"]
    if len(scene.things) == 1:
        forms += ["是什么形状？"]
    return rng.choice(forms), SHAPES_ZH[thing.shape]


def _ask_colour(thing: Thing, scene: Scene, language: Language, rng: random.Random) -> tuple[str, str] | None:
    """By place, by shape if that names one thing, or of the only thing."""
    forms: list[str] = []
    if language == "en":
        forms += [f"what colour is the thing {place(thing.cell)}?"]
        if _is_only(scene, shape=thing.shape):
            shape = SHAPES_EN[thing.shape]
            forms += [f"what colour is the {shape}?", f"what is the colour of the {shape}?"]
        if len(scene.things) == 1:
            forms += ["what colour is it?"]
        return rng.choice(forms), COLOURS_EN[thing.colour]
    forms += [f"{CELLS_ZH[thing.cell]}的图形是什么颜色？"]
    if _is_only(scene, shape=thing.shape):
        forms += [f"{SHAPES_ZH[thing.shape]}是什么颜色？", f"{SHAPES_ZH[thing.shape]}的颜色是什么？"]
    if len(scene.things) == 1:
        forms += ["是什么颜色？"]
    return rng.choice(forms), COLOURS_ZH[thing.colour]


def _ask_where(thing: Thing, scene: Scene, language: Language, rng: random.Random) -> tuple[str, str] | None:
    """By colour and shape, or by shape alone if that names one thing. An edit may have made two things alike."""
    if sum((other.shape, other.colour) == (thing.shape, thing.colour) for other in scene.things) > 1:
        return None
    alone = _is_only(scene, shape=thing.shape)
    if language == "en":
        words = rng.choice([name(thing, "en"), SHAPES_EN[thing.shape]]) if alone else name(thing, "en")
        forms = (f"where is the {words}?", f"where do you see the {words}?")
        return rng.choice(forms), CELLS_EN[thing.cell]
    words = rng.choice([name(thing, "zh"), SHAPES_ZH[thing.shape]]) if alone else name(thing, "zh")
    return rng.choice((f"{words}在哪里？", f"{words}在什么位置？")), CELLS_ZH[thing.cell]


def _ask_count(scene: Scene, language: Language, rng: random.Random) -> tuple[str, str]:
    """All things, those of a colour, or those of a shape; the shape or colour may be absent."""
    by = rng.choice(("all", "all", "shape", "colour"))
    shapes = Counter(thing.shape for thing in scene.things)
    colours = Counter(thing.colour for thing in scene.things)
    if by == "all":
        count = len(scene.things)
        english = ("how many shapes are there?", "how many things do you see?")
        chinese = ("有几个图形？", "一共有几个图形？")
    elif by == "shape":
        shape = rng.choice([*shapes, rng.randrange(len(SHAPES_EN))])
        count = shapes[shape]
        english = (f"how many {_plural(SHAPES_EN[shape])} are there?", f"how many {_plural(SHAPES_EN[shape])}?")
        chinese = (f"有几个{SHAPES_ZH[shape]}？", f"一共有几个{SHAPES_ZH[shape]}？")
    else:
        colour = rng.choice([*colours, rng.randrange(len(COLOURS_EN))])
        count = colours[colour]
        english = (f"how many {COLOURS_EN[colour]} shapes are there?", f"how many things are {COLOURS_EN[colour]}?")
        chinese = (f"有几个{COLOURS_ZH[colour]}的图形？", f"{COLOURS_ZH[colour]}的图形有几个？")
    if language == "en":
        return rng.choice(english), NUMBERS_EN[count]
    return rng.choice(chinese), NUMBERS_ZH[count]


def _ask_description(scene: Scene, language: Language, rng: random.Random) -> tuple[str, str]:
    """Background and all things, cell by cell."""
    things = sorted(scene.things, key=lambda thing: thing.cell)
    if language == "en":
        named = [f"{full_name(thing, 'en')} {place(thing.cell)}" for thing in things]
        forms = ("describe the picture", "what do you see?")
        return rng.choice(forms), f"{BACKGROUNDS_EN[scene.background]}: {', '.join(named)}"
    named = [f"{CELLS_ZH[thing.cell]}的{full_name(thing, 'zh')}" for thing in things]
    return rng.choice(("有什么？", "是什么图片？")), f"{BACKGROUNDS_ZH[scene.background]}：{'，'.join(named)}"


def _is_only(scene: Scene, shape: int | None = None, colour: int | None = None) -> bool:
    """Whether exactly one thing has this shape or colour."""
    return sum(thing.shape == shape or thing.colour == colour for thing in scene.things) == 1


def _plural(noun: str) -> str:
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def question_words() -> list[str]:
    """Words of questions and answers beyond ``captions.lexicon``, for the tokenizer."""
    english = "what which where how many shape colour is are it the thing things do you see there of describe"
    words = [*english.split(), *NUMBERS_EN, *(_plural(shape) for shape in SHAPES_EN)]
    chinese = [
        "是什么",
        "形状",
        "颜色",
        "在哪里",
        "在什么",
        "位置",
        "有几个",
        "一共",
        "几个",
        "的图形",
        "有什么",
        *NUMBERS_ZH,
    ]
    return chinese + words + [f" {word}" for word in words]
