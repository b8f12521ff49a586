"""The benchmark of whole pictures."""

from pathlib import Path

import pytest
from PIL import Image

from underpaint import Pipeline
from underpaint.bench.image import Wish, image, random_pipeline


@pytest.mark.parametrize("warm_up", [True, False])
def test_a_report(checkpoint: Path, warm_up: bool) -> None:
    """Every picture has its stages; after warm-up only the branches that it did not know are captured."""
    pipeline = Pipeline.from_pretrained(checkpoint, step_graphs="on", kv_cache_bytes=16 << 20)
    wish = Wish("the cat", (Image.new("RGB", (64, 64), "red"),), (64, 64), num_steps=2)
    report = image(pipeline, wish, 3, warm_up)
    rows = report.as_json()["tables"][0]["rows"]
    assert [row["picture"] for row in rows] == ["1", "2", "3"]
    for row in rows:
        stages = sum(row[stage] for stage in ("encode", "prefill", "denoise", "decode"))
        assert row["total"] == pytest.approx(stages)
        assert 0 < row["outside steps"] < 1
    captured = 0 if warm_up else 1
    assert f"in graphs {6 - captured}, captured {captured}, without 0" in report.notes[1]


def test_random_weights() -> None:
    report = image(random_pipeline("cpu", "fp8"), Wish("a", (), (64, 64), num_steps=1), 2, warm_up=True)
    assert "quantize fp8, 1 steps, 2 branches" in report.notes[1]
