"""The whole network of NEO-Unify under its released tensor names, and what goes in and comes out of its transformer."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from underpaint.layout import Grid
from underpaint.models.neo_unify.config import BOTH_ROLES, NeoConfig, Role
from underpaint.models.neo_unify.flow import ConvHead, MlpHead, NumberEmbedding, velocity
from underpaint.models.neo_unify.transformer import LanguageModel, RoleRows
from underpaint.models.neo_unify.vision import CellEmbedding, cell_places
from underpaint.models.painter import Attend


@dataclass(frozen=True, eq=False)
class Targets:
    """Pictures that are being painted, one after another: the generation rows of a pass.

    ``state``: (cells, 3072). ``grids``: one a picture. ``times`` and ``noise_scales``: (pictures,) fp32. A picture
    with several guidance branches is here once for each.
    """

    state: Tensor
    grids: tuple[Grid, ...]
    times: Tensor
    noise_scales: Tensor

    @property
    def sizes(self) -> list[int]:
        """Cells of each picture."""
        return [height * width for height, width in self.grids]

    def per_row(self, values: Tensor) -> Tensor:
        """(pictures, ...) -> (cells, ...): every row has its picture's value."""
        sizes = torch.tensor(self.sizes, device=values.device)
        return values.repeat_interleave(sizes, dim=0, output_size=len(self.state))


class NeoUnifyNetwork(nn.Module):
    """Pieces to build passes from: embed, run the transformer, predict. Rows are packed, see ``transformer``.

    A network for one role has, and loads, that role's tensors only.
    """

    def __init__(self, config: NeoConfig, roles: frozenset[Role] = BOTH_ROLES) -> None:
        super().__init__()
        self.config = config
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

    def embed_tokens(self, ids: Tensor) -> Tensor:
        """(rows,) int64 -> (rows, hidden_size), understanding."""
        return self.language_model.model["embed_tokens"](ids)

    def embed_cells(self, cells: Tensor, places: Tensor) -> Tensor:
        """Cells of pictures to read, (cells, 3072) normalised, at ``places`` (cells, 2) -> (cells, hidden_size)."""
        return self.vision_model(cells, places)

    def embed_targets(self, targets: Targets) -> Tensor:
        """(cells, hidden_size), generation: what is on the canvas, the time, and the scale of the noise."""
        places = torch.cat([cell_places(grid) for grid in targets.grids]).to(targets.state.device)
        level = self._embed_numbers("timestep_embedder", targets.times) + self._embed_numbers(
            "noise_scale_embedder", targets.noise_scales / self.config.flow.noise_scale_max_value
        )
        rows = self.fm_modules["vision_model_mot_gen"](targets.state.to(level.dtype), places)
        return rows + targets.per_row(level)

    def _embed_numbers(self, name: str, numbers: Tensor) -> Tensor:
        """A zero rides along: with one line alone the products would be matrix-vector products, which sum in another
        order, and a picture would differ from itself in company."""
        return self.fm_modules[name](torch.cat([numbers, numbers.new_zeros(1)]))[:-1]

    def forward(self, rows: RoleRows, rotary: Tensor, attend: Attend) -> dict[Role, Tensor]:
        """Hidden rows after the final norm, by role. ``rotary``: (rows, head_dim / 2) complex64, of all rows."""
        return self.language_model.model(rows, rotary, attend)

    def understand(self, rows: Tensor, rotary: Tensor, attend: Attend) -> Tensor:
        """(rows, hidden_size) of understanding rows alone; keys and values reach the cache through ``attend``."""
        return self({Role.UNDERSTAND: rows}, rotary, attend)[Role.UNDERSTAND]

    def logits(self, hidden: Tensor) -> Tensor:
        """(rows, hidden_size) -> (rows, vocab_size)."""
        return self.language_model.lm_head(hidden)

    def predict(self, hidden: Tensor, targets: Targets) -> Tensor:
        """Velocity of every row of ``targets``, (cells, 3072), from their hidden rows, in the dtype of their state."""
        pixels = self.fm_modules["fm_head"](hidden, targets.grids)
        return velocity(pixels, targets.state, targets.per_row(targets.times)[:, None])
