"""Every golden case in fp32 on the CPU, within 1e-5 of the largest value; see golden/README.md for what they are."""

import pytest
import torch

from neo_unify.cases import (
    TOLERANCE,
    VARIANTS,
    cases_of,
    difference,
    generator,
    golden,
    make_driver,
    options_of,
    text_of,
)
from underpaint.layout import neo_positions
from underpaint.models.neo_unify.flow import draw_noise, noise_scale
from underpaint.models.neo_unify.prompt import ask_text, interleaved_branches
from underpaint.models.neo_unify.vision import to_patches, to_pixels
from underpaint.sampling.guidance import Branch


@pytest.mark.parametrize(("variant", "name"), cases_of(("t2i", "it2i")))
def test_u38_painting_and_editing(variant: str, name: str) -> None:
    """Velocities of every branch, pixels at the end, and the times and places of all calls."""
    g = golden(variant)
    case, want = g.cases[name], {key: value for key, value in g.tensors.items() if key.startswith(f"{name}/")}
    options = options_of(case)
    driver, pool = make_driver(g.model)
    with driver.prefill(g.passages(case), options.sampler.every_branch, case.get("max_think_tokens")) as readings:
        conditional = readings[Branch.CONDITIONAL].passage.layout
        index = neo_positions(conditional.with_image(options.grid))[conditional.num_rows :]
        assert torch.equal(index.T, want[f"{name}/first_image_index"])
        if f"{name}/v" in want:
            scale = noise_scale(g.model.config.flow, options.grid)
            noise = draw_noise(generator(case["seed"]), options.grid, scale, torch.float32)
            velocities = driver.velocities(readings, noise, options.grid, options.sampler.times[0])
            assert len(velocities) == len(want[f"{name}/v"])
            for ours, theirs in zip(velocities.values(), want[f"{name}/v"][:, 0], strict=True):
                assert difference(ours, theirs) < TOLERANCE
        cells = driver.paint(readings, options, generator(case["seed"]))
    assert difference(to_pixels(cells, options.grid), want[f"{name}/image"][0]) < TOLERANCE
    sampler = options.sampler
    calls = [float(sampler.level(step)) for step in range(sampler.num_steps) for _ in sampler.branches(step)]
    assert calls == pytest.approx(want[f"{name}/t"].flatten().tolist(), abs=1e-7)
    assert pool.num_free == pool.num_pages


@pytest.mark.parametrize("variant", VARIANTS)
def test_question(variant: str) -> None:
    """Pixels, tokens and positions going in; keys, values and logits of the prefill; 16 greedy tokens."""
    g = golden(variant)
    case, want, tokenizer = g.cases["vqa"], g.tensors, g.model.tokenizer
    picture = g.model.question_picture(g.image(case["image"]))
    height, width = picture.grid
    rows = to_patches(picture.cells).reshape(height, width, 2, 2, -1).transpose(1, 2).reshape(4 * height * width, -1)
    assert (2 * height, 2 * width) == tuple(want["vqa/grid_hw"][0].tolist())
    assert difference(rows[::37], want["vqa/pixel_values_every_37th"]) < 1e-6
    passage = tokenizer.passage(ask_text(case["question"], 1), [picture])
    before, after = (text_of(part) for part in (passage.parts[0], passage.parts[-1]))
    context = tokenizer.tokenize("<IMG_CONTEXT>") * (height * width)
    assert (*before, *context, *after) == tuple(want["vqa/input_ids"][0].tolist())
    assert torch.equal(neo_positions(passage.layout).T, want["vqa/indexes"])
    driver, _ = make_driver(g.model)
    with driver.open(passage) as reading:
        driver.read(reading)
        for layer in range(g.model.cache_shape.num_layers):
            k, v = reading.view().read(layer)
            assert difference(k.transpose(0, 1), want[f"vqa/k{layer}"][0]) < TOLERANCE
            assert difference(v.transpose(0, 1), want[f"vqa/v{layer}"][0]) < TOLERANCE
        answer = driver.decode(reading, 17, (tokenizer.turn_stop,))
    assert answer.ids[:16] == want["vqa/greedy_ids"].tolist()
    logits = torch.stack(answer.logits)
    assert difference(logits[0], want["vqa/logits_last"][0]) < TOLERANCE
    assert difference(logits[1:], want["vqa/greedy_logits"]) < TOLERANCE


@pytest.mark.parametrize(("variant", "name"), cases_of(("interleave",)))
def test_interleaved_answer(variant: str, name: str) -> None:
    """Text, a picture, text, a picture: every picture is read back from its tensor, and token ids are never remade."""
    g = golden(variant)
    case, tokenizer = g.cases[name], g.model.tokenizer
    passages = interleaved_branches(tokenizer, case["prompt"], g.references(case), case["system_message"])
    paintings = [options_of(case, tuple(size)) for size in case["image_size"]]
    forced = g.tensors[f"{name}/forced_ids"].tolist()
    driver, pool = make_driver(g.model)
    answer = driver.interleave(passages, paintings, generator(case["seed"]), len(forced), forced)
    assert answer.ids == forced
    assert difference(torch.stack(answer.logits), g.tensors[f"{name}/logits"]) < TOLERANCE
    assert len(answer.pictures) == 2
    for i, (cells, grid) in enumerate(answer.pictures):
        assert difference(to_pixels(cells, grid), g.tensors[f"{name}/image{i}"][0]) < TOLERANCE
    assert pool.num_free == pool.num_pages


@pytest.mark.parametrize("variant", VARIANTS)
def test_thought(variant: str) -> None:
    """The model closes its thought, or ends its turn, which then does not go into the picture's prefix."""
    g = golden(variant)
    case, tokenizer = g.cases["t2i_think"], g.model.tokenizer
    driver, _ = make_driver(g.model)
    with driver.open(g.passages(case)[Branch.CONDITIONAL]) as reading:
        driver.read(reading)
        thought = driver.think(reading, case["max_think_tokens"])
        ids = text_of(reading.passage.parts[0])
    assert thought[-1] in (tokenizer.think_stop, tokenizer.turn_stop)
    assert tokenizer.turn_stop not in ids[-len(thought) :]
    assert tokenizer.detokenize(thought).strip() == case["think_text"].replace("</think>", "").strip()
