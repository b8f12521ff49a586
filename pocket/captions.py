"""The words for scenes and edits, in English and Chinese, with some variation."""

import random
from typing import Literal

from pocket.scenes import Scene, Thing

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = ("en", "zh")

SHAPES_ZH = ("圆形", "正方形", "三角形", "十字")
COLOURS_ZH = ("红色", "绿色", "蓝色", "黄色", "橙色", "紫色", "黑色", "白色")
SIZES_ZH = ("小", "大")
BACKGROUNDS_ZH = ("白色", "黑色", "灰色", "粉色", "棕色", "天蓝色", "透明")
CELLS_ZH = ("左上角", "上方", "右上角", "左侧", "中间", "右侧", "左下角", "下方", "右下角")

SHAPES_EN = ("circle", "square", "triangle", "cross")
COLOURS_EN = ("red", "green", "blue", "yellow", "orange", "purple", "black", "white")
SIZES_EN = ("small", "large")
BACKGROUNDS_EN = ("white", "black", "grey", "pink", "brown", "sky blue", "transparent")
CELLS_EN = (
    "the top left",
    "the top",
    "the top right",
    "the left",
    "the centre",
    "the right",
    "the bottom left",
    "the bottom",
    "the bottom right",
)
# The preposition of each cell: "at the top", "on the left", "in the centre".
PREPOSITIONS_EN = ("at", "at", "at", "on", "in", "on", "at", "at", "at")


def _article(words: str) -> str:
    return f"an {words}" if words[0] in "aeiou" else f"a {words}"


def name(thing: Thing, language: Language) -> str:
    """How an edit refers to a thing: colour and shape, "red circle"."""
    if language == "en":
        return f"{COLOURS_EN[thing.colour]} {SHAPES_EN[thing.shape]}"
    return f"{COLOURS_ZH[thing.colour]}{SHAPES_ZH[thing.shape]}"


def full_name(thing: Thing, language: Language) -> str:
    """Size, colour and shape: "small red circle"."""
    if language == "en":
        return f"{SIZES_EN[thing.size]} {name(thing, language)}"
    return f"{SIZES_ZH[thing.size]}{name(thing, language)}"


def place(cell: int) -> str:
    """A cell with its preposition: "at the top left"."""
    return f"{PREPOSITIONS_EN[cell]} {CELLS_EN[cell]}"


def caption(scene: Scene, language: Language, rng: random.Random) -> str:
    """The prompt of a text-to-image scene."""
    return _caption_en(scene, rng) if language == "en" else _caption_zh(scene, rng)


def _join(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def _caption_en(scene: Scene, rng: random.Random) -> str:
    background = _article(f"{BACKGROUNDS_EN[scene.background]} background")
    if not scene.things:
        return f"nothing but {background}"
    things = _join([f"{_article(full_name(thing, 'en'))} {place(thing.cell)}" for thing in scene.things])
    match rng.randrange(4):
        case 0:
            return f"{things}, on {background}"
        case 1:
            return f"on {background}: {things}"
        case 2:
            return f"a picture of {things} on {background}"
        case _:
            return f"{things} on {background}"


def _caption_zh(scene: Scene, rng: random.Random) -> str:
    background = f"{BACKGROUNDS_ZH[scene.background]}背景"
    if not scene.things:
        return f"只有{background}"
    match rng.randrange(3):
        case 0:
            things = "，".join(f"{CELLS_ZH[t.cell]}有一个{full_name(t, 'zh')}" for t in scene.things)
            return f"{background}，{things}"
        case 1:
            things = "，".join(f"一个{full_name(t, 'zh')}在{CELLS_ZH[t.cell]}" for t in scene.things)
            return f"{things}，{background}"
        case _:
            things = "和".join(f"{CELLS_ZH[t.cell]}的{full_name(t, 'zh')}" for t in scene.things)
            return f"{background}上，{things}"


# --- edits: one instruction each, `rng` chooses the wording ------------------------------------------------------


def recolour(thing: Thing, colour: int, language: Language, rng: random.Random) -> str:
    """A thing in another colour."""
    if language == "en":
        return rng.choice(
            (
                f"make the {name(thing, 'en')} {COLOURS_EN[colour]}",
                f"change the colour of the {name(thing, 'en')} to {COLOURS_EN[colour]}",
            )
        )
    return rng.choice(
        (
            f"把{name(thing, 'zh')}改成{COLOURS_ZH[colour]}",
            f"将{name(thing, 'zh')}的颜色变成{COLOURS_ZH[colour]}",
        )
    )


def move(thing: Thing, cell: int, language: Language, rng: random.Random) -> str:
    """A thing in another cell."""
    if language == "en":
        verb = rng.choice(("move", "bring"))
        return f"{verb} the {name(thing, 'en')} to {CELLS_EN[cell]}"
    return f"{rng.choice(('把', '将'))}{name(thing, 'zh')}移到{CELLS_ZH[cell]}"


def add(thing: Thing, language: Language, rng: random.Random) -> str:
    """One more thing."""
    if language == "en":
        verb = rng.choice(("add", "put"))
        return f"{verb} {_article(full_name(thing, 'en'))} {place(thing.cell)}"
    return rng.choice(
        (
            f"在{CELLS_ZH[thing.cell]}加一个{full_name(thing, 'zh')}",
            f"{CELLS_ZH[thing.cell]}加上一个{full_name(thing, 'zh')}",
        )
    )


def remove(thing: Thing, language: Language, rng: random.Random) -> str:
    """One thing less."""
    if language == "en":
        return f"{rng.choice(('remove', 'delete'))} the {name(thing, 'en')}"
    return rng.choice((f"去掉{name(thing, 'zh')}", f"把{name(thing, 'zh')}删除"))


def change_background(background: int, language: Language, rng: random.Random) -> str:
    """Another background."""
    if language == "en":
        return rng.choice(
            (
                f"make the background {BACKGROUNDS_EN[background]}",
                f"change the background to {BACKGROUNDS_EN[background]}",
            )
        )
    return rng.choice((f"把背景改成{BACKGROUNDS_ZH[background]}", f"背景变成{BACKGROUNDS_ZH[background]}"))


def on_background_of(count: int, language: Language, rng: random.Random) -> str:
    """Two references: the things of image 1 on the background of image 2."""
    if language == "en":
        noun = "shape" if count == 1 else "shapes"
        return f"{rng.choice(('', 'put '))}the {noun} of image 1 on the background of image 2"
    return rng.choice(("把图1的图形放到图2的背景上", "图1的图形，图2的背景"))


def add_from(thing: Thing, language: Language, rng: random.Random) -> str:
    """Two references: one thing of image 2 added to image 1."""
    if language == "en":
        return f"{rng.choice(('add', 'put'))} the {name(thing, 'en')} of image 2 to image 1"
    return rng.choice((f"把图2的{name(thing, 'zh')}加到图1", f"图1加上图2的{name(thing, 'zh')}"))


def combine(language: Language, rng: random.Random) -> str:
    """Two references: the things of both on the background of image 1."""
    if language == "en":
        return rng.choice(
            (
                "the shapes of image 1 and image 2 on the background of image 1",
                "combine the shapes of both images on the background of image 1",
            )
        )
    return rng.choice(("图1和图2的图形，图1的背景", "把图1和图2的图形放到图1的背景上"))


def lexicon() -> list[str]:
    """The words of all prompts, one by one: what the tokenizer learns its merges from.

    Learning from words and not from sentences keeps Chinese words apart: "红色" and "圆形" stay two tokens, as the
    model must put them together in ways it has not seen.
    """
    chinese = [*SHAPES_ZH, *COLOURS_ZH, *SIZES_ZH, *BACKGROUNDS_ZH, *CELLS_ZH, "背景", "有一个", "一个", "在", "的"]
    chinese += ["和", "上", "，", "只有", "把", "将", "改成", "颜色", "变成", "移到", "加", "加上", "加到", "去掉"]
    chinese += ["删除", "图", "图形", "放到"]
    english = " ".join([*SHAPES_EN, *COLOURS_EN, *SIZES_EN, *BACKGROUNDS_EN, *CELLS_EN, *PREPOSITIONS_EN])
    english += " a an and on picture of background nothing but make change colour to move bring add put remove delete"
    english += " shape shapes image combine both"
    words = sorted(set(english.split()))
    return chinese + words + [f" {word}" for word in words]
