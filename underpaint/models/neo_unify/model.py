"""NEO-Unify as one object: everything a checkpoint directory holds, and what it can do."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from safetensors import safe_open
from torch import Tensor

from underpaint.config import EngineConfig
from underpaint.errors import CheckpointError
from underpaint.kv.pool import CacheShape
from underpaint.kv.tree import Key, Unit, chain
from underpaint.layout import Layout, neo_positions
from underpaint.models.loading import Defaults, Weights, read_defaults
from underpaint.models.neo_unify.config import BOTH_ROLES, NeoConfig, Role, read_neo_config
from underpaint.models.neo_unify.flow import noise_scale
from underpaint.models.neo_unify.lora import Lora, LoraSpec
from underpaint.models.neo_unify.network import NeoUnifyNetwork, Targets
from underpaint.models.neo_unify.prompt import Passage, PromptTokenizer, load_tokenizer
from underpaint.models.neo_unify.transformer import rotary_table
from underpaint.models.neo_unify.vision import Picture, PixelBounds, cell_places, read_picture
from underpaint.models.painter import Attend, Target

CONV_HEAD = "fm_modules.fm_head.conv1.weight"
MLP_HEAD = "fm_modules.fm_head.0.weight"
DEFAULTS = Defaults(reference_resolution=2048, num_inference_steps=50)


@dataclass(frozen=True)
class Checkpoint:
    """What a directory says of itself for ``roles``, read and checked without loading a weight. ``weights`` are the
    tensors of these roles only, so their ``num_bytes`` is what a process for them will hold."""

    root: Path
    config: NeoConfig
    defaults: Defaults
    roles: frozenset[Role]
    weights: Weights


def inspect(root: Path, roles: frozenset[Role] = BOTH_ROLES) -> Checkpoint:
    """Check config, and name, shape and dtype of every tensor. Raises CheckpointError.

    The tensors of a role that is not asked for may be there or not.
    """
    weights = Weights.scan(root, "model")
    head_width = _head_width(weights) if Role.GENERATE in roles or _has_head(weights) else None
    config = read_neo_config(root / "config.json", head_width)
    own = skeleton(config, roles).state_dict()
    others = skeleton(config).state_dict().keys() - own.keys()
    weights.check(own, unused=frozenset(others))
    needed = {name: info for name, info in weights.tensors.items() if name in own}
    return Checkpoint(root, config, read_defaults(root, DEFAULTS), roles, Weights(needed, root))


def skeleton(config: NeoConfig, roles: frozenset[Role] = BOTH_ROLES) -> NeoUnifyNetwork:
    """The network without memory, for its names and shapes."""
    with torch.device("meta"):
        return NeoUnifyNetwork(config, roles)


def _has_head(weights: Weights) -> bool:
    return CONV_HEAD in weights.tensors or MLP_HEAD in weights.tensors


def _head_width(weights: Weights) -> int | None:
    """Which head a checkpoint has, by its tensors: repacked files do not always say it in their config."""
    if CONV_HEAD in weights.tensors:
        return None
    if MLP_HEAD not in weights.tensors:
        raise CheckpointError(f"{weights.directory}: missing tensors: {MLP_HEAD} or {CONV_HEAD}")
    return weights.tensors[MLP_HEAD].shape[0]


@dataclass(frozen=True, eq=False)
class Condition:
    """What one branch paints from: a passage, and the units at its beginning that can be shared."""

    passage: Passage
    units: tuple[Unit, ...]

    @property
    def layout(self) -> Layout:
        return self.passage.layout


class NeoUnify:
    """The loaded parts, and the way from passages and pictures to rows. Stateless."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        network: NeoUnifyNetwork,
        tokenizer: PromptTokenizer,
        device: str,
        root_key: Key,
    ) -> None:
        self.config = checkpoint.config
        self.checkpoint = checkpoint
        self.network = network
        self.tokenizer = tokenizer
        self.device = device
        self.page_rows = checkpoint.defaults.page_rows
        self.dtype = next(network.parameters()).dtype
        language = self.config.language
        self.cache_shape = CacheShape(
            language.num_hidden_layers, language.num_key_value_heads, language.head_dim, self.dtype
        )
        self._root_key = root_key

    def question_picture(self, image: Image.Image) -> Picture:
        """A picture to be asked about, within the checkpoint's own bounds. For references of edits and of
        interleaved answers, see ``vision.reference_bounds``."""
        return read_picture(image, PixelBounds(self.config.vision.min_pixels, self.config.vision.max_pixels))

    def condition(self, passage: Passage) -> Condition:
        """A passage as the prefix of a branch."""
        return Condition(passage, self.units(passage))

    def units(self, passage: Passage) -> tuple[Unit, ...]:
        """What of a passage can be shared: pictures with the text before them, and pages of text. The key of a unit
        names its tokens and the pixels of its picture, and, through the chain, all that comes before."""
        spans = passage.layout.paged_units(self.page_rows)
        return chain(self._root_key, spans, [passage.content(span.start, span.stop) for span in spans])

    def embed_prefix(self, condition: Condition, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a prefix, (rows, hidden_size). The range never cuts a picture."""
        return self.embed(condition.passage, start, stop)

    def embed(self, passage: Passage, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a passage, (rows, hidden_size). The range never cuts a picture."""
        rows = []
        for segment, part in zip(passage.layout.segments, passage.parts, strict=True):
            first, last = max(start, segment.start) - segment.start, min(stop, segment.stop) - segment.start
            if first >= last:
                continue
            if isinstance(part, Picture):
                cells = part.cells.to(self.device, self.dtype)
                rows.append(self.network.embed_cells(cells, cell_places(part.grid).to(self.device)))
            else:
                rows.append(self.network.embed_tokens(torch.tensor(part[first:last], device=self.device)))
        return torch.cat(rows)

    def rotary(self, layout: Layout, start: int, stop: int) -> Tensor:
        """(rows, head_dim / 2) complex64 for rows [start, stop), on the model's device."""
        return rotary_table(neo_positions(layout)[start:stop], self.config.language).to(self.device)

    def run(self, prefix_rows: Tensor, targets: Sequence[Target], rotary: Tensor, attend: Attend) -> list[Tensor]:
        """One pass over prefix rows (rows, hidden_size), which understanding reads, and then the targets' rows;
        either may be missing. Velocity (cells, 3072) of each target, in the dtype of its state."""
        rows: dict[Role, Tensor] = {}
        if len(prefix_rows):
            rows[Role.UNDERSTAND] = prefix_rows
        if not targets:
            self.network(rows, rotary, attend)
            return []
        packed = self._pack(targets)
        rows[Role.GENERATE] = self.network.embed_targets(packed)
        hidden = self.network(rows, rotary, attend)[Role.GENERATE]
        return list(self.network.predict(hidden, packed).split(packed.sizes))

    def _pack(self, targets: Sequence[Target]) -> Targets:
        grids = tuple(target.grid for target in targets)
        return Targets(
            torch.cat([target.state for target in targets]),
            grids,
            torch.stack([target.level for target in targets]).to(self.device),
            torch.tensor([noise_scale(self.config.flow, grid) for grid in grids], device=self.device),
        )


def load(
    root: Path, config: EngineConfig, roles: frozenset[Role] = BOTH_ROLES, loras: Sequence[LoraSpec] = ()
) -> NeoUnify:
    """Load a checkpoint directory for ``roles``, with ``loras`` fused; ``config`` is resolved.

    Raises CheckpointError.
    """
    checkpoint = inspect(root, roles)
    network = load_network(checkpoint, config.device, config.torch_dtype, loras)
    tokenizer = load_tokenizer(root, config.max_prompt_tokens)
    fused = [(str(spec.path.resolve()), spec.strength) for spec in loras]
    identity = repr((str(root.resolve()), config.dtype, config.kv_codec, fused))
    return NeoUnify(checkpoint, network, tokenizer, config.device, hashlib.sha256(identity.encode()).digest())


def load_network(
    checkpoint: Checkpoint, device: str, dtype: torch.dtype, loras: Sequence[LoraSpec] = ()
) -> NeoUnifyNetwork:
    """The weights of a checkpoint's roles. Reads, fuses and casts one tensor at a time. Raises CheckpointError."""
    every_name = skeleton(checkpoint.config).state_dict().keys()
    opened = [Lora.open(spec, every_name) for spec in loras]
    network = skeleton(checkpoint.config, checkpoint.roles)
    tensors = checkpoint.weights.tensors
    state: dict[str, Tensor] = {}
    for file in sorted({info.file for info in tensors.values()}):
        with safe_open(file, framework="pt", device=device) as shard:
            for name in sorted(name for name, info in tensors.items() if info.file == file):
                weight = shard.get_tensor(name)
                for lora in opened:
                    weight = lora.fuse(name, weight)
                state[name] = weight.to(dtype)
    network.load_state_dict(state, strict=True, assign=True)
    return network.requires_grad_(False).eval()
