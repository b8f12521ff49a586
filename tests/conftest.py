"""Fixtures: the tiny checkpoint, both pipelines on it, and a fresh printed seed for every test."""

import os

# Comparisons at 1e-5 are made on the CPU, also where there is a GPU. Kernels run in Triton's interpreter, which must be
# chosen before anything imports Triton: see ``interpreter``.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["TRITON_INTERPRET"] = "1"

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from diffusers import QwenImage21Pipeline
from hypothesis import HealthCheck, settings
from PIL import Image

from underpaint import Pipeline

torch.set_num_threads(1)  # the tensors are tiny: threads would only wait for each other

# How long an example takes says how busy the machine is.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="draw test inputs from this seed instead of a fresh one")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What a module shares, such as a server of several processes, is made by one worker of ``-n`` and once: tests of a
    module that share anything with the same parameters run there, one after the other."""
    for item in items:
        if isinstance(item, pytest.Function) and (shared := _shared(item)):
            values = item.callspec.params if hasattr(item, "callspec") else {}
            names = [item.path.name, *(str(values[name]) for name in shared if name in values)]
            item.add_marker(pytest.mark.xdist_group("-".join(names).replace("@", "")))


def _shared(item: pytest.Function) -> list[str]:
    """The fixtures of a test that its module shares."""
    definitions = item._fixtureinfo.name2fixturedefs
    return sorted(name for name, found in definitions.items() if any(one.scope == "module" for one in found))


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A fresh seed; printed, so that a failure can be repeated with --seed."""
    value = request.config.getoption("--seed")
    value = random.SystemRandom().randrange(2**32) if value is None else value
    test, _, group = request.node.nodeid.rpartition("@")  # xdist adds the group behind the name
    print(f"repeat with: pytest {request.node.nodeid if ']' in group else test or group} --seed {value}")
    return value


@pytest.fixture
def draw_image(seed: int) -> Callable[..., Image.Image]:
    """Makes a picture of noise: (width, height, mode)."""
    generator = np.random.default_rng(seed)

    def draw(width: int, height: int, mode: str = "RGBA") -> Image.Image:
        return Image.fromarray(generator.integers(0, 256, (height, width, len(mode)), dtype=np.uint8))

    return draw


@pytest.fixture(scope="session")
def theirs() -> QwenImage21Pipeline:
    return tiny.make_pipeline()


@pytest.fixture(scope="session")
def checkpoint(theirs: QwenImage21Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tiny") / "qwen-image-2.1"
    tiny.save_checkpoint(theirs, root)
    return root


@pytest.fixture
def ours(checkpoint: Path) -> Pipeline:
    """A pipeline with an empty cache."""
    return Pipeline.from_pretrained(checkpoint, kv_cache_bytes=64 << 20)
