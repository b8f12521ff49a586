"""NEO-Unify as one object: everything a checkpoint directory holds, and what it can do."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from underpaint.config import EngineConfig
from underpaint.errors import BadConfig, CheckpointError
from underpaint.kv.pool import CacheShape
from underpaint.kv.tile_codec import FP8_TILES
from underpaint.kv.tree import Key, Unit, chain
from underpaint.layout import Grid, Layout, neo_positions
from underpaint.models import fp8
from underpaint.models.fusing import can_fuse
from underpaint.models.loading import Defaults, Weights, read_defaults
from underpaint.models.lora import open_all
from underpaint.models.neo_unify.config import CELL_VALUES, LanguageConfig, NeoConfig, read_neo_config
from underpaint.models.neo_unify.flow import noise_scale
from underpaint.models.neo_unify.network import NeoUnifyNetwork
from underpaint.models.neo_unify.prompt import Passage, PromptTokenizer, load_tokenizer
from underpaint.models.neo_unify.rotations import TextRotations
from underpaint.models.neo_unify.vision import Picture, PixelBounds, read_picture
from underpaint.models.painter import Attend, Target, Targets, cell_places, rows_bytes, run_pass
from underpaint.models.rms_norm import RMSNorm
from underpaint.models.roles import BOTH_ROLES, Role

CONV_HEAD = "fm_modules.fm_head.conv1.weight"
MLP_HEAD = "fm_modules.fm_head.0.weight"
BLOCKS = "language_model.model.layers"
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
    own = skeleton(config, roles, weights.quantised).state_dict()
    others = skeleton(config, quantised=weights.quantised).state_dict().keys() - own.keys()
    weights.check(own, unused=frozenset(others))
    needed = {name: info for name, info in weights.tensors.items() if name in own}
    return Checkpoint(root, config, read_defaults(root, DEFAULTS), roles, Weights(needed, root))


def skeleton(config: NeoConfig, roles: frozenset[Role] = BOTH_ROLES, quantised: bool = False) -> NeoUnifyNetwork:
    """The network without memory, for its names and shapes. ``quantised``: with its blocks in e4m3."""
    with torch.device("meta"):
        network = NeoUnifyNetwork(config, roles)
    if quantised:
        fp8.prepare(network, BLOCKS)
    return network


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
    """The loaded parts, and the way from passages and pictures to rows. Stateless but for a table of rotations."""

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
        # Of a norm, because linears may be in e4m3.
        self.dtype = next(m.weight.dtype for m in network.modules() if isinstance(m, RMSNorm))
        language = self.config.language
        self.cache_shape = CacheShape(
            language.num_hidden_layers, language.num_key_value_heads, language.head_dim, self.dtype
        )
        self.shared_heads = language.num_attention_heads // language.num_key_value_heads
        self._root_key = root_key
        self._rotations = TextRotations(language, device)

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
                # Rounded there: it is many values, and a copy to another device and dtype at once rounds here.
                cells = part.cells.to(self.device).to(self.dtype)
                rows.append(self.network.embed_cells(cells, cell_places(part.grid).to(self.device)))
            else:
                rows.append(self.network.embed_tokens(torch.tensor(part[first:last], device=self.device)))
        return torch.cat(rows)

    def rotary(self, layout: Layout, start: int, stop: int) -> Tensor:
        """(rows, head_dim / 2) complex64 for rows [start, stop), on the model's device."""
        return self._rotations.rows(neo_positions(layout)[start:stop])

    def text_rotary(self, positions: Sequence[int]) -> npt.NDArray[np.complex64]:
        """(rows, head_dim / 2) of rows of text at ``positions`` on the t axis, on the CPU."""
        return self._rotations.text_rows(positions)

    def pass_bytes(self, config: EngineConfig) -> int:
        """What the largest pass takes beside weights and pages."""
        return pass_bytes(self.config.language, config)

    @property
    def num_channels(self) -> int:
        return CELL_VALUES

    @property
    def num_hidden(self) -> int:
        return self.config.language.hidden_size

    @property
    def capturable(self) -> bool:
        return self.network.capturable

    def grid_level(self, grid: Grid) -> float:
        """The scale of the noise."""
        return noise_scale(self.config.flow, grid)

    def prefill(self, prefix_rows: Tensor, rotary: Tensor, attend: Attend) -> None:
        """Of prefix rows (rows, hidden_size), which understanding reads."""
        self.network({Role.UNDERSTAND: prefix_rows}, rotary, attend)

    def paint(self, prefix_rows: Tensor, targets: Targets, rotary: Tensor, attend: Attend) -> Tensor:
        """Prefix rows, which understanding reads, and then the targets' rows; the latter's hidden rows."""
        rows = {Role.UNDERSTAND: prefix_rows} if len(prefix_rows) else {}
        rows[Role.GENERATE] = self.network.embed_targets(targets)
        return self.network(rows, rotary, attend)[Role.GENERATE]

    def predict(self, hidden: Tensor, targets: Targets) -> Tensor:
        """(cells, 3072), in the dtype of the state."""
        return self.network.predict(hidden, targets)

    def run(self, prefix_rows: Tensor, targets: Sequence[Target], rotary: Tensor, attend: Attend) -> list[Tensor]:
        """See ``run_pass``."""
        return run_pass(self, prefix_rows, targets, rotary, attend, self.device)


def pass_bytes(sizes: LanguageConfig, config: EngineConfig) -> int:
    """As ``NeoUnify.pass_bytes``, before anything is loaded."""
    inner = max(sizes.feed_forward(role).width * max(sizes.feed_forward(role).num_chosen, 1) for role in Role)
    return rows_bytes(config.max_batch_rows, sizes.hidden_size, inner, config)


def device_bytes(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """What the weights take once they are loaded."""
    quantised = config.quantize == "fp8" or checkpoint.weights.quantised
    state = skeleton(checkpoint.config, checkpoint.roles, quantised).state_dict()
    return sum(fp8.bytes_of(name, x, config.torch_dtype) for name, x in state.items())


def load(root: Path, config: EngineConfig, roles: frozenset[Role] = BOTH_ROLES) -> NeoUnify:
    """Load a checkpoint directory for ``roles``; ``config`` is resolved.

    Raises CheckpointError.
    """
    if config.offloaded:
        raise BadConfig("offload is for Qwen-Image 2.1; of SenseNova-U1, quantize fp8 makes less")
    if config.kv_codec == FP8_TILES.name:
        raise BadConfig(
            f"kv_codec {FP8_TILES.name} is for prefixes that are written once, and SenseNova-U1 writes answers row by "
            "row; use fp8"
        )
    checkpoint = inspect(root, roles)
    network = load_network(checkpoint, config)
    if can_fuse(config.device, checkpoint.config.language.head_dim):
        network.fuse()
    tokenizer = load_tokenizer(root, config.max_prompt_tokens)
    identity = repr((str(root.resolve()), config.dtype, config.kv_codec, config.quantize, config.lora))
    return NeoUnify(checkpoint, network, tokenizer, config.device, hashlib.sha256(identity.encode()).digest())


def load_network(checkpoint: Checkpoint, config: EngineConfig) -> NeoUnifyNetwork:
    """The weights of a checkpoint's roles. Raises CheckpointError."""
    loras = open_all(config.lora, skeleton(checkpoint.config).state_dict())
    network = skeleton(checkpoint.config, checkpoint.roles, fp8.wanted(config, checkpoint.weights.quantised))
    checkpoint.weights.load_into(network, config.device, config.torch_dtype, loras)
    return network.eval()
