"""The checks of ``underpaint bench kernels``, on a CPU under Triton's interpreter: they pass, and they can fail."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from interpreter import interpreted  # noqa: F401 - a fixture for all

from underpaint.bench import kernels
from underpaint.kernels.quantised_rows import QuantisedRows

MAKERS: list[Callable[..., kernels.Case]] = [kernels._rms_case, kernels._modulate_case, kernels._swiglu_case]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    torch.manual_seed(seed)
    for name, value in {"DEVICE": "cpu", "DTYPE": torch.float16, "WIDTH": 64, "INNER": 96}.items():
        monkeypatch.setattr(kernels, name, value)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("quantised", [False, True])
def test_cases(make: Callable[..., kernels.Case], quantised: bool) -> None:
    """What is moved is what tensors hold: two inputs or a wide one, and what comes out."""
    case = make(6, quantised=quantised)
    assert case.check().startswith("ok")
    made: Any = case.call()
    outputs = made if isinstance(made, tuple) else (made,)
    written = sum(x.values.nbytes + x.scale.nbytes if isinstance(x, QuantisedRows) else x.nbytes for x in outputs)
    read = 6 * 2 * (kernels.INNER if make is kernels._swiglu_case else kernels.WIDTH) * 2
    assert case.moved == read + written
    assert case.name.endswith("e4m3") == quantised


@pytest.mark.parametrize(
    ("name", "make"),
    [*zip(("add_rms_norm_quantised", "gate_norm_modulate_quantised", "swiglu_quantised"), MAKERS, strict=True)],
)
def test_one_wrong_value_is_seen(name: str, make: Callable[..., kernels.Case], monkeypatch: pytest.MonkeyPatch) -> None:
    right: Callable[..., Any] = getattr(kernels, name)

    def wrong(*arguments: Any) -> Any:
        made = right(*arguments)
        rows = made[1] if isinstance(made, tuple) else made
        rows.code[2, 3] ^= 1
        return made

    monkeypatch.setattr(kernels, name, wrong)
    assert partial(make, quantised=True)(6).check() == "WRONG: 1 values differ"


def test_nan_is_wrong_in_whichever_result() -> None:
    right, broken = torch.ones(4), torch.full((4,), math.nan)
    assert kernels.verdict([right, right], [right, right], [right, right]).startswith("ok")
    for ours in ([broken, right], [right, broken]):
        assert kernels.verdict(ours, [right, right], [right, right]).startswith("WRONG")
