"""The mixture of experts under Triton's interpreter, against the module."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from interpreter import interpreted, interpreter, tl  # noqa: F401 - the first is a fixture for all
from test_decode import TOLERANCE, difference

from underpaint.kernels.experts import FEW_PAIRS, combine, expert_linear, make_tiles, route
from underpaint.models.neo_unify.config import FeedForward
from underpaint.models.neo_unify.fused import FusedExperts
from underpaint.models.neo_unify.transformer import Experts


@pytest.fixture(autouse=True)
def seeded(seed: int) -> Iterator[None]:
    torch.manual_seed(seed)
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 9, 40])
@pytest.mark.parametrize("config", [FeedForward(48, 6, 2), FeedForward(33, 20, 5, renormalise=False)])
def test_experts(config: FeedForward, num_rows: int, dtype: torch.dtype) -> None:
    """Each pair a tile, and pairs sorted into tiles; experts that nobody chose, and one that all did."""
    module = Experts(64, config).to(dtype)
    for parameter in module.parameters():
        parameter.normal_(0, 3 * parameter.shape[-1] ** -0.5)
    module.gate.weight[1] = 0
    x = torch.randn(num_rows, 64).to(dtype)
    x[:, 0] = 1
    module.gate.weight[1, 0] = 50 if num_rows > 1 else -50
    want = module(x)
    fused = FusedExperts(module)
    assert difference(fused(x), want) < TOLERANCE[dtype] * 4
    assert difference(module(x), want) == 0, "the module no longer computes what it did"


def test_tiles_cover_every_pair_once() -> None:
    for num_rows in (13, 65, 200, 700):
        num_experts = 10
        chosen = torch.stack([torch.randperm(num_experts)[:5].sort().values for _ in range(num_rows)]).int()
        chosen[chosen == 3] = 4  # nobody's expert, and one chosen twice
        tiles = make_tiles(chosen, num_experts)
        assert num_rows * 5 > FEW_PAIRS
        assert tiles.order is not None
        assert tiles.bounds is not None
        covered = []
        for expert, start, stop in tiles.bounds.tolist():
            own = tiles.order[start:stop]
            assert stop - start <= tiles.rows
            assert (chosen.flatten()[own] == expert).all()
            covered += own.tolist()
        assert sorted(covered) == list(range(num_rows * 5))


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_rows_that_are_not_finite_go_to_experts_that_exist(broken: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card ``argmax`` combines by comparing, where NaN is neither less nor more; so it does here for once."""
    apply = interpreter.ReduceOps.apply_impl

    def reduce(self: Any, given: Any) -> Any:
        is_argmax = self.combine_fn == tl.standard._argmax_combine_tie_break_left
        return self.generic_reduce(given) if is_argmax else apply(self, given)

    monkeypatch.setattr(interpreter.ReduceOps, "apply_impl", reduce)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **kind: empty(*shape, **kind).fill_(99))  # whatever was there
    logits = torch.randn(3, 12)
    logits[1, 5] = broken
    chosen, weights = route(logits, 4, True)
    assert (chosen >= 0).all()
    assert (chosen.diff(dim=1) > 0).all()
    assert (chosen < 12).all()
    assert weights[1].isnan().all()
    assert weights[::2].isfinite().all()
    assert torch.equal(chosen[::2].long(), logits[::2].topk(4).indices.sort().values)


def test_weights_of_a_row_belong_to_its_experts_in_ascending_order() -> None:
    logits = torch.randn(30, 12) * 2
    for renormalise in (True, False):
        chosen, weights = route(logits, 4, renormalise)
        want, experts = logits.softmax(-1).topk(4)
        if renormalise:
            want = want / want.sum(-1, keepdim=True)
        experts, order = experts.sort(dim=-1)
        assert torch.equal(chosen.long(), experts)
        torch.testing.assert_close(weights, want.gather(1, order))


def test_a_row_does_not_depend_on_the_others() -> None:
    """To the bit, within tiles of one kind. Whole numbers, whose sums are exact in any order: the interpreter's
    products are NumPy's, which on some processors depend on where in a tile a row stands."""
    weight = torch.randint(-8, 9, (8, 32, 64)).float()
    x, logits = torch.randint(-8, 9, (60, 64)).float(), torch.randn(60, 8)
    results = []
    for rows in (torch.arange(60), torch.randperm(60)[:30].sort().values):
        chosen, weights = route(logits[rows], 3, True)
        out = expert_linear(x[rows], weight, make_tiles(chosen, 8), scale=weights)
        results.append(combine(out, len(rows)))
    assert torch.equal(results[0][rows], results[1])
