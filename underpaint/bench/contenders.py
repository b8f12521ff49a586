"""Who paints in ``bench step``: any contender, and ours."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from underpaint.bench.scenes import Stage
from underpaint.config import EngineConfig
from underpaint.generation.arrangement import PlacedTarget
from underpaint.generation.prefix import Lease
from underpaint.kv.pool import PagePool, pages_for
from underpaint.kv.tile_codec import find_codec
from underpaint.kv.tree import PrefixTree
from underpaint.layout import Grid
from underpaint.models.painter import Condition, Target
from underpaint.service import Easel


class Contender(Protocol):
    """A transformer that paints one scene at a time."""

    name: str

    def begin(self, conditions: Sequence[Condition], state: Tensor, grid: Grid, sigma: float) -> object:
        """The first step; prefixes are computed and kept."""
        ...

    def step(self) -> Sequence[Tensor]:
        """Any further step; the velocity of each branch."""
        ...

    def end(self) -> None: ...


@dataclass(frozen=True)
class Form:
    """What of ours is in e4m3: the linears of the blocks, attention."""

    linears: bool
    attention: bool

    @classmethod
    def of(cls, config: EngineConfig) -> "Form":
        return cls(config.quantize == "fp8", config.attention_backend == "fp8")

    @property
    def suffix(self) -> str:
        """For a name."""
        return ", fp8" * self.linears + ", fp8 attention" * self.attention


PLAIN = Form(False, False)


class Ours:
    """Our engine, without requests and samplers around it. Pages for one scene, made when it begins."""

    def __init__(self, stage: Stage, config: EngineConfig, codec: str = "auto") -> None:
        """``codec``: as it was asked for."""
        self.form = Form.of(config)
        self.name = "ours" + self.form.suffix + ("" if codec == "auto" else f", K/V {codec}")
        self.easel: Easel | None = None
        self._stage = stage
        self._config = config
        self._lease: Lease | None = None
        self._targets: list[PlacedTarget] = []

    def open(self, conditions: Sequence[Condition], spare_rows: int) -> None:
        """Pages for these prefixes, what branches share once, and some rows more."""
        model = self._stage.model
        page_rows = model.checkpoint.defaults.page_rows
        units = {unit.key: unit.num_rows for condition in conditions for unit in condition.units}
        rows = [*units.values(), spare_rows]
        rows += [condition.layout.num_rows - sum(u.num_rows for u in condition.units) for condition in conditions]
        codec = find_codec(self._config.kv_codec)
        budget = sum(pages_for(n, page_rows) for n in rows) * model.cache_shape.page_bytes(codec, page_rows)
        pool = PagePool(model.cache_shape, codec, budget, self._config.device, page_rows)
        self.easel = Easel(model, self._config, PrefixTree(pool))

    def begin(self, conditions: Sequence[Condition], state: Tensor, grid: Grid, sigma: float) -> None:
        """With an empty cache."""
        assert self.easel is not None
        self.release()
        self.easel.prefixes.tree.clear()
        self.go_on(conditions, state, grid, sigma)

    def go_on(self, conditions: Sequence[Condition], state: Tensor, grid: Grid, sigma: float) -> None:
        """With what the cache has."""
        assert self.easel is not None
        self.release()
        runner = self.easel.runner
        lease = self._lease = self.easel.prefixes.open(conditions)
        while not lease.ready:
            runner.run(lease.next_chunks(), ())
            lease.commit()
        target = Target(state, grid, torch.tensor(sigma))
        self._targets = [
            PlacedTarget(runner.place(condition, view, grid), target)
            for condition, view in zip(conditions, lease.views, strict=True)
        ]
        self.step()

    def step(self) -> list[Tensor]:
        assert self.easel is not None
        return self.easel.runner.run((), self._targets)

    def release(self) -> None:
        self._targets = []
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    def end(self) -> None:
        self.release()
        self.easel = None
