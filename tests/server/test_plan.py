"""How a server is spread over processes and devices: settled before anything is loaded, or refused by one sentence."""

import io
from typing import Any

import pytest

from server.conftest import TALKING
from server.tools import ENGINE
from underpaint.errors import BadConfig
from underpaint.handover.arena import Arena
from underpaint.models import registry
from underpaint.models.roles import Role
from underpaint.server import ServerConfig, create_app
from underpaint.server.app import create_staffed_site
from underpaint.server.generator import Generator
from underpaint.server.logs import make_log
from underpaint.server.plan import MAX_ARENA_BYTES, Plan, Spread, make_plan
from underpaint.server.staff import Staff

CPU = {"device": "cpu"}


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretends that the machine has some CUDA devices."""

    def have(num: int) -> None:
        monkeypatch.setattr("torch.cuda.device_count", lambda: num)
        monkeypatch.setattr("torch.cuda.is_available", lambda: num > 0)

    have(0)
    return have


def plan_of(options: dict[str, Any] | None = None, **spread: Any) -> Plan:
    plan = make_plan(Spread(**spread), options or {})
    assert plan is not None
    return plan


def test_one_process_unless_there_are_two_cards(cards: Any) -> None:
    for num in (0, 1):
        cards(num)
        assert make_plan(Spread(), {}) is None
    cards(2)
    assert make_plan(Spread(), CPU) is None
    assert make_plan(Spread(), {"device": "cuda:1"}) is None
    plan = plan_of()
    assert (plan.understanding.device, plan.generation[0].device, plan.handover) == ("cuda:0", "cuda:1", "copy")


def test_devices_are_as_they_are_given(cards: Any) -> None:
    cards(4)
    plan = plan_of(mode="separate", understand_devices="2", generate_devices="0", handover="ipc")
    assert (plan.understanding.device, plan.generation[0].device, plan.handover) == ("cuda:2", "cuda:0", "fetch")
    assert plan_of(understand_devices="1").generation[0].device == "cuda:0"
    assert plan_of(generate_devices="0").understanding.device == "cuda:1"
    plan = plan_of(mode="colocate", understand_devices="3")
    assert (plan.understanding.device, plan.generation[0].device, plan.handover) == ("cuda:3", "cuda:3", "in_place")
    assert plan_of({"device": "cuda:1"}, mode="colocate").generation[0].device == "cuda:1"


def test_everything_runs_on_a_cpu_too(cards: Any) -> None:
    for mode, handover in (("separate", "copy"), ("colocate", "in_place")):
        plan = plan_of(CPU, mode=mode)
        assert (plan.understanding.device, plan.generation[0].device, plan.handover) == ("cpu", "cpu", handover)
        assert plan.arena_bytes > 0


def test_memory_is_given_to_each(cards: Any) -> None:
    plan = plan_of({"kv_cache_bytes": 5, **CPU}, mode="separate", generate_memory=7, handover_memory=11)
    assert (plan.understanding.kv_cache_bytes, plan.generation[0].kv_cache_bytes, plan.arena_bytes) == (5, 7, 11)
    assert 0 < plan_of(CPU, mode="separate").arena_bytes <= MAX_ARENA_BYTES


def test_every_worker_sees_its_own_device_first(cards: Any) -> None:
    cards(4)
    seen = {"CUDA_VISIBLE_DEVICES": "4,5,6,7", "LANG": "C"}
    copies = plan_of(understand_devices="1", generate_devices="3")
    fetches = plan_of(understand_devices="1", generate_devices="3", handover="ipc")
    assert copies.environment("understanding", {}) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert copies.environment("generation", seen) == {"CUDA_VISIBLE_DEVICES": "7", "LANG": "C"}
    assert fetches.environment("understanding", seen)["CUDA_VISIBLE_DEVICES"] == "5"
    assert fetches.environment("generation", seen)["CUDA_VISIBLE_DEVICES"] == "7,5"
    assert copies.setup("generation", TALKING, 1).config.device == "cuda:0"
    assert plan_of(CPU, mode="separate").environment("generation", seen) == seen


@pytest.mark.parametrize(
    ("num_cards", "options", "spread", "sentence"),
    [
        (0, {}, {"mode": "both"}, "mode is 'both'; it must be one of single, colocate, separate"),
        (0, {}, {"handover": "tcp"}, "handover is 'tcp'; it must be one of shm, ipc"),
        (0, {}, {"handover": "shm"}, "handover: with mode single there is one process"),
        (0, {}, {"mode": "single", "generate_memory": 1}, "generate_memory: with mode single"),
        (0, {}, {"mode": "separate", "handover": "ipc"}, "this server runs on the CPU; use shm"),
        (0, {}, {"mode": "separate", "understand_devices": "0"}, "this machine has 0 CUDA devices"),
        (2, CPU, {"mode": "separate", "understand_devices": "0"}, "this server runs on the CPU"),
        (1, {}, {"mode": "separate"}, "separate needs two CUDA devices, and this machine has 1; use mode colocate"),
        (2, {}, {"generate_devices": "2"}, "generate_devices is 2, and this machine has 2 CUDA devices"),
        (3, {}, {"understand_devices": "0,1"}, "understanding has one device"),
        (3, {}, {"generate_devices": "1,1"}, "which has a device twice"),
        (3, {}, {"generate_devices": "1,cpu"}, "must be numbers of CUDA devices"),
        (3, {}, {"mode": "colocate", "generate_devices": "1,2"}, "several devices are for mode separate"),
        (2, {}, {"generate_devices": "0,1"}, "cuda:0 would be both"),
        (2, {}, {"generate_devices": "first"}, "must be numbers of CUDA devices"),
        (2, {}, {"understand_devices": "1", "generate_devices": "1"}, "cuda:1 would be both; use mode colocate"),
        (2, {}, {"mode": "colocate", "understand_devices": "0", "generate_devices": "1"}, "processes on one device"),
        (2, {}, {"mode": "colocate", "handover": "shm"}, "read in place"),
        (2, {"device": "cuda:0"}, {"mode": "separate"}, "is one device"),
        (0, CPU, {"mode": "separate", "handover_memory": 0}, "at least 1 byte"),
        (0, CPU, {"mode": "separate", "generate_memory": -1}, "cannot be negative"),
        (0, {"quantise": "fp8"}, {"mode": "separate"}, "unknown options: quantise"),
    ],
)
def test_u4_a_plan_that_cannot_be_is_refused_early(
    cards: Any, num_cards: int, options: dict[str, Any], spread: dict[str, Any], sentence: str
) -> None:
    cards(num_cards)
    with pytest.raises(BadConfig, match=sentence):
        make_plan(Spread(**spread), options)


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever would open a CUDA context breaks the test. Counting devices does not."""

    def touched(*_: object, **__: object) -> None:
        raise AssertionError("this process touched a GPU")

    for name in (
        "init", "_lazy_init", "current_device", "set_device", "synchronize", "mem_get_info", "Stream",
        "get_device_capability", "get_device_properties", "get_device_name", "can_device_access_peer", "cudart",
    ):  # fmt: skip
        monkeypatch.setattr(f"torch.cuda.{name}", touched)


@pytest.mark.parametrize("spread", [
    {"mode": "colocate"}, {"mode": "separate"}, {"mode": "separate", "handover": "ipc"}, {},
])  # fmt: skip
def test_the_process_that_answers_touches_no_gpu(cards: Any, untouched: None, spread: dict[str, Any]) -> None:
    """From the options to the application, also for what only a device can answer."""
    cards(2)
    plan = plan_of({"quantize": "fp8"}, **spread)
    assert plan.understanding.device.startswith("cuda")
    for role in ("understanding", "generation"):
        plan.setup(role, TALKING, 2)
        plan.environment(role, {})
    log = make_log(io.StringIO())
    staff = Staff(TALKING, plan, 2, log, {})
    site = create_staffed_site(staff, registry.inspect(TALKING), ServerConfig("tiny"), log)
    create_app(site)
    assert site.metrics.text()


def test_fp8_is_refused_early_for_a_dtype(cards: Any, untouched: None) -> None:
    cards(1)
    with pytest.raises(BadConfig, match="bfloat16"):
        plan_of({"quantize": "fp8", "dtype": "float16"}, mode="colocate")


def test_cards_that_cannot_reach_each_other_are_told_to_use_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the process that has to know, before it takes any memory."""
    monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda *_: False)
    model = registry.load(TALKING, ENGINE, frozenset({Role.GENERATE}))
    arena = Arena(1 << 16)
    with pytest.raises(BadConfig, match="use handover shm"):
        Generator(model, ENGINE, "fetch", arena)
    arena.close()
