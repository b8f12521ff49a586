"""Full-size models without a checkpoint, and sequences as requests make them, for measurements of painting.

``Scene`` says what is painted; a ``Stage`` has a model with random weights and makes the rest. Operations are counted
for the linears of the blocks and for attention over what each row sees; all else is under 1 %.
"""

import json
import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from underpaint.config import EngineConfig
from underpaint.errors import BadConfig
from underpaint.generation.job import Sampler, draw_noise
from underpaint.kv.tree import chain
from underpaint.layout import Grid
from underpaint.models import fp8
from underpaint.models.fusing import can_fuse
from underpaint.models.loading import Defaults
from underpaint.models.neo_unify import NeoUnify, Passage, Picture
from underpaint.models.neo_unify import skeleton as neo_skeleton
from underpaint.models.neo_unify.config import CELL, CELL_VALUES, FlowConfig, LanguageConfig, NeoConfig, VisionConfig
from underpaint.models.neo_unify.flow import DEFAULT_TIMESTEP_SHIFT, FlowSampler, flow_times, noise_scale
from underpaint.models.neo_unify.flow import draw_noise as draw_pixels
from underpaint.models.painter import Condition
from underpaint.models.qwen_image21 import Checkpoint, QwenImage21
from underpaint.models.qwen_image21 import Condition as QwenCondition
from underpaint.models.qwen_image21 import skeleton as qwen_skeleton
from underpaint.models.qwen_image21.condition import prefix_layout
from underpaint.models.qwen_image21.model import Parts
from underpaint.models.qwen_image21.transformer import QwenImage21Transformer, TransformerConfig
from underpaint.models.random import random_neo_network, random_qwen_transformer, wrap_neo
from underpaint.models.roles import BOTH_ROLES
from underpaint.sampling.guidance import PlainGuidance
from underpaint.sampling.schedule import EulerSampler

SIDE_STEP = 32
"""Sides of pictures are multiples of it, as both families can paint them."""
QWEN_PIXELS = 16
PROMPT_ROWS = 200
NEO_PROMPT_ROWS = 289
TAG_ROWS = 5
"""Of the text before each reference."""
SMALL_QWEN = TransformerConfig(
    num_layers=2, attention_head_dim=16, num_attention_heads=4, context_in_dim=64, axes_dims_rope=(4, 6, 6)
)
NEO = NeoConfig(LanguageConfig(), VisionConfig(), FlowConfig(), head_width=1536)
SMALL_NEO = NeoConfig(
    LanguageConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    ),
    VisionConfig(hidden_size=32, llm_hidden_size=64),
    FlowConfig(),
    head_width=64,
)  # fmt: skip

Product = tuple[int, int]
"""Outputs and inputs of a linear."""


@dataclass(frozen=True)
class Scene:
    """A square picture of ``side`` pixels behind ``num_references`` of ``reference_side``, with ``num_branches`` of
    guidance."""

    side: int
    num_references: int = 0
    num_branches: int = 1
    reference_side: int = 1024

    @property
    def name(self) -> str:
        references = f", {self.num_references} ref" + "s" * (self.num_references > 1) if self.num_references else ""
        return f"{self.side}{references}{', guided' if self.num_branches > 1 else ''}"


class Stage(Protocol):
    """A family's model. ``plain``: the transformer in the engine's dtype, from which a quantised model was made."""

    name: str
    model: Any

    @property
    def num_layers(self) -> int: ...

    @property
    def products(self) -> tuple[Product, ...]:
        """Of the target's rows in one layer, as they are fused."""
        ...

    @property
    def attention_width(self) -> int:
        """Query heads times head_dim."""
        ...

    @property
    def cell(self) -> int:
        """Pixels of the side of what one row of a target paints."""
        ...

    def grid(self, side: int) -> Grid: ...

    def state(self, grid: Grid) -> Tensor: ...

    def noise(self, grid: Grid, seed: int) -> Tensor:
        """What a request with this seed starts from."""
        ...

    def sampler(self, grid: Grid, num_steps: int, cfg_scale: float) -> Sampler: ...

    def conditions(self, scene: Scene) -> list[Condition]:
        """As ``prefixes``, with a prompt of the family's usual length."""
        ...

    def prefixes(
        self, num_branches: int, num_references: int, reference_side: int, prompt_rows: int
    ) -> list[Condition]:
        """One a branch, with the same trunk; nothing of it is in any cache."""
        ...

    def other_prompt(self, conditions: Sequence[Condition]) -> list[Condition]:
        """The same trunks as in ``conditions``, and other text of the same length behind them."""
        ...


class QwenStage:
    """Qwen-Image 2.1, 7B, or a small one."""

    name = "Qwen-Image 2.1"

    def __init__(self, config: EngineConfig, small: bool, seed: int) -> None:
        self._sizes = SMALL_QWEN if small else TransformerConfig()
        self._device, self._dtype = config.device, config.torch_dtype
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self.plain = random_qwen_transformer(self._sizes, self._device, self._dtype, seed)
        transformer = self.plain if config.quantize == "none" else self._quantised()
        with tempfile.TemporaryDirectory() as scratch:
            root = Path(scratch)
            (root / "scheduler").mkdir()
            scheduler = {"_class_name": "FlowMatchEulerDiscreteScheduler"}
            (root / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
            checkpoint = Checkpoint(root, self._sizes, Defaults(), None, {})
            self.model = QwenImage21(checkpoint, Parts(transformer, None, None), config)

    def _quantised(self) -> QwenImage21Transformer:
        transformer = qwen_skeleton(self._sizes, quantised=True)
        wanted, state = transformer.state_dict(), dict[str, Tensor]()
        for name, tensor in self.plain.state_dict().items():
            state |= fp8.settle(name, tensor, wanted[name], self._dtype)
        transformer.load_state_dict(state, strict=True, assign=True)
        if can_fuse(self._device, self._sizes.attention_head_dim):
            transformer.fuse()
        return transformer.eval()

    @property
    def num_layers(self) -> int:
        return self._sizes.num_layers

    @property
    def products(self) -> tuple[Product, ...]:
        width = self._sizes.hidden_size
        inner = width * self._sizes.mlp_ratio
        return (3 * width, width), (width, width), (2 * inner, width), (width, inner)

    @property
    def attention_width(self) -> int:
        return self._sizes.hidden_size

    @property
    def cell(self) -> int:
        return QWEN_PIXELS

    def grid(self, side: int) -> Grid:
        return side // QWEN_PIXELS, side // QWEN_PIXELS

    def state(self, grid: Grid) -> Tensor:
        return self._draw(grid[0] * grid[1], self._sizes.in_channels)

    def noise(self, grid: Grid, seed: int) -> Tensor:
        return draw_noise(seed, self._sizes.in_channels, grid, self._dtype).to(self._device)

    def sampler(self, grid: Grid, num_steps: int, cfg_scale: float) -> Sampler:
        schedule = self.model.schedule_rule.schedule(grid[0] * grid[1], num_steps)
        return EulerSampler(schedule, PlainGuidance(cfg_scale))

    def conditions(self, scene: Scene) -> list[Condition]:
        return self.prefixes(scene.num_branches, scene.num_references, scene.reference_side, PROMPT_ROWS)

    def prefixes(
        self, num_branches: int, num_references: int, reference_side: int, prompt_rows: int
    ) -> list[Condition]:
        grid = self.grid(reference_side)
        latents = tuple(self.state(grid) for _ in range(num_references))
        trunk, contents = self._draw(TAG_ROWS * len(latents), self._sizes.context_in_dim), secrets.token_bytes(16)
        made: list[Condition] = []
        for _ in range(num_branches):
            runs = [range(TAG_ROWS)] * len(latents) + [range(prompt_rows)]
            layout = prefix_layout(runs, [grid] * len(latents))
            units = chain(b"", layout.trunk_units(), [contents + bytes([i]) for i in range(len(latents))])
            text = torch.cat([trunk, self._draw(prompt_rows, self._sizes.context_in_dim)])
            made.append(QwenCondition(layout, text, latents, units))
        return made

    def other_prompt(self, conditions: Sequence[Condition]) -> list[Condition]:
        made: list[Condition] = []
        for condition in conditions:
            assert isinstance(condition, QwenCondition)
            prompt = self._draw(PROMPT_ROWS, self._sizes.context_in_dim)
            text = torch.cat([condition.text[:-PROMPT_ROWS], prompt])
            made.append(QwenCondition(condition.layout, text, condition.latents, condition.units))
        return made

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self._device, dtype=self._dtype)


class NeoStage:
    """SenseNova-U1 8B with the head of U1, or a small one."""

    name = "SenseNova-U1 8B"

    def __init__(self, config: EngineConfig, small: bool, seed: int) -> None:
        self._sizes = SMALL_NEO if small else NEO
        self._generator = torch.Generator().manual_seed(seed)
        network = random_neo_network(self._sizes, config.device, config.torch_dtype, seed)
        if config.quantize == "fp8":
            quantised = neo_skeleton(self._sizes, quantised=True)
            wanted, state = quantised.state_dict(), dict[str, Tensor]()
            for name, tensor in network.state_dict().items():
                state |= fp8.settle(name, tensor, wanted[name], config.torch_dtype)
            quantised.load_state_dict(state, strict=True, assign=True)
            network = quantised.requires_grad_(False).eval()
        if can_fuse(config.device, self._sizes.language.head_dim):
            network.fuse()
        self.model: NeoUnify = wrap_neo(network, config.device, BOTH_ROLES)

    @property
    def num_layers(self) -> int:
        return self._sizes.language.num_hidden_layers

    @property
    def products(self) -> tuple[Product, ...]:
        c = self._sizes.language
        query, shared = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        return (
            (query + 2 * shared, c.hidden_size), (c.hidden_size, query), (2 * c.intermediate_size, c.hidden_size),
            (c.hidden_size, c.intermediate_size),
        )  # fmt: skip

    @property
    def attention_width(self) -> int:
        return self._sizes.language.num_attention_heads * self._sizes.language.head_dim

    @property
    def cell(self) -> int:
        return CELL

    def grid(self, side: int) -> Grid:
        return side // CELL, side // CELL

    def state(self, grid: Grid) -> Tensor:
        state = torch.randn(grid[0] * grid[1], CELL_VALUES, generator=self._generator)
        return state.to(self.model.device, self.model.dtype)

    def noise(self, grid: Grid, seed: int) -> Tensor:
        scale, generator = noise_scale(self._sizes.flow, grid), torch.Generator().manual_seed(seed)
        return draw_pixels(generator, grid, scale, self.model.dtype).to(self.model.device)

    def sampler(self, grid: Grid, num_steps: int, cfg_scale: float) -> Sampler:
        return FlowSampler(flow_times(num_steps, DEFAULT_TIMESTEP_SHIFT), PlainGuidance(cfg_scale))

    def conditions(self, scene: Scene) -> list[Condition]:
        return self.prefixes(scene.num_branches, scene.num_references, scene.reference_side, NEO_PROMPT_ROWS)

    def prefixes(
        self, num_branches: int, num_references: int, reference_side: int, prompt_rows: int
    ) -> list[Condition]:
        grid = self.grid(reference_side)
        pictures = [
            Picture(
                grid, torch.randn(grid[0] * grid[1], CELL_VALUES, generator=self._generator), secrets.token_bytes(16)
            )
            for _ in range(num_references)
        ]
        return [self._condition(pictures, prompt_rows) for _ in range(num_branches)]

    def other_prompt(self, conditions: Sequence[Condition]) -> list[Condition]:
        return [
            self._condition(
                [part for part in condition.passage.parts if isinstance(part, Picture)],  # type: ignore[attr-defined]
                NEO_PROMPT_ROWS,
            )
            for condition in conditions
        ]

    def _condition(self, pictures: Sequence[Picture], prompt_rows: int) -> Condition:
        trunk: list[Any] = []
        for picture in pictures:
            trunk += [tuple(range(TAG_ROWS)), picture]
        ids = torch.randint(self._sizes.language.vocab_size, (prompt_rows,), generator=self._generator)
        return self.model.condition(Passage((*trunk, tuple(ids.tolist()))))


def make_stage(family: str, config: EngineConfig, small: bool, seed: int) -> Stage:
    """``family``: qwen or neo. ``config`` is resolved. Raises BadConfig for another family."""
    stages: dict[str, Callable[[EngineConfig, bool, int], Stage]] = {"qwen": QwenStage, "neo": NeoStage}
    if family not in stages:
        raise BadConfig(f"family is {family!r}; it must be one of {', '.join(stages)}")
    return stages[family](config, small, seed)


def linear_operations(stage: Stage, num_rows: int) -> int:
    """Of the linears of all blocks."""
    return sum(2 * num_rows * outputs * inputs for outputs, inputs in stage.products) * stage.num_layers


def step_attention(stage: Stage, scene: Scene, conditions: Sequence[Condition]) -> int:
    """Operations of attention in a step: every row of a target sees its prefix and the target."""
    rows = len(stage.state(stage.grid(scene.side)))
    seen = sum(rows * (condition.layout.num_rows + rows) for condition in conditions)
    return 4 * seen * stage.attention_width * stage.num_layers


def prefix_attention(stage: Stage, conditions: Sequence[Condition]) -> int:
    """Operations of attention among the rows of the prefixes, the trunk of the others being that of the first."""
    seen = 0
    for index, condition in enumerate(conditions):
        start = condition.units[-1].stop if index and condition.units else 0
        seen += int(condition.layout.visible_stop()[start:].sum())
    return 4 * seen * stage.attention_width * stage.num_layers


def prefix_rows(conditions: Sequence[Condition]) -> int:
    """Different rows of the prefixes."""
    shared = conditions[0].units[-1].stop if conditions[0].units else 0
    return sum(condition.layout.num_rows for condition in conditions) - shared * (len(conditions) - 1)
