"""The pocket SenseNova-U1 in the repository: its layout and size, and a dialogue in text and pictures that is right."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import PreTrainedTokenizerFast

import pocket
from pocket.build_neo import POCKET, build_neo_tokenizer, build_network, config_values, neo_config
from pocket.demo import scene, thing
from pocket.evaluate_neo import text_of
from pocket.scoreboard import judge, picture
from underpaint import Chat, PicturePart, Pipeline

CHECKPOINT = Path(pocket.__file__).parent / "sensenova-u1"
MAX_BYTES = 25_000_000


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat.from_pretrained(CHECKPOINT)


def test_size() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT.rglob("*") if path.is_file()) <= MAX_BYTES


def test_own_settings() -> None:
    settings = json.loads((CHECKPOINT / "underpaint.json").read_text())
    assert settings == {
        "reference_resolution": 128, "num_inference_steps": 20, "page_rows": 16, "guidance_scale": 1.0,
    }  # fmt: skip


def test_the_config_and_the_tokenizer_are_those_that_the_code_makes() -> None:
    saved, built = PreTrainedTokenizerFast.from_pretrained(CHECKPOINT), build_neo_tokenizer()
    assert saved.get_vocab() == built.get_vocab()
    assert json.loads((CHECKPOINT / "config.json").read_text()) == config_values(POCKET, len(built), built.eos_token_id)


def test_every_tensor_has_its_released_name_and_is_trained() -> None:
    index = json.loads((CHECKPOINT / "model.safetensors.index.json").read_text())
    tokenizer = build_neo_tokenizer()
    fresh = build_network(neo_config(config_values(POCKET, len(tokenizer), tokenizer.eos_token_id)), 0).state_dict()
    assert index["weight_map"].keys() == fresh.keys()
    for name in sorted(set(index["weight_map"].values())):
        with safe_open(CHECKPOINT / name, framework="pt") as shard:
            for key in shard.keys():  # noqa: SIM118 - not a mapping
                tensor = shard.get_tensor(key)
                assert tensor.shape == fresh[key].shape
                assert tensor.dtype == torch.bfloat16
                assert tensor.isfinite().all()


def test_a_dialogue_in_text_and_pictures(chat: Chat) -> None:
    prompt = "draw a large red circle at the top left, on a sky blue background, then move it to the bottom right"
    parts = list(chat.send([{"role": "user", "content": prompt}], seed=1, max_tokens=64))
    pictures = [part for part in parts if isinstance(part, PicturePart)]
    expected = [scene("sky blue", thing("large red circle", cell)) for cell in (0, 8)]
    assert [judge(part.image, shown).problems for part, shown in zip(pictures, expected, strict=True)] == [(), ()]
    assert text_of(list(chat.send("where is the red circle?", seed=2, max_pictures=0))) == "the bottom right"


def test_it_paints_and_edits(chat: Chat) -> None:
    pipeline = Pipeline(chat.service)
    painted = pipeline("a large yellow cross in the centre, on a brown background", seed=3, progress=False).images[0]
    assert judge(painted, scene("brown", thing("large yellow cross", 4))).ok
    room = scene("sky blue", thing("large red circle", 3), thing("small yellow square", 8))
    edited = pipeline("make the red circle green", [picture(room)], seed=3, progress=False).images[0]
    assert judge(edited, scene("sky blue", thing("large green circle", 3), thing("small yellow square", 8))).ok


def test_a_dialogue_sent_as_messages(chat: Chat) -> None:
    """What an answer painted is read back at its own size, not enlarged as a reference is."""
    ask = {"role": "user", "content": "draw a large green square in the centre, on a white background"}
    told = list(Chat(chat.service).send([ask], seed=1, max_tokens=64))
    painted = [part.image for part in told if isinstance(part, PicturePart)]
    words = "".join("<image>" if isinstance(part, PicturePart) else part.text for part in told)  # type: ignore[union-attr]
    history = [ask, {"role": "assistant", "content": words}]
    again = list(Chat(chat.service).send([*history, {"role": "user", "content": "make it orange"}], painted, seed=2))
    (second,) = [part.image for part in again if isinstance(part, PicturePart)]
    assert judge(second, scene("white", thing("large orange square", 4))).ok
    assert text_of(again) == "now the square is orange:done"
