"""An answer in progress: text as it is written, pictures as they are painted from its pages."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Literal

import torch

from underpaint.chat.dialogue import Dialogue
from underpaint.chat.options import AnswerOptions
from underpaint.chat.parts import Part, PicturePart, PreviewPart, TextPart, shown
from underpaint.generation.job import Job, Order
from underpaint.generation.previews import Previews
from underpaint.images import check_finite, fit_to_area
from underpaint.layout import Grid
from underpaint.models.neo_unify import CELL, FlowSampler
from underpaint.models.neo_unify.flow import draw_noise, noise_scale
from underpaint.models.neo_unify.prompt import IMAGE_START, pictures_text
from underpaint.models.neo_unify.vision import painted_picture, to_pixels
from underpaint.sampling.guidance import Branch, take
from underpaint.service import Service, finish
from underpaint.understanding.reply import Reply
from underpaint.understanding.sampler import TokenSampler

Ending = Literal["stop", "length", "pictures"]
"""Why an answer ended: the model ended it or a stop text did, too many tokens, or no more pictures were allowed."""
AFTER_CLOSED_THOUGHT = "\n\n"


class Answer:
    """The answer to ``dialogue``. ``reply`` writes it; ``finish`` is None until it has ended by itself."""

    def __init__(
        self,
        service: Service,
        dialogue: Dialogue,
        options: AnswerOptions,
        sampler: FlowSampler,
        forced_ids: Sequence[int] = (),
    ) -> None:
        """``sampler``: of its pictures. ``forced_ids`` overrule the first tokens chosen, whose logits are then kept."""
        self.finish: Ending | None = None
        self._service = service
        self._model = service.neo
        self._begun = dialogue
        self._ratio = dialogue.ratio
        self._options = options
        self._sampler = sampler
        self._generator = torch.Generator("cpu").manual_seed(options.seed)
        self._num_pictures = 0
        self._branches: dict[Branch, Reply] = {}
        tokenizer = self._model.tokenizer
        self.reply = Reply(
            dialogue.passage,
            TokenSampler.of(options.sampling, dialogue.passage.ids),
            stop_tokens=frozenset({tokenizer.turn_stop}),
            pause_tokens=frozenset({tokenizer.image_start}),
            forced=iter(forced_ids),
            keep_logits=bool(forced_ids),
        )

    @property
    def dialogue(self) -> Dialogue:
        """The dialogue with this answer, which has ended. An ``<img>`` that nothing follows is not part of it."""
        passage = self.reply.passage
        return Dialogue(passage.without_last_token if self.finish == "pictures" else passage, self._ratio)

    def parts(self) -> Iterator[Part]:
        """Make it. However this ends, no page stays taken."""
        with ExitStack() as stack:
            if self._options.think_tokens:
                yield from self._think(stack)
            self._submit(self.reply, stack)
            if self._options.max_pictures:
                self._branches = self._other_branches(stack)
            while self.finish is None:
                yield from self._text(self.reply)
                self.finish = self._ending()
                if self.finish is None:
                    yield from self._paint()
                    if len(self.reply.ids) >= self._options.sampling.max_tokens:
                        self.finish = "length"

    def _ending(self) -> Ending | None:
        """Why there is nothing behind the text that was written; None: there is a picture."""
        rested_as = self._service.rested_as(self.reply)
        if rested_as != "pause":
            return "length" if rested_as == "length" else "stop"
        return "pictures" if self._num_pictures == self._options.max_pictures else None

    def _text(self, reply: Reply, thought: bool = False) -> Iterator[TextPart]:
        for _ in self._service.rest_reply(reply):
            for text in reply.take_deltas():
                yield TextPart(text, thought)
        for text in reply.take_deltas():
            yield TextPart(text, thought)

    def _submit(self, reply: Reply, stack: ExitStack) -> None:
        """Queue a reply that is dropped when the answer is over."""
        self._service.submit_reply(reply)
        stack.callback(self._service.drop_reply, reply)

    def _think(self, stack: ExitStack) -> Iterator[TextPart]:
        """Write a thought, close it if the model did not, and let the reply begin behind it. Its tokens are chosen as
        those of the answer are; stop texts end the answer only."""
        tokenizer, reply = self._model.tokenizer, self.reply
        stop = tokenizer.think_stop
        assert reply.sampler is not None
        options = replace(reply.sampler.options, max_tokens=self._options.think_tokens, stop=())
        thought = Reply(
            reply.passage,
            replace(reply.sampler, options=options),  # what it has seen and drawn is also the answer's past
            stop_tokens=frozenset({tokenizer.turn_stop}),
            pause_tokens=frozenset({stop}),
            born=reply.born,
        )
        self._submit(thought, stack)
        yield from self._text(thought, thought=True)
        self._service.drop_reply(thought)
        end = () if self._service.rested_as(thought) == "pause" else (stop,)
        reply.passage = thought.passage.followed_by((*end, *tokenizer.tokenize(AFTER_CLOSED_THOUGHT)))

    def _other_branches(self, stack: ExitStack) -> dict[Branch, Reply]:
        """Readings of the other branches that guidance needs."""
        tokenizer, pictures = self._model.tokenizer, self._begun.pictures
        passages = {
            Branch.PICTURES: tokenizer.passage(pictures_text(len(pictures)), pictures),
            Branch.UNCONDITIONAL: tokenizer.passage(pictures_text(0) + IMAGE_START),
        }
        needed = [branch for branch in passages if branch in self._sampler.every_branch]
        replies = {branch: Reply(passages[branch], born=self.reply.born) for branch in needed}
        for reply in replies.values():
            self._submit(reply, stack)
        return replies

    def _paint(self) -> Iterator[Part]:
        """Paint where the answer paused, from the pages of its branches, and read the picture back into those that
        follow the dialogue; the unconditional one stays as it is."""
        tokenizer, service = self._model.tokenizer, self._service
        following = [reply for branch, reply in self._branches.items() if branch is Branch.PICTURES]
        for reply in following:
            finish(service.rest_reply(reply))
            service.resume_reply(reply, (tokenizer.image_start,))
        order = self._order()
        (job,) = order.jobs
        previews = Previews(order, self._options.painting.num_previews)
        service.submit_order(order)
        with closing(service.finish_order(order)) as turns:
            for _ in turns:
                for seen in previews.take():
                    yield PreviewPart(shown(to_pixels(seen.state, job.grid)), seen.number)
        pixels = check_finite(to_pixels(job.state, job.grid))
        picture = painted_picture(job.state, job.grid)
        for reply in (self.reply, *following):
            service.resume_reply(reply, picture, (tokenizer.image_stop,))
        part = PicturePart(shown(pixels), pixels)
        self._num_pictures, self._ratio = self._num_pictures + 1, part.image.size
        yield part

    def _order(self) -> Order:
        """The next picture, from the pages of all branches, which rest."""
        model, grid = self._model, self._grid()
        every = {Branch.CONDITIONAL: self.reply, **self._branches}
        used = {branch: take(every, branch) for branch in self._sampler.every_branch}
        scale = noise_scale(model.config.flow, grid)
        noise = draw_noise(self._generator, grid, scale, model.dtype).to(model.device)
        job = Job(noise, grid, self._sampler, {branch: i for i, branch in enumerate(used)})
        conditions = tuple(model.condition(reply.passage) for reply in used.values())
        return Order(conditions, (job,), lease=finish(self._service.borrow(list(used.values()))))

    def _grid(self) -> Grid:
        """Of the next picture."""
        sizes = self._options.painting.sizes
        if sizes:
            width, height = sizes[min(self._num_pictures, len(sizes) - 1)]
        else:
            width, height = fit_to_area(*self._ratio, self._model.checkpoint.defaults.reference_resolution, CELL)
        return height // CELL, width // CELL
