"""What the pocket SenseNova-U1 is judged by: answers, pictures, edits, and dialogues with two pictures."""

import random
from dataclasses import dataclass

from pocket.dialogues import DIALOGUE_KINDS, Dialogue, draw_dialogue, draw_opaque
from pocket.questions import QUESTION_KINDS, Question, draw_question, is_right
from pocket.scoreboard import Goal, Tally, judge, paint, picture
from pocket.tasks import KINDS
from underpaint import Chat, PaintingOptions, PicturePart, Pipeline, TextPart
from underpaint.chat import Part
from underpaint.service import Service

ANSWER_TOKENS = 16  # of a question; the longest right answer has fewer
TURN_TOKENS = 64  # of a turn with pictures


@dataclass(frozen=True)
class Examination:
    """Both faces of one loaded checkpoint, and the scale of guidance (None: the checkpoint's own)."""

    service: Service
    seed: int
    guidance: float | None = None

    def goals(self) -> tuple[Goal, ...]:
        return (
            Goal("answer", QUESTION_KINDS, 0.34, 0.95, self.ask),
            Goal("text to image", KINDS[0], 0.2, 0.95, self.paint),
            Goal("edit, one reference", KINDS[1], 0.2, 0.90, self.paint),
            Goal("edit, two references", KINDS[2], 0.13, 0.80, self.paint),
            Goal("dialogue, both pictures", DIALOGUE_KINDS, 0.13, 0.85, self.talk),
        )

    def ask(self, kinds: list[str], rng: random.Random, tally: Tally) -> None:
        """Questions, each in a dialogue of its own."""
        for kind in kinds:
            question: Question = draw_question(rng, "held_out", kind)
            message = [{"role": "user", "content": question.text}]
            chat = Chat(self.service)
            parts = chat.send(message, [picture(question.scene)], max_pictures=0, max_tokens=ANSWER_TOKENS)
            answer = text_of(list(parts))
            problems = [] if is_right(answer, question) else [f"{answer!r}, not {question.answer!r}"]
            tally.add(kind, question.text, problems)

    def paint(self, kinds: list[str], rng: random.Random, tally: Tally) -> None:
        """Paintings and edits."""
        examples = [draw_opaque(rng, "held_out", kind) for kind in kinds]
        painted = paint(Pipeline(self.service), examples, self.seed, guidance_scale=self.guidance)
        for example, image in zip(examples, painted, strict=True):
            tally.add_picture(example.kind, example.prompt, judge(image, example.target))

    def talk(self, kinds: list[str], rng: random.Random, tally: Tally) -> None:
        """Dialogues in one, two or three turns; right if each picture comes when asked for and shows it."""
        options = PaintingOptions(guidance_scale=self.guidance)
        for number, kind in enumerate(kinds):
            dialogue: Dialogue = draw_dialogue(rng, "held_out", kind)
            chat = Chat(self.service)
            pictures: list[PicturePart] = []
            for turn, (prompt, answer) in enumerate(zip(dialogue.prompts, dialogue.answers, strict=True)):
                message = [{"role": "user", "content": prompt}] if turn == 0 else prompt
                seed = self.seed + 10 * number + turn
                parts = list(chat.send(message, painting=options, seed=seed, max_tokens=TURN_TOKENS, max_pictures=2))
                pictures += [part for part in parts if isinstance(part, PicturePart)]
                if turn == len(dialogue.scenes) and text_of(parts) != answer:
                    # The question that follows the pictures is beside the point of this score.
                    wrong = f"{prompt!r}: {text_of(parts)!r}, not {answer!r} (does not count)"
                    tally.failures.append(f"    {kind}: {wrong}")
            tally.add(kind, " / ".join(dialogue.prompts), picture_problems(pictures, dialogue))


def picture_problems(pictures: list[PicturePart], dialogue: Dialogue) -> list[str]:
    """What is wrong with the pictures of a dialogue, in words."""
    problems = []
    if len(pictures) != len(dialogue.scenes):
        problems.append(f"{len(pictures)} pictures, expected {len(dialogue.scenes)}")
    for index, (part, scene) in enumerate(zip(pictures, dialogue.scenes, strict=False)):
        problems += [f"picture {index + 1}: {problem}" for problem in judge(part.image, scene).problems]
    return problems


def text_of(parts: list[Part]) -> str:
    """The words of an answer."""
    return "".join(part.text for part in parts if isinstance(part, TextPart) and not part.thought)
