"""Questions, dialogues and sequences: deterministic, on their side of the split, and in the engine's own words."""

import random
from pathlib import Path

import pytest
import torch
from neo_cases import context_of, export_loud, flat_ids, line_ids, make_stage, passage_of, pictures_read

from pocket.captions import CELLS_EN, CELLS_ZH, COLOURS_EN, COLOURS_ZH, SHAPES_EN, SHAPES_ZH
from pocket.dialogues import DIALOGUE_KINDS, draw_dialogue
from pocket.neo_model import places_of
from pocket.neo_pool import TASKS, NeoTask, draw_neo_example, make_lines, mistaken_rows, scene_rows
from pocket.neo_stage import NeoStage
from pocket.questions import NUMBERS_EN, NUMBERS_ZH, QUESTION_KINDS, Question, draw_question, is_right
from pocket.scenes import ROW_WIDTH, TRANSPARENT, Split, belongs
from pocket.scoreboard import picture
from underpaint import Chat, PaintingOptions
from underpaint.layout import neo_positions
from underpaint.models.neo_unify.prompt import IMAGE_START, PromptTokenizer, painting_branches
from underpaint.sampling.guidance import Branch

SPLITS: tuple[Split, ...] = ("train", "held_out")
CHAT_TASKS = tuple(task for task in TASKS if task.talks)
PAINTING_TASKS = tuple(task for task in TASKS if task.has_system)


@pytest.fixture(scope="module")
def stage() -> NeoStage:
    return make_stage(tuple(task.name for task in TASKS))


@pytest.fixture(scope="module")
def chat(stage: NeoStage, tmp_path_factory: pytest.TempPathFactory) -> Chat:
    root = tmp_path_factory.mktemp("neo")
    export_loud(stage, root)
    return Chat.from_pretrained(root, device="cpu", kv_cache_bytes=64 << 20)


def questions(kind: str, count: int, split: Split = "train") -> list[Question]:
    rng = random.Random(5)
    return [draw_question(rng, split, kind) for _ in range(count)]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
@pytest.mark.parametrize("split", SPLITS)
def test_examples_are_deterministic_opaque_and_on_their_side(task: NeoTask, split: Split) -> None:
    drawn, again = ([draw_neo_example(random.Random(i), split, task) for i in range(60)] for _ in range(2))
    assert drawn == again
    scenes = [scene for example in drawn for scene in example.scenes]
    assert all(belongs(scene, split) and scene.background != TRANSPARENT for scene in scenes)


@pytest.mark.parametrize("kind", QUESTION_KINDS)
def test_answers_are_true(kind: str) -> None:
    """Each answer is read off the scene here in another way than by the module."""
    tables = {"shape": (SHAPES_EN, SHAPES_ZH), "colour": (COLOURS_EN, COLOURS_ZH), "where": (CELLS_EN, CELLS_ZH)}
    texts = set()
    for question in questions(kind, 300):
        texts.add(question.text)
        things = question.scene.things
        if kind == "count":
            for table in ((SHAPES_EN, COLOURS_EN, NUMBERS_EN), (SHAPES_ZH, COLOURS_ZH, NUMBERS_ZH)):
                named = [t for t in things if table[0][t.shape] in question.text or table[1][t.colour] in question.text]
                whole = not any(word in question.text for word in (*table[0], *table[1]))
                if question.answer in table[2]:
                    assert question.answer == table[2][len(things) if whole else len(named)]
            continue
        attribute = {"shape": "shape", "colour": "colour", "where": "cell"}[kind]
        words = next(words for words in tables[kind] if question.answer in words)
        assert question.answer in {words[getattr(thing, attribute)] for thing in things}
    assert len(texts) > 10
    assert any(text.isascii() for text in texts)
    assert not all(text.isascii() for text in texts)


def test_descriptions_name_everything() -> None:
    for question in questions("describe", 100):
        things = question.scene.things
        english = question.answer.isascii()
        shapes, colours, cells = (SHAPES_EN, COLOURS_EN, CELLS_EN) if english else (SHAPES_ZH, COLOURS_ZH, CELLS_ZH)
        pieces = question.answer.split(", " if english else "，")
        assert len(pieces) == len(things)
        for thing in things:
            words = (shapes[thing.shape], colours[thing.colour], cells[thing.cell])
            assert any(all(word in piece for word in words) for piece in pieces)


def test_the_judge_is_strict() -> None:
    question = next(q for q in questions("where", 50) if q.answer == "the top left")
    assert all(is_right(text, question) for text in ("the top left", " The top left.\n"))
    wrong = ("", "the top", "top left", "the top left or right", "left", "the top left the top left")
    assert not any(is_right(text, question) for text in wrong)


@pytest.mark.parametrize("kind", DIALOGUE_KINDS)
def test_dialogues_paint_twice_and_end_turns(kind: str) -> None:
    rng = random.Random(3)
    for _ in range(100):
        dialogue = draw_dialogue(rng, "train", kind)
        assert len(dialogue.prompts) == len(dialogue.answers) == {"then": 1, "turns": 2, "ask": 3}[kind]
        assert sum(answer.count(IMAGE_START) for answer in dialogue.answers) == len(dialogue.scenes) == 2
        assert dialogue.scenes[0] != dialogue.scenes[1]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_sequences_fit_and_stand_as_in_the_engine(task: NeoTask, stage: NeoStage) -> None:
    """Positions, masks and cells derived on the device equal the layout of the same passage."""
    context = context_of(stage)
    rng = random.Random(9)
    examples = [draw_neo_example(rng, "train", task, dropped=i % 3 == 2) for i in range(40)]
    lines = make_lines(stage.tokenizer, task, [e.script for e in examples])
    places = places_of(lines.ids.long(), context, task.grid)
    for index, example in enumerate(examples[:6]):
        num_rows = int((lines.ids[index] != stage.tokenizer.pad_token_id).sum())
        ids = line_ids(stage, lines.ids[index], False, num_rows)
        layout = passage_of(ids, context, pictures_read(task, example)).layout
        assert layout.num_rows == num_rows
        torch.testing.assert_close(places.positions[index, :num_rows], neo_positions(layout))
        assert places.visible_stop[index, :num_rows].tolist() == layout.visible_stop().tolist()
        assert int(places.is_cell[index].sum()) == len(task.reads) * task.grid[0] * task.grid[1]


@pytest.mark.parametrize("task", PAINTING_TASKS, ids=lambda task: task.name)
def test_paintings_read_what_the_pipeline_reads(task: NeoTask, stage: NeoStage) -> None:
    tokenizer = PromptTokenizer(stage.tokenizer, 8192)
    context = context_of(stage)
    for seed in range(6):
        for dropped in (False, True):
            example = draw_neo_example(random.Random(seed), "train", task, dropped)
            lines = make_lines(stage.tokenizer, task, [example.script])
            stop = int(lines.stops[0, -1])
            assert bool(lines.system[0]) is not dropped
            prompt = example.script[0][0].split("user\n")[-1].split("<|im_end|>")[0].split("\n", len(task.reads))[-1]
            branch = Branch.PICTURES if dropped else Branch.CONDITIONAL
            passage = painting_branches(tokenizer, prompt, pictures_read(task, example))[branch]
            assert line_ids(stage, lines.ids[0], not dropped, stop) == flat_ids(passage, context)


@pytest.mark.parametrize("task", CHAT_TASKS, ids=lambda task: task.name)
def test_dialogues_are_what_the_chat_writes(task: NeoTask, stage: NeoStage, chat: Chat) -> None:
    """The chat is forced to the script's words; then its whole dialogue must be the training sequence."""
    tokenizer, context = chat.service.neo.tokenizer, context_of(stage)
    for seed in range(6):
        example = draw_neo_example(random.Random(seed), "train", task)
        lines = make_lines(stage.tokenizer, task, [example.script])
        users = [text for text, spoken in example.script if not spoken and "user\n" in text]
        said = ["".join(t for t, spoken in example.script if spoken)]
        if len(users) > 1:
            said = [f"{part}<|im_end|>" for part in said[0].split("<|im_end|>")[:-1]]
        for turn, (user, answer) in enumerate(zip(users, said, strict=True)):
            prompt = user.split("user\n")[1].split("<|im_end|>")[0].removeprefix("<image>\n")
            images = [picture(example.scenes[0])] if "<image>" in user else []
            forced = tokenizer.tokenize(answer)
            pictures = 0 if task.name == "answer" else 2
            options = PaintingOptions(num_inference_steps=1, guidance_scale=1.0) if pictures else None
            message = [{"role": "user", "content": prompt}] if turn == 0 else prompt
            parts = chat.send(
                message, images, forced_ids=forced, max_tokens=len(forced), painting=options, max_pictures=pictures
            )
            list(parts)
            assert chat.finish == "stop"
        assert chat._dialogue is not None
        ids = flat_ids(chat._dialogue.passage, context)
        assert lines.ids[0, : len(ids)].tolist() == ids
        assert lines.ids[0, len(ids)] == tokenizer.turn_stop
        spoken = lines.ids[0][lines.spoken[0]].tolist()
        assert spoken == [token for answer in said for token in tokenizer.tokenize(answer)]


def test_tokenizer_has_the_released_special_tokens(stage: NeoStage, tmp_path: Path) -> None:
    PromptTokenizer(stage.tokenizer, 100)  # raises for a missing one
    words = [*COLOURS_ZH, *SHAPES_ZH, *CELLS_ZH, *(f" {word}" for word in (*COLOURS_EN, *SHAPES_EN))]
    assert all(len(stage.tokenizer(word).input_ids) == 1 for word in words)


@pytest.mark.parametrize("task", [task for task in TASKS if task.paints], ids=lambda task: task.name)
def test_mistaken_pictures_differ_in_shape_and_at_times_in_colour(task: NeoTask) -> None:
    """In nothing else; and without text, which would tell of the mistake, in nothing."""
    rng = random.Random(2)
    shape, colour = (torch.arange(ROW_WIDTH) % 5 == i for i in (1, 2))
    for dropped in (False, True):
        examples = [draw_neo_example(rng, "train", task, dropped) for _ in range(30)]
        true = scene_rows(task, examples)[:, list(task.paints)]
        mistaken = mistaken_rows(rng, task, examples)
        there = true[..., 5::5] > 0  # the radius
        assert torch.equal(true[..., ~(shape | colour)], mistaken[..., ~(shape | colour)])
        assert torch.equal(true[..., shape] != mistaken[..., shape], there & (not dropped))
        recoloured = true[..., colour] != mistaken[..., colour]
        assert not (recoloured & ~there).any()
        share = recoloured.sum() / there.sum()
        assert share == 0 if dropped else 0.2 < share < 0.8
