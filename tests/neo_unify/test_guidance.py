"""Which branches a step needs, and the formulas, written out once more."""

import math

import pytest
import torch
from torch import Tensor

from neo_unify.cases import generator, golden, make_driver, options_of
from underpaint.errors import BadParameter, MissingBranch
from underpaint.models.neo_unify import EditGuidance, FlowSampler, PaintGuidance
from underpaint.models.neo_unify.guidance import NORMS, Norm
from underpaint.sampling.guidance import Branch, Guidance

COND, PICS, NONE = Branch.CONDITIONAL, Branch.PICTURES, Branch.UNCONDITIONAL


@pytest.fixture
def velocities() -> dict[Branch, Tensor]:
    return {branch: torch.randn(5, 12, generator=generator(i)) for i, branch in enumerate(Branch)}


@pytest.mark.parametrize(
    ("guidance", "time", "branches"),
    [
        (PaintGuidance(1.0), 0.5, (COND,)),
        (PaintGuidance(0.0), 0.5, (COND,)),
        (PaintGuidance(4.0), 0.0, (COND, NONE)),
        (PaintGuidance(4.0, interval=(0.1, 0.6)), 0.1, (COND, NONE)),
        (PaintGuidance(4.0, interval=(0.1, 0.6)), 0.6, (COND, NONE)),
        (PaintGuidance(4.0, interval=(0.1, 0.6)), 0.61, (COND,)),
        (EditGuidance(1.0, 1.0), 0.5, (COND,)),
        (EditGuidance(4.0, 1.0), 0.5, (COND, PICS)),
        (EditGuidance(4.0, 4.0), 0.5, (COND, NONE)),
        (EditGuidance(4.0, 1.5), 0.5, (COND, PICS, NONE)),
        (EditGuidance(4.0, 1.0, interval=(0.1, 0.6)), 0.1, (COND,)),
        (EditGuidance(4.0, 1.0, interval=(0.1, 0.6)), 0.2, (COND, PICS)),
        (EditGuidance(4.0, 1.0, interval=(0.0, 0.1)), 0.9, (COND, PICS)),
    ],
)
def test_branches(guidance: Guidance, time: float, branches: tuple[Branch, ...]) -> None:
    assert guidance.branches(time) == branches


def test_u11_only_the_branches_needed_are_prefilled() -> None:
    times = torch.tensor([0.0, 0.1, 0.25, 0.5, 1.0])
    assert FlowSampler(times, PaintGuidance(1.0)).every_branch == (COND,)
    assert FlowSampler(times, PaintGuidance(4.0, interval=(0.6, 1.0))).every_branch == (COND,)
    assert FlowSampler(times, EditGuidance(4.0, 1.5)).every_branch == tuple(Branch)
    g = golden("dense")
    case = g.cases["t2i_none_1"]
    driver, _ = make_driver(g.model)
    with driver.prefill(g.passages(case), options_of(case).sampler.every_branch) as readings:
        assert list(readings) == [COND]


@pytest.mark.parametrize("missing", [PICS, NONE])
def test_u18_s45_a_missing_branch_is_an_error(missing: Branch, velocities: dict[Branch, Tensor]) -> None:
    del velocities[missing]
    with pytest.raises(MissingBranch, match=f"the {missing.value} branch is missing"):
        EditGuidance(4.0, 1.5).combine(velocities, 0.5, 1)


def test_u18_s45_a_missing_prefix_is_an_error() -> None:
    """Not a picture that ignores the prompt: before, between and after prefill."""
    g = golden("dense")
    case = g.cases["t2i_none_4"]
    options = options_of(case)
    driver, pool = make_driver(g.model)
    passages = g.passages(case)
    with driver.prefill(passages, (COND,)) as readings, pytest.raises(MissingBranch):
        driver.paint(readings, options, generator(0))
    del passages[NONE]
    with pytest.raises(MissingBranch), driver.prefill(passages, options.sampler.every_branch):
        pass
    assert pool.num_free == pool.num_pages


def test_formulas(velocities: dict[Branch, Tensor]) -> None:
    c, p, n = velocities.values()
    expected: list[tuple[Guidance, Tensor]] = [
        (PaintGuidance(1.0), c),
        (PaintGuidance(3.0), n + 3 * (c - n)),
        (EditGuidance(1.0, 1.0), c),
        (EditGuidance(3.0, 1.0), p + 3 * (c - p)),
        (EditGuidance(3.0, 3.0), n + 3 * (c - n)),
        (EditGuidance(3.0, 1.5), n + 3 * (c - p) + 1.5 * (p - n)),
        (EditGuidance(0.0, 1.0), p),
    ]
    for guidance, want in expected:
        torch.testing.assert_close(guidance.combine(velocities, 0.5, 1), want)


@pytest.mark.parametrize("guidance", [PaintGuidance(4.0), EditGuidance(4.0, 1.0), EditGuidance(4.0, 1.5)])
def test_norms(guidance: PaintGuidance | EditGuidance, velocities: dict[Branch, Tensor]) -> None:
    """Never longer than the conditional velocity, in the direction of plain guidance: as a whole, or cell by cell."""
    conditional = velocities[COND]
    plain = guidance.combine(velocities, 0.5, 1)
    whole = with_norm(guidance, "global").combine(velocities, 0.5, 1)
    torch.testing.assert_close(whole, plain * (conditional.norm() / plain.norm()))
    cells = with_norm(guidance, "channel").combine(velocities, 0.5, 1)
    limits = (conditional.norm(dim=-1) / plain.norm(dim=-1)).clamp(max=1.0)
    torch.testing.assert_close(cells, plain * limits[:, None])


def with_norm(guidance: PaintGuidance | EditGuidance, norm: Norm) -> Guidance:
    if isinstance(guidance, PaintGuidance):
        return PaintGuidance(guidance.scale, norm)
    return EditGuidance(guidance.scale, guidance.picture_scale, norm)


def test_norms_never_lengthen() -> None:
    pair = {COND: torch.ones(2, 3), NONE: 0.9 * torch.ones(2, 3)}
    shorter = {COND: torch.ones(2, 3), NONE: 1.2 * torch.ones(2, 3)}
    for norm in ("global", "channel"):
        torch.testing.assert_close(PaintGuidance(2.0, norm).combine(pair, 0.5, 1), torch.ones(2, 3))
        torch.testing.assert_close(PaintGuidance(2.0, norm).combine(shorter, 0.5, 1), 0.8 * torch.ones(2, 3))


def test_cfg_zero_star(velocities: dict[Branch, Tensor]) -> None:
    guidance = PaintGuidance(3.0, "cfg_zero_star")
    assert not guidance.combine(velocities, 0.0, 0).any()
    c, n = velocities[COND], velocities[NONE]
    fitted = n * ((c * n).sum() / (n * n).sum())
    torch.testing.assert_close(guidance.combine(velocities, 0.5, 1), fitted + 3 * (c - fitted))
    torch.testing.assert_close(
        EditGuidance(3.0, 3.0, "cfg_zero_star").combine(velocities, 0.5, 1), fitted + 3 * (c - fitted)
    )
    with pytest.raises(BadParameter, match="compares two branches"):
        EditGuidance(3.0, 1.5, "cfg_zero_star")


def test_values_that_make_no_sense_are_refused() -> None:
    assert NORMS == ("none", "global", "channel", "cfg_zero_star")
    with pytest.raises(BadParameter, match="cfg_norm is 'text_channel'"):
        PaintGuidance(4.0, "text_channel")  # type: ignore[arg-type]
    for scale in (-1.0, math.nan, math.inf):
        with pytest.raises(BadParameter, match="guidance_scale must be a number"):
            PaintGuidance(scale)
        with pytest.raises(BadParameter, match="image_guidance_scale must be a number"):
            EditGuidance(4.0, scale)
    with pytest.raises(BadParameter, match="cfg_interval"):
        PaintGuidance(4.0, interval=(0.8, 0.2))
