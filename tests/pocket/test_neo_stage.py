"""Training lowers every loss, resumes exactly, and exports what the engine loads and runs."""

import random
from pathlib import Path

import pytest
import torch
from neo_cases import export_loud, make_stage

from pocket import neo_stage
from pocket.build_neo import NEO_SPECIAL_TOKENS, POCKET, build_network, config_values, neo_config
from pocket.evaluate_neo import Examination
from pocket.neo_pool import TASKS, NeoPool
from pocket.neo_stage import NeoStage, loss_names
from pocket.scoreboard import Tally
from pocket.training import Clock
from underpaint.models.neo_unify import inspect
from underpaint.pipeline import load_service

NAMES = tuple(task.name for task in TASKS)


def advance(stage: NeoStage, pools: list[NeoPool], stop: int, state: Path | None = None) -> None:
    stage.train(pools, 1000, stop, Clock(1e9), 1e9, False, state)


def losses(stage: NeoStage, pools: list[NeoPool]) -> torch.Tensor:
    """Averaged over draws of times, which weigh a picture by up to a hundred."""
    torch.manual_seed(1)
    with torch.no_grad():
        return torch.stack([stage.loss(pools) for _ in range(4)]).mean(0)


def test_a_few_steps_lower_every_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neo_stage, "WARMUP_STEPS", 5)
    stage = make_stage(NAMES, pool=2, batch=2)
    pools = stage.draw_pools(0)
    before = losses(stage, pools)
    advance(stage, pools, 16)
    after = losses(stage, pools)
    assert len(before) == len(loss_names(stage.options.tasks)) == 7
    assert (after < 0.9 * before).all(), (before, after)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    whole, first = make_stage(("answer", "t2i")), make_stage(("answer", "t2i"))
    pools = whole.draw_pools(0)
    advance(whole, pools, 4)
    advance(first, pools, 2, tmp_path)
    resumed = make_stage(("answer", "t2i"), seed=0)
    resumed.load(tmp_path)
    assert resumed.trainer.step == 2
    advance(resumed, pools, 4)
    for name, weight in whole.trainer.parameters.items():
        assert torch.equal(resumed.trainer.parameters[name], weight), name
        assert torch.equal(resumed.trainer.average[name], whole.trainer.average[name]), name


def test_the_export_is_loaded_and_runs(tmp_path: Path) -> None:
    """Strict load, then everything that the evaluation does, through both faces of the API."""
    stage = make_stage(NAMES)
    export_loud(stage, tmp_path)
    checkpoint = inspect(tmp_path)
    assert checkpoint.weights.num_parameters == sum(w.numel() for w in stage.trainer.parameters.values())
    assert checkpoint.defaults.reference_resolution == 128
    examination = Examination(load_service(tmp_path, {"device": "cpu", "kv_cache_bytes": 64 << 20}), seed=0)
    tally = Tally()
    torch.manual_seed(0)
    rng = random.Random(0)
    for goal, kind in zip(examination.goals(), ("colour", "t2i", "move", "combine", "turns"), strict=True):
        assert kind in goal.kinds
        goal.run([kind], rng, tally)
    assert tally.total.total() == 5


def test_the_quick_report_judges_every_task() -> None:
    stage = make_stage(("answer", "t2i", "dialogue"))
    report = stage.report(2, scale=4.0)
    assert all(f"{name} 0." in report for name in ("answer/text", "t2i/paint", "dialogue/text", "dialogue/paint"))


def test_the_pocket_checkpoint_fits() -> None:
    """25 MB with tokenizer and configuration; a meta network has the sizes without the memory."""
    stage = make_stage(("answer",))
    with torch.device("meta"):
        network = build_network(neo_config(config_values(POCKET, len(stage.tokenizer), 2)), 0)
    assert 2 * sum(p.numel() for p in network.parameters()) < 24_500_000
    assert len(set(NEO_SPECIAL_TOKENS)) == len(NEO_SPECIAL_TOKENS)
