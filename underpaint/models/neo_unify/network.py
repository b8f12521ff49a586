"""The whole network of NEO-Unify under its released tensor names, and what goes in and comes out of its transformer."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from underpaint.models.neo_unify.config import NeoConfig
from underpaint.models.neo_unify.flow import ConvHead, MlpHead, NumberEmbedding, velocity
from underpaint.models.neo_unify.transformer import LanguageModel, RoleRows
from underpaint.models.neo_unify.vision import CellEmbedding
from underpaint.models.painter import Attend, PackedAttend, Targets
from underpaint.models.roles import BOTH_ROLES, Role

if TYPE_CHECKING:
    from underpaint.models.neo_unify.fused import FusedBody


class NeoUnifyNetwork(nn.Module):
    """Pieces to build passes from: embed, run the transformer, predict. Rows are packed, see ``transformer``.

    A network for one role has, and loads, that role's tensors only.
    """

    def __init__(self, config: NeoConfig, roles: frozenset[Role] = BOTH_ROLES) -> None:
        super().__init__()
        self.config = config
        self._fused: FusedBody | None = None
        width, head_width = config.language.hidden_size, config.head_width
        self.language_model = LanguageModel(config.language, roles)
        if Role.UNDERSTAND in roles:
            self.vision_model = CellEmbedding(config.vision)
        if Role.GENERATE in roles:
            self.fm_modules = nn.ModuleDict(
                {
                    "vision_model_mot_gen": CellEmbedding(config.vision),
                    "timestep_embedder": NumberEmbedding(width),
                    "noise_scale_embedder": NumberEmbedding(width),
                    "fm_head": ConvHead(width) if head_width is None else MlpHead(width, head_width),
                }
            )

    def fuse(self) -> None:
        """From now on passes run with fused kernels (``fused``), whose ``attend`` is a ``PackedAttend``. For inference
        on weights that are loaded; the names of the state dict stay."""
        from underpaint.models.neo_unify.fused import FusedBody  # needs Triton

        body = self.language_model.model
        roles = [role for role in Role if f"norm{role.value}" in body]
        self._fused = FusedBody(body, self.config.language, roles)

    @property
    def fused(self) -> bool:
        return self._fused is not None

    @property
    def capturable(self) -> bool:
        """Whether a fused pass is the same sequence of kernels whatever its rows hold, so that a graph can be made."""
        return self._fused is not None and self._fused.capturable

    def embed_tokens(self, ids: Tensor) -> Tensor:
        """(rows,) int64 -> (rows, hidden_size), understanding."""
        return self.language_model.model["embed_tokens"](ids)

    def embed_cells(self, cells: Tensor, places: Tensor) -> Tensor:
        """Cells of pictures to read, (cells, 3072) normalised, at ``places`` (cells, 2) -> (cells, hidden_size)."""
        return self.vision_model(cells, places)

    def embed_targets(self, targets: Targets) -> Tensor:
        """(cells, hidden_size), generation: what is on the canvas, the time, and the scale of the noise."""
        times, noise_scales = targets.levels.unbind(dim=1)
        level = self._embed_numbers("timestep_embedder", times) + self._embed_numbers(
            "noise_scale_embedder", noise_scales / self.config.flow.noise_scale_max_value
        )
        rows = self.fm_modules["vision_model_mot_gen"](targets.state.to(level.dtype), targets.cells)
        return rows + targets.per_row(level)

    def _embed_numbers(self, name: str, numbers: Tensor) -> Tensor:
        """A zero rides along: with one line alone the products would be matrix-vector products, which sum in another
        order, and a picture would differ from itself in company."""
        return self.fm_modules[name](torch.cat([numbers, numbers.new_zeros(1)]))[:-1]

    def forward(self, rows: RoleRows, rotary: Tensor, attend: Attend) -> dict[Role, Tensor]:
        """Hidden rows after the final norm, by role. ``rotary``: (rows, head_dim / 2) complex64, of all rows.
        ``attend`` is a ``PackedAttend`` where the network is fused."""
        if self._fused is None:
            return self.language_model.model(rows, rotary, attend)
        assert isinstance(attend, PackedAttend), "a fused network writes keys and values itself"
        return self._fused(rows, rotary, attend)

    def understand(self, rows: Tensor, rotary: Tensor, attend: Attend) -> Tensor:
        """(rows, hidden_size) of understanding rows alone; keys and values reach the cache through ``attend``."""
        return self({Role.UNDERSTAND: rows}, rotary, attend)[Role.UNDERSTAND]

    def logits(self, hidden: Tensor) -> Tensor:
        """(rows, hidden_size) -> (rows, vocab_size)."""
        head = self.language_model.lm_head
        return self._fused.multiply(head, hidden) if self._fused else head(hidden)

    def predict(self, hidden: Tensor, targets: Targets) -> Tensor:
        """Velocity of every row of ``targets``, (cells, 3072), from their hidden rows, in the dtype of their state."""
        pixels = self.fm_modules["fm_head"](hidden, targets.grids)
        return velocity(pixels, targets.state, targets.per_row(targets.levels[:, 0])[:, None])
