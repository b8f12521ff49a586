"""Which of several cards a model is on."""

from typing import Any

import pytest
import torch

from underpaint import pipeline
from underpaint.config import EngineConfig
from underpaint.devices import is_lost
from underpaint.errors import EngineFailure


@pytest.mark.parametrize(("device", "settled"), [("auto", "cuda:1"), ("cuda", "cuda:1"), ("cuda:0", "cuda:0")])
def test_a_model_stays_on_the_card_that_it_was_loaded_on(
    monkeypatch: pytest.MonkeyPatch, device: str, settled: str
) -> None:
    """``torch.cuda.set_device`` is for one thread: in others ``cuda`` is another card, on which none of the weights
    are."""
    current, seen = 1, list[str]()

    def load(_: Any, config: EngineConfig) -> None:
        seen.append(config.device)

    for name, value in (("is_available", True), ("device_count", 2), ("current_device", current)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(pipeline.registry, "load", load)
    monkeypatch.setattr(pipeline, "locate", lambda path: path)
    monkeypatch.setattr(pipeline, "Service", lambda _, config: seen.append(config.device))
    pipeline.load_service("a checkpoint", {"device": device})
    assert seen == [settled, settled]


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("CUDA error: an illegal memory access was encountered", True),
        ("Triton Error [CUDA]: device-side assert triggered", True),
        ("CUDA error: unspecified launch failure", True),
        ("CUDA out of memory. Tried to allocate 20.00 MiB", False),
        ("CUDA error: operation not permitted when stream is capturing", False),
    ],
)
def test_errors_after_which_cuda_does_nothing_more(text: str, lost: bool) -> None:
    """By their cause: what another process tells of its own device says nothing of this one's."""
    told = EngineFailure(f"the pass broke: {text}")
    assert not is_lost(told)
    told.__cause__ = RuntimeError(text)
    assert is_lost(told) == lost
