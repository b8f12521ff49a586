"""A checkpoint of random weights is one: it is inspected, loaded, talks, and says what was written."""

import json
from pathlib import Path

import pytest
import torch
from disk import full_disk

from underpaint import Chat
from underpaint.bench.scenes import NEO, SMALL_NEO
from underpaint.config import EngineConfig, resolve
from underpaint.errors import BadParameter
from underpaint.models import registry
from underpaint.models.neo_unify import NeoUnify
from underpaint.models.neo_unify.config import NeoConfig, config_values, read_neo_config
from underpaint.models.neo_unify.prompt import TURN_STOP
from underpaint.models.random import byte_tokenizer, random_neo_network, write_random_neo
from underpaint.service import Service


@pytest.mark.parametrize("config", [NEO, SMALL_NEO])
def test_a_config_reads_as_it_was_written(config: NeoConfig, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_values(config)))
    assert read_neo_config(tmp_path / "config.json", config.head_width) == config


def test_what_was_written_is_loaded_and_talks(tmp_path: Path) -> None:
    out = tmp_path / "random"
    write_random_neo(SMALL_NEO, out, "cpu", seed=3)
    expected = random_neo_network(SMALL_NEO, "cpu", torch.bfloat16, seed=3).state_dict()
    config = resolve(EngineConfig(device="cpu", dtype="float32"))
    model = registry.load(out, config)
    assert isinstance(model, NeoUnify)
    loaded = model.network.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name].float()) for name in expected)
    parts = list(Chat(Service(model, config)).send("hello", max_tokens=5, max_pictures=0, seed=1))
    assert parts
    with pytest.raises(BadParameter, match="exists"):
        write_random_neo(SMALL_NEO, out, "cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["random"]


def test_a_full_disk_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    with full_disk(1 << 16), pytest.raises(BadParameter, match="cannot be written"):
        write_random_neo(SMALL_NEO, tmp_path / "random", "cpu")
    assert list(tmp_path.iterdir()) == []


def test_every_token_is_text() -> None:
    """So that an answer of random weights comes token by token; what is read is bytes and special tokens as ever."""
    vocab_size = 5000
    tokenizer = byte_tokenizer(vocab_size)
    assert len(tokenizer) == vocab_size
    texts = [tokenizer.decode([i]) for i in range(256, vocab_size)]
    assert all(texts)
    assert len(set(texts)) == len(texts)
    assert tokenizer.decode([300, 301]) == " 300 301"
    assert max(tokenizer("a 300 b")["input_ids"]) < 256
    (stop,) = tokenizer(TURN_STOP)["input_ids"]
    assert stop >= vocab_size - 7
