"""Paints a contact sheet with the pocket checkpoint: prompts, edits with one and two references, transparency.

python -m pocket.demo [--out out/demo.png]
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont

from pocket.scenes import BACKGROUNDS, COLOURS, SHAPES, SIZES, Scene, Thing, render, scene_row
from underpaint import Pipeline
from underpaint.images import to_picture

CHECKPOINT = Path(__file__).parent / "qwen-image-2.1"
SIDE, GAP, TEXT_HEIGHT, FONT_SIZE = 160, 18, 58, 15
INK, PAPER, FAINT = (25, 25, 30), (255, 255, 255), (225, 228, 232)


def thing(words: str, cell: int) -> Thing:
    """ "large red circle" in one of the nine cells, counted by rows from 0."""
    size, colour, shape = words.split()
    return Thing(SHAPES.index(shape), COLOURS.index(colour), SIZES.index(size), cell, 0.0, 0.0)


def scene(background: str, *things: Thing) -> Scene:
    return Scene(BACKGROUNDS.index(background), things)


@dataclass(frozen=True)
class Card:
    """One picture of the sheet: its prompt, its references, and the prompt as the sheet shows it."""

    prompt: str
    references: tuple[Scene, ...] = ()
    label: str | None = None


ROOM = scene("sky blue", thing("large red circle", 3), thing("small yellow square", 8))
NIGHT = scene("black", thing("large orange triangle", 4))
ROWS: tuple[tuple[Card, ...], ...] = (
    (
        Card("a large red circle at the top left and a small blue square at the bottom right, on a pink background"),
        Card("a large yellow cross in the centre, on a brown background"),
        Card(
            "a small white triangle at the top, a large green square on the left and "
            "a small purple circle on the right, on a black background"
        ),
        Card(
            "天蓝色背景，中间有一个大橙色三角形，左下角有一个小黑色十字",
            label="(in Chinese) sky blue background, a large orange triangle in the centre, "
            "a small black cross at the bottom left",
        ),
        Card("a small orange circle at the top right and a large blue triangle at the bottom, on a grey background"),
        Card("a large purple cross on the right and a small green circle on the left, on a transparent background"),
    ),
    (
        Card("make the red circle green", (ROOM,)),
        Card("move the yellow square to the top right", (ROOM,)),
        Card("make the background transparent", (ROOM,)),
    ),
    (
        Card("the shapes of image 1 on the background of image 2", (ROOM, NIGHT)),
        Card("add the orange triangle of image 2 to image 1", (ROOM, NIGHT)),
    ),
)


def draw(reference: Scene) -> Image.Image:
    """An RGBA picture of a scene."""
    return to_picture(render(torch.tensor([scene_row(reference)]))[0])


def shown(picture: Image.Image) -> Image.Image:
    """Enlarged, with squares behind what is transparent."""
    large = picture.resize((SIDE, SIDE), Image.Resampling.LANCZOS)
    board = Image.new("RGB", (SIDE, SIDE), PAPER)
    pen = ImageDraw.Draw(board)
    for y in range(0, SIDE, 10):
        for x in range(y // 10 % 2 * 10, SIDE, 20):
            pen.rectangle((x, y, x + 9, y + 9), fill=FAINT)
    board.paste(large, mask=large.getchannel("A"))
    return board


def wrapped(text: str, width: int, font: ImageFont.ImageFont | ImageFont.FreeTypeFont) -> str:
    """``text`` in lines of at most ``width`` pixels."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return "\n".join(lines)


def mount(card: Card, picture: Image.Image) -> Image.Image:
    """References, an arrow and the result side by side, the prompt below; a lone picture has only its prompt."""
    pictures = [*(draw(reference) for reference in card.references), picture]
    width = len(pictures) * SIDE + (len(pictures) - 1) * 2 * GAP
    label = card.label or card.prompt
    font = ImageFont.load_default(FONT_SIZE if card.references else FONT_SIZE - 3)
    mounted = Image.new("RGB", (width, SIDE + TEXT_HEIGHT + (0 if card.references else 2 * FONT_SIZE)), PAPER)
    pen = ImageDraw.Draw(mounted)
    for i, each in enumerate(pictures):
        left = i * (SIDE + 2 * GAP)
        mounted.paste(shown(each), (left, 0))
        pen.rectangle((left, 0, left + SIDE - 1, SIDE - 1), outline=FAINT)
        if i + 1 < len(pictures):
            sign = "+" if i + 2 < len(pictures) else "="
            pen.text((left + SIDE + GAP, SIDE // 2), sign, fill=INK, font=ImageFont.load_default(26), anchor="mm")
    pen.multiline_text((0, SIDE + 6), wrapped(label, width, font), fill=INK, font=font, spacing=3)
    return mounted


def contact_sheet(rows: list[list[Image.Image]]) -> Image.Image:
    """Rows of mounted cards on one sheet."""
    width = max(sum(card.width for card in row) + GAP * 2 * (len(row) - 1) for row in rows) + 2 * GAP
    height = sum(max(card.height for card in row) for row in rows) + GAP * (len(rows) + 1)
    sheet = Image.new("RGB", (width, height), PAPER)
    top = GAP
    for row in rows:
        left = GAP
        for card in row:
            sheet.paste(card, (left, top))
            left += card.width + 2 * GAP
        top += max(card.height for card in row) + GAP
    return sheet


def main() -> None:
    parser = argparse.ArgumentParser(description="Paint a contact sheet with the pocket checkpoint.")
    parser.add_argument("--out", type=Path, default=Path("out/demo.png"))
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    started = time.perf_counter()
    pipeline = Pipeline.from_pretrained(CHECKPOINT)
    rows = []
    for cards in ROWS:
        row = []
        for card in cards:
            references = [draw(reference) for reference in card.references]
            painting = pipeline(card.prompt, references, seed=arguments.seed, progress=False)
            stats = painting.stats
            print(f"{card.prompt}\n    {sum(stats.seconds.values()):.2f} s, {stats.rows_reused} prefix rows reused")
            row.append(mount(card, painting.images[0]))
        rows.append(row)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    contact_sheet(rows).save(arguments.out)
    print(f"\n{arguments.out}  ({time.perf_counter() - started:.1f} s)")


if __name__ == "__main__":
    main()
