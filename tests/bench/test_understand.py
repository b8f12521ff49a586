"""The benchmark of understanding runs anywhere, and counts what it says it counts."""

import pytest
import torch

from underpaint.bench import scenes, understand
from underpaint.bench.measuring import Spread
from underpaint.models.neo_unify import Role, skeleton
from underpaint.models.random import random_neo


def test_it_measures_decode_and_prefill_on_a_cpu(seed: int) -> None:
    report = understand.understand("cpu", seed)
    decode, prefill = report.tables
    assert [row[0] for row in decode.rows] == list(understand.CPU_LOAD.batches)
    for row in decode.rows:
        cells = dict(zip(decode.columns, row, strict=True))
        turn = float(str(cells["turn, ms"]).split()[0])
        assert cells["tokens/s"] == pytest.approx(1e3 * float(cells["batch"]) / turn, rel=1e-2)
        assert cells["turn of limit"] == pytest.approx(float(cells["limit, ms"]) / turn, rel=1e-2)
    assert prefill.rows[0][0] == 4 * 4 + understand.CPU_LOAD.text_rows
    assert any("stand-in" in note for note in report.notes), "a small model's times must not look like the real one's"


def test_the_check_compares_with_the_plain_path(seed: int) -> None:
    table = understand.check("cpu", seed).tables[0]
    assert [row[-1] for row in table.rows] == ["ok"] * 3
    assert all(0 < float(row[2]) < 0.1 for row in table.rows), "bf16 was compared with itself, or with something else"


def test_a_step_reads_the_weights_of_the_released_size() -> None:
    """17.5 GB: 42 layers and the head; neither the embedding, of which a row is read, nor what only paints."""
    network = skeleton(scenes.NEO, frozenset({Role.UNDERSTAND})).to(torch.bfloat16)
    assert understand.weight_bytes(network) == pytest.approx(17.46e9, rel=0.01)


def test_random_models_are_loud_and_finite(seed: int) -> None:
    model = random_neo(scenes.SMALL_NEO, "cpu", torch.float32, seed)
    again = random_neo(scenes.SMALL_NEO, "cpu", torch.float32, seed)
    for (name, a), b in zip(model.network.named_parameters(), again.network.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.isfinite().all(), name
        assert a.abs().max() > 1e-3, name
    ids = model.tokenizer.tokenize("a <img> \u4e2d<|im_end|>")
    assert model.tokenizer.image_start in ids
    assert model.tokenizer.detokenize(ids) == "a  \u4e2d"


def test_a_spread_is_the_median_and_nine_tenths() -> None:
    spread = Spread.of([float(value) for value in range(101)][::-1])
    assert (spread.low, spread.median, spread.high) == (5.0, 50.0, 95.0)
