"""Paints a contact sheet: prompts, edits and transparency with the pocket Qwen-Image 2.1, and dialogues in text and
pictures with the pocket SenseNova-U1.

python -m pocket.demo [--out out/demo.png] [--seed 1]
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont

from pocket.scenes import BACKGROUNDS, COLOURS, SHAPES, SIZES, Scene, Thing, render, scene_row
from underpaint import Chat, PicturePart, Pipeline, TextPart
from underpaint.images import to_picture

QWEN_IMAGE, SENSENOVA = (Path(__file__).parent / name for name in ("qwen-image-2.1", "sensenova-u1"))
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

TALKS: tuple[tuple[str, ...], ...] = (
    (
        "draw a large red circle at the top left, on a sky blue background, then move it to the bottom right",
        "where is the red circle?",
    ),
    (
        "draw a large green square in the centre, on a white background",
        "make it orange",
        "what colour is the square?",
    ),
)
"""Dialogues, turn by turn."""


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


@dataclass(frozen=True)
class Line:
    """A line of a dialogue: who says it, what, and the picture that belongs to it."""

    speaker: str
    words: str
    picture: Image.Image | None = None


def talk(chat: Chat, turns: tuple[str, ...], seed: int) -> list[Line]:
    """Hold a dialogue: what was said and painted, in order."""
    lines = []
    for turn, prompt in enumerate(turns):
        lines.append(Line("you", prompt))
        words = ""
        message = [{"role": "user", "content": prompt}] if turn == 0 else prompt
        for part in chat.send(message, seed=seed + 10 * turn, max_tokens=64, max_pictures=2):
            if isinstance(part, TextPart) and not part.thought:
                words += part.text
            elif isinstance(part, PicturePart):
                lines.append(Line("model", words, part.image.convert("RGBA")))
                words = ""
        if words:
            lines.append(Line("model", words))
    return lines


def mount_talk(lines: list[Line]) -> Image.Image:
    """A dialogue from top to bottom: your words, and the model's with its pictures."""
    width, font = 3 * SIDE, ImageFont.load_default(FONT_SIZE)
    blocks = []
    for line in lines:
        words = wrapped(f"{line.speaker}: {line.words}", width - (SIDE + GAP if line.picture else 0), font)
        height = max((words.count("\n") + 1) * (FONT_SIZE + 5) + 6, SIDE + 8 if line.picture else 0)
        block = Image.new("RGB", (width, height), PAPER)
        pen = ImageDraw.Draw(block)
        left = 0
        if line.picture:
            block.paste(shown(line.picture), (0, 0))
            pen.rectangle((0, 0, SIDE - 1, SIDE - 1), outline=FAINT)
            left = SIDE + GAP
        pen.multiline_text((left, 0), words, fill=INK, font=font, spacing=3)
        blocks.append(block)
    mounted = Image.new("RGB", (width, sum(block.height for block in blocks)), PAPER)
    top = 0
    for block in blocks:
        mounted.paste(block, (0, top))
        top += block.height
    return mounted


def paint_rows(pipeline: Pipeline, seed: int) -> list[list[Image.Image]]:
    """The cards of `ROWS`, painted and mounted."""
    rows = []
    for cards in ROWS:
        row = []
        for card in cards:
            references = [draw(reference) for reference in card.references]
            painting = pipeline(card.prompt, references, seed=seed, progress=False)
            stats = painting.stats
            print(f"{card.prompt}\n    {sum(stats.seconds.values()):.2f} s, {stats.rows_reused} prefix rows reused")
            row.append(mount(card, painting.images[0]))
        rows.append(row)
    return rows


def talk_row(chat: Chat, seed: int) -> list[Image.Image]:
    """The dialogues of `TALKS`, held and mounted."""
    row = []
    for turns in TALKS:
        started = time.perf_counter()
        lines = talk(Chat(chat.service), turns, seed)
        for line in lines:
            print(f"{line.speaker}: {line.words}{' [picture]' if line.picture else ''}")
        print(f"    {time.perf_counter() - started:.2f} s")
        row.append(mount_talk(lines))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description="Paint a contact sheet with the pocket checkpoints.")
    parser.add_argument("--out", type=Path, default=Path("out/demo.png"))
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    started = time.perf_counter()
    rows = paint_rows(Pipeline.from_pretrained(QWEN_IMAGE), arguments.seed)
    rows.append(talk_row(Chat.from_pretrained(SENSENOVA), arguments.seed))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    contact_sheet(rows).save(arguments.out)
    print(f"\n{arguments.out}  ({time.perf_counter() - started:.1f} s)")


if __name__ == "__main__":
    main()
