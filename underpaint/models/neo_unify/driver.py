"""The shortest way through everything NEO-Unify does: one request at a time, by greatest logit.

It is the plain statement of what the engines must compute, and the tests hold it to the reference values. Every pass,
whether it prefills, decodes, reads a painting back or denoises, is the transformer over packed rows with pages behind
it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from underpaint.attention import Prepare, RowGroup
from underpaint.kv.keeping import KeepingAttention
from underpaint.kv.pool import PagePool, Run, View, pages_for
from underpaint.layout import Grid
from underpaint.models.neo_unify.config import CELL, MAX_SIDE
from underpaint.models.neo_unify.flow import DEFAULT_TIMESTEP_SHIFT, FlowSampler, draw_noise, flow_times, noise_scale
from underpaint.models.neo_unify.model import NeoUnify
from underpaint.models.neo_unify.prompt import AFTER_THOUGHT, Passage
from underpaint.models.neo_unify.vision import Picture, painted_picture
from underpaint.models.painter import Target
from underpaint.request import check_side
from underpaint.sampling.guidance import Branch, Guidance, take


class Reading:
    """A passage, and pages with the keys and values of its rows that were read so far. ``last``: the hidden row
    (1, hidden_size) of the last of them. ``shared``: its first rows, in pages that belong to someone else."""

    def __init__(self, pool: PagePool, passage: Passage, shared: tuple[Run, ...] = ()) -> None:
        self.passage = passage
        self.last: Tensor | None = None
        self._pool = pool
        self._shared = shared
        self._own = Run((), 0)

    @property
    def num_rows(self) -> int:
        return sum(run.num_rows for run in (*self._shared, self._own))

    def view(self) -> View:
        """The rows read so far."""
        return View(self._pool, (*self._shared, self._own))

    def grow(self, num_rows: int) -> Tensor:
        """(num_rows,) slots for that many rows more, behind those read so far."""
        start, stop = self._own.num_rows, self._own.num_rows + num_rows
        num_pages = pages_for(stop, self._pool.page_rows) - len(self._own.pages)
        more = self._pool.allocate(num_pages * self._pool.page_rows)
        self._own = Run(self._own.pages + more.pages, stop)
        return self._pool.slots([self._own])[start:]

    def close(self) -> None:
        """Give the pages back."""
        self._pool.release(self._own)
        self._own = Run((), 0)


@dataclass(frozen=True)
class PaintOptions:
    """How to paint. ``size``: width and height in pixels, multiples of 32."""

    size: tuple[int, int]
    num_steps: int
    guidance: Guidance
    timestep_shift: float = DEFAULT_TIMESTEP_SHIFT

    def __post_init__(self) -> None:
        """Raises BadSize."""
        for name, side in zip(("width", "height"), self.size, strict=True):
            check_side(name, side, CELL, MAX_SIDE)

    @property
    def grid(self) -> Grid:
        return self.size[1] // CELL, self.size[0] // CELL

    @cached_property
    def sampler(self) -> FlowSampler:
        return FlowSampler(flow_times(self.num_steps, self.timestep_shift), self.guidance)


@dataclass(frozen=True)
class Answer:
    """``ids``: tokens, with ``<img>`` where a picture stands. ``logits``: what each was chosen from, (vocab_size,).
    ``pictures``: (cells, 3072) and grid of each."""

    ids: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    pictures: list[tuple[Tensor, Grid]] = field(default_factory=list)


class Driver:
    """A model, a page pool and a choice of attention."""

    def __init__(self, model: NeoUnify, pool: PagePool, backend: Prepare) -> None:
        self.model = model
        self._pool = pool
        self._backend = backend

    @contextmanager
    def open(self, passage: Passage, shared: tuple[Run, ...] = ()) -> Iterator[Reading]:
        """A reading of ``passage``, of which only ``shared`` is read yet; its own pages are given back at the end."""
        reading = Reading(self._pool, passage, shared)
        try:
            yield reading
        finally:
            reading.close()

    @contextmanager
    def prefill(
        self, passages: Mapping[Branch, Passage], branches: Iterable[Branch], max_think_tokens: int | None = None
    ) -> Iterator[dict[Branch, Reading]]:
        """Read the passages of ``branches``, and of no others. With ``max_think_tokens`` the conditional one ends
        where a thought begins, and the model thinks before it paints."""
        with ExitStack() as stack:
            readings = {branch: stack.enter_context(self.open(take(passages, branch))) for branch in branches}
            for reading in readings.values():
                self.read(reading)
            if max_think_tokens is not None:
                self.think(readings[Branch.CONDITIONAL], max_think_tokens)
            yield readings

    @torch.inference_mode()
    def read(self, reading: Reading, stop: int | None = None) -> None:
        """Read on up to row ``stop`` (None: to the end) in one pass. ``stop`` never lies inside a picture."""
        passage, start, prefix = reading.passage, reading.num_rows, reading.view()
        stop = passage.num_rows if stop is None else stop
        attend_prepared = self._backend((RowGroup.of(passage.layout, stop, 0, prefix, self.model.device),))
        attend = KeepingAttention(self._pool, reading.grow(stop - start), attend_prepared)
        rows = self.model.embed(passage, start, stop)
        hidden = self.model.network.understand(rows, self.model.rotary(passage.layout, start, stop), attend)
        reading.last = hidden[-1:]

    def append(self, reading: Reading, *more: tuple[int, ...] | Picture) -> None:
        """Add text and pictures to a passage, and read them in one pass."""
        reading.passage = reading.passage.followed_by(*more)
        self.read(reading)

    @torch.inference_mode()
    def next_logits(self, reading: Reading) -> Tensor:
        """(vocab_size,) for the token that follows what was read."""
        assert reading.last is not None, "nothing was read yet"
        return self.model.network.logits(reading.last)[0]

    def decode(self, reading: Reading, limit: int, stops: Sequence[int]) -> Answer:
        """Up to ``limit`` tokens by greatest logit. The first of ``stops`` ends the answer; it is not read."""
        answer = Answer()
        while len(answer.ids) < limit:
            logits = self.next_logits(reading)
            token = int(logits.argmax())
            answer.ids.append(token)
            answer.logits.append(logits)
            if token in stops:
                break
            self.append(reading, (token,))
        return answer

    def think(self, reading: Reading, limit: int) -> list[int]:
        """Let the model think for up to ``limit`` tokens, and bring it to where the picture begins."""
        tokenizer = self.model.tokenizer
        thought = self.decode(reading, limit, (tokenizer.think_stop, tokenizer.turn_stop)).ids
        closing = (tokenizer.think_stop,) if tokenizer.think_stop in thought else ()
        self.append(reading, (*closing, *tokenizer.tokenize(AFTER_THOUGHT)))
        return thought

    @torch.inference_mode()
    def velocities(
        self, readings: Mapping[Branch, Reading], state: Tensor, grid: Grid, time: Tensor
    ) -> dict[Branch, Tensor]:
        """One pass over a picture as every branch sees it; velocity (cells, 3072) of each."""
        groups: list[RowGroup] = []
        rotary: list[Tensor] = []
        for reading in readings.values():
            layout, view = reading.passage.layout.with_image(grid), reading.view()
            groups.append(RowGroup.of(layout, layout.num_rows, len(groups) * len(state), view, self.model.device))
            rotary.append(self.model.rotary(layout, view.num_rows, layout.num_rows))
        nothing_kept = self._pool.slots(())
        attend = KeepingAttention(self._pool, nothing_kept, self._backend(tuple(groups)))
        targets = [Target(state, grid, time)] * len(readings)
        velocities = self.model.run(torch.empty(0), targets, torch.cat(rotary), attend)
        return dict(zip(readings, velocities, strict=True))

    def paint(self, readings: Mapping[Branch, Reading], options: PaintOptions, generator: torch.Generator) -> Tensor:
        """A picture (cells, 3072), in about [-1, 1], painted behind the branches' prefixes."""
        scale = noise_scale(self.model.config.flow, options.grid)
        state = draw_noise(generator, options.grid, scale, self.model.dtype).to(self.model.device)
        sampler = options.sampler
        for step in range(sampler.num_steps):
            needed = {branch: take(readings, branch) for branch in sampler.branches(step)}
            velocities = self.velocities(needed, state, options.grid, sampler.level(step))
            state = sampler.advance(state, velocities, step)
        return state

    def interleave(
        self,
        passages: Mapping[Branch, Passage],
        paintings: Sequence[PaintOptions],
        generator: torch.Generator,
        limit: int,
        forced_ids: Sequence[int] = (),
    ) -> Answer:
        """An answer of up to ``limit`` tokens and ``len(paintings)`` pictures, all drawn from one generator.

        ``forced_ids`` overrule the first choices of tokens. A picture is read back into the branches that follow the
        dialogue; the unconditional one stays as it is.
        """
        answer, forced, tokenizer = Answer(), iter(forced_ids), self.model.tokenizer
        needed = {branch for options in paintings for branch in options.sampler.every_branch}
        with self.prefill(passages, [branch for branch in Branch if branch in needed]) as readings:
            conditional = readings[Branch.CONDITIONAL]
            while len(answer.ids) < limit:
                logits = self.next_logits(conditional)
                token = next(forced, int(logits.argmax()))
                answer.ids.append(token)
                answer.logits.append(logits)
                if token == tokenizer.turn_stop:
                    break
                if token != tokenizer.image_start:
                    self.append(conditional, (token,))
                elif len(answer.pictures) == len(paintings):
                    break
                else:
                    options = paintings[len(answer.pictures)]
                    answer.pictures.append((self._paint_within(readings, options, generator), options.grid))
        return answer

    def _paint_within(
        self, readings: Mapping[Branch, Reading], options: PaintOptions, generator: torch.Generator
    ) -> Tensor:
        """Open a picture in the branches that follow the dialogue, paint it, and read it back into them."""
        tokenizer = self.model.tokenizer
        dialogue = [reading for branch, reading in readings.items() if branch is not Branch.UNCONDITIONAL]
        for reading in dialogue:
            self.append(reading, (tokenizer.image_start,))
        cells = self.paint(readings, options, generator)
        for reading in dialogue:
            self.append(reading, painted_picture(cells, options.grid), (tokenizer.image_stop,))
        return cells
