"""Dialogues with a model that talks and paints: text and pictures as they come."""

import secrets
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor

from underpaint.errors import BadParameter
from underpaint.generation.job import Job, Order
from underpaint.generation.previews import Previews
from underpaint.images import ImageInput, fit_to_area, read_image, to_picture
from underpaint.layout import Grid
from underpaint.models.loading import Defaults
from underpaint.models.neo_unify import EditGuidance, FlowSampler, Passage, Picture
from underpaint.models.neo_unify.config import CELL, MAX_SIDE
from underpaint.models.neo_unify.flow import DEFAULT_TIMESTEP_SHIFT, draw_noise, flow_times, noise_scale
from underpaint.models.neo_unify.prompt import (
    IMAGE_START,
    IMAGE_TAG,
    NO_THOUGHT,
    OPEN_THOUGHT,
    Message,
    chat_text,
    check_tags,
    pictures_text,
    with_tags,
)
from underpaint.models.neo_unify.vision import PixelBounds, painted_picture, read_picture, reference_bounds, to_pixels
from underpaint.pipeline import load_service
from underpaint.request import as_images, check_count, check_int, check_shift, check_side, check_text, check_think
from underpaint.sampling.guidance import Branch, take
from underpaint.service import Service, finish
from underpaint.studio.neo_unify import DEFAULT_THINK_TOKENS
from underpaint.understanding.reply import Reply
from underpaint.understanding.sampler import SamplingOptions, TokenSampler

MAX_PICTURES = 10
OWN_SIZE = PixelBounds(CELL * CELL, MAX_SIDE * MAX_SIDE)
AFTER_CLOSED_THOUGHT = "\n\n"


@dataclass(frozen=True)
class TextPart:
    """A piece of text, to be joined to the one before; ``thought`` if it is not for the reader."""

    text: str
    thought: bool = False


@dataclass(frozen=True, eq=False)
class PicturePart:
    """A painted picture. ``pixels``: raw, (3, height, width), in about [-1, 1]."""

    image: Image.Image
    pixels: Tensor


@dataclass(frozen=True, eq=False)
class PreviewPart:
    """What the next picture will look like, while it is painted; ``number`` counts its previews from 0."""

    image: Image.Image
    number: int


Part = TextPart | PicturePart | PreviewPart


@dataclass(frozen=True)
class PaintingOptions:
    """How the pictures of an answer are painted. ``guidance_scale`` and ``num_inference_steps``: None for the
    checkpoint's own. ``sizes``: (width, height) of each in turn, the last one for the
    rest; empty for the last picture's ratio at the checkpoint's own area. ``num_previews``: of each, fewer where it has
    too few steps."""

    guidance_scale: float | None = None
    image_guidance_scale: float = 1.0
    cfg_norm: str = "none"
    cfg_interval: tuple[float, float] = (0.0, 1.0)
    timestep_shift: float = DEFAULT_TIMESTEP_SHIFT
    num_inference_steps: int | None = None
    sizes: tuple[tuple[int, int], ...] = ()
    num_previews: int = 0

    def __post_init__(self) -> None:
        check_shift(self.timestep_shift)
        if self.num_inference_steps is not None:
            check_count("num_inference_steps", self.num_inference_steps)
        if check_int("num_previews", self.num_previews) < 0:
            raise BadParameter("num_previews cannot be negative", param="num_previews")
        if not all(isinstance(size, tuple | list) and len(size) == 2 for size in self.sizes):
            raise BadParameter(f"sizes must be pairs of width and height, not {self.sizes!r}", param="sizes")
        for width, height in self.sizes:
            check_side("width", width, CELL, MAX_SIDE)
            check_side("height", height, CELL, MAX_SIDE)

    def sampler(self, defaults: Defaults) -> FlowSampler:
        """Raises BadParameter for scales, norms and intervals that cannot be honoured."""
        scale = defaults.guidance_scale if self.guidance_scale is None else self.guidance_scale
        guidance = EditGuidance(scale, self.image_guidance_scale, self.cfg_norm, self.cfg_interval)  # type: ignore[arg-type]
        num_steps = self.num_inference_steps or defaults.num_inference_steps
        return FlowSampler(flow_times(num_steps, self.timestep_shift), guidance)


@dataclass(eq=False)
class Answer:
    """An answer in progress, and the branches that its pictures are painted from."""

    reply: Reply
    branches: dict[Branch, Reply]
    generator: torch.Generator
    ids: list[int] = field(default_factory=list)
    num_pictures: int = 0

    @property
    def following(self) -> list[Reply]:
        """The branches that follow the dialogue; the unconditional one stays as it is."""
        return [branch for name, branch in self.branches.items() if name is Branch.PICTURES]


class Chat:
    """One dialogue after another with a SenseNova-U1. Token ids and painted tensors are kept between turns, so a
    later turn finds the dialogue in pages and nothing is made again from text or pixels.

    ``finish``: why the last answer ended: stop, length (of tokens) or pictures (no more were allowed).
    """

    def __init__(self, service: Service) -> None:
        """Use ``from_pretrained``, or share a service with a ``Pipeline``. Raises BadConfig for another family."""
        self.service = service
        self.finish: Literal["stop", "length", "pictures"] | None = None
        self.ids: list[int] = []
        self.logits: list[Tensor] = []
        self._model = service.neo
        self._tokenizer = self._model.tokenizer
        self._dialogue: Passage | None = None
        self._pictures: list[Picture] = []
        self._last_ratio = (1, 1)

    @classmethod
    def from_pretrained(cls, path: str | Path, **options: Any) -> "Chat":
        """Load a checkpoint; ``options`` are the fields of ``EngineConfig``. Raises CheckpointError or BadConfig."""
        return cls(load_service(path, options))

    def send(
        self,
        messages: str | Sequence[Mapping[str, str]],
        images: Sequence[ImageInput] = (),
        *,
        max_pictures: int = MAX_PICTURES,
        think: bool = False,
        max_think_tokens: int | None = None,
        painting: PaintingOptions | None = None,
        seed: int | None = None,
        forced_ids: Sequence[int] = (),
        **sampling: Any,
    ) -> Iterator[Part]:
        """Ask, and get the answer part by part as it is written and painted.

        ``messages``: a text goes on with the dialogue; a list of {"role": "system" | "user" | "assistant",
        "content": text} begins a new one. ``images`` take the places of ``<image>`` in the texts, in order; those
        without a place come before the last text. ``max_pictures``: how many the answer may have, up to 10; 0 asks
        for text only. ``think``: let the model write a thought of up to ``max_think_tokens`` first (None: 1024).
        ``seed``: of the noise of all pictures and of the tokens. ``forced_ids`` overrule the first tokens chosen.
        ``sampling``: the other fields of ``SamplingOptions``.

        Raises BadRequest before any work. The dialogue goes on from an answer that was read to its end; if it breaks
        or is abandoned, it stays where it was, and no page stays taken.
        """
        if not 0 <= check_int("max_pictures", max_pictures) <= MAX_PICTURES:
            raise BadParameter(
                f"max_pictures is {max_pictures}; it must be from 0 to {MAX_PICTURES}", param="max_pictures"
            )
        think_tokens = _think_tokens(think, max_think_tokens)
        forced = self._forced(forced_ids)
        seed = secrets.randbits(32) if seed is None else seed
        options = _sampling_options({"seed": seed, **sampling})
        painting = painting or PaintingOptions()
        sampler = painting.sampler(self._model.checkpoint.defaults)
        pictures = [read_image(image, f"image {i + 1}") for i, image in enumerate(as_images(images))]
        start = self._opening(messages, pictures, reads_only=not max_pictures, think=think)
        generator = torch.Generator("cpu").manual_seed(seed)
        return self._answer(start, options, sampler, painting, max_pictures, think_tokens, generator, forced)

    def _forced(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Raises BadParameter: on a GPU a token that there is not would break the device for all."""
        limit = self._model.config.language.vocab_size
        if not all(isinstance(token, int) and 0 <= token < limit for token in ids):
            raise BadParameter(f"forced_ids must be token ids below {limit}", param="forced_ids")
        return tuple(ids)

    def _opening(
        self, messages: str | Sequence[Mapping[str, str]], images: list[Image.Image], reads_only: bool, think: bool
    ) -> "Opening":
        """The dialogue up to where the assistant answers."""
        bounds = reference_bounds(len(images))

        def read(image: Image.Image) -> Picture:
            return self._model.question_picture(image) if reads_only else read_picture(image, bounds)

        suffix = OPEN_THOUGHT if think else "" if reads_only else NO_THOUGHT
        ratio = images[-1].size if images else (1, 1) if not isinstance(messages, str) else self._last_ratio
        if isinstance(messages, str) and self._dialogue is not None:
            check_text("messages", messages)
            turn = chat_text([Message("user", _placed(messages, check_tags(messages, len(images)), reads_only))])
            new = [read(image) for image in images]
            more = self._tokenizer.passage(f"\n{turn}{suffix}", new)
            passage = self._dialogue.followed_by((self._tokenizer.turn_stop,), *more.parts)
            return Opening(passage, [*self._pictures, *new], ratio)
        turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        system, dialogue = _read_messages(turns)
        check_tags(system, 0)
        missing = check_tags(" ".join(message.text for message in dialogue), len(images))
        dialogue[-1] = Message("user", _placed(dialogue[-1].text, missing, reads_only))
        speakers = [message.speaker for message in dialogue for _ in range(message.text.count(IMAGE_TAG))]
        # What an answer painted is read back at the size it has, as where the dialogue was held here.
        new = [
            read_picture(image, OWN_SIZE) if speaker == "assistant" else read(image)
            for image, speaker in zip(images, speakers, strict=True)
        ]
        passage = self._tokenizer.passage(chat_text(dialogue, system) + suffix, new)
        return Opening(passage, new, ratio)

    def _answer(
        self,
        start: "Opening",
        options: SamplingOptions,
        sampler: FlowSampler,
        painting: PaintingOptions,
        max_pictures: int,
        think_tokens: int,
        generator: torch.Generator,
        forced_ids: Sequence[int],
    ) -> Iterator[Part]:
        tokenizer = self._tokenizer
        self.finish, self.ids, self.logits = None, [], []
        reply = Reply(
            start.passage,
            TokenSampler.of(options, start.passage.ids),
            stop_tokens=frozenset({tokenizer.turn_stop}),
            pause_tokens=frozenset({tokenizer.image_start}),
            forced=iter(forced_ids),
            keep_logits=bool(forced_ids),
        )
        pictures, ratio = start.pictures, start.ratio
        with ExitStack() as stack:
            if think_tokens:
                yield from self._think(reply, think_tokens, stack)
            self._submit(reply, stack)
            others = self._other_branches(sampler, pictures, stack, max_pictures, reply.born)
            answer = Answer(reply, others, generator)
            while True:
                yield from self._text(reply)
                self.ids, self.logits = reply.ids, reply.logits
                if reply.finish != "pause":
                    self.finish = "length" if reply.finish == "length" else "stop"
                    break
                if answer.num_pictures == max_pictures:
                    self.finish = "pictures"
                    break
                grid = self._grid(painting, answer.num_pictures, ratio)
                picture, ratio = yield from self._paint(answer, sampler, grid, painting.num_previews)
                pictures = [*pictures, picture]
                if len(reply.ids) >= options.max_tokens:
                    self.finish = "length"
                    break
        passage = reply.passage.without_last_token if self.finish == "pictures" else reply.passage  # <img>, of nothing
        self._dialogue, self._pictures, self._last_ratio = passage, pictures, ratio

    def _text(self, reply: Reply, thought: bool = False) -> Iterator[TextPart]:
        for _ in self.service.rest_reply(reply):
            for text in reply.take_deltas():
                yield TextPart(text, thought)
        for text in reply.take_deltas():
            yield TextPart(text, thought)

    def _submit(self, reply: Reply, stack: ExitStack) -> None:
        """Queue a reply that is dropped when the answer is over."""
        self.service.submit_reply(reply)
        stack.callback(self.service.drop_reply, reply)

    def _think(self, reply: Reply, limit: int, stack: ExitStack) -> Iterator[TextPart]:
        """Write a thought, close it if the model did not, and let ``reply`` begin behind it. Its tokens are chosen as
        those of the answer are; stop texts end the answer only."""
        tokenizer = self._tokenizer
        stop = tokenizer.think_stop
        assert reply.sampler is not None
        options = replace(reply.sampler.options, max_tokens=limit, stop=())
        thought = Reply(
            reply.passage,
            replace(reply.sampler, options=options),  # what it has seen and drawn is also the answer's past
            stop_tokens=frozenset({tokenizer.turn_stop}),
            pause_tokens=frozenset({stop}),
            born=reply.born,
        )
        self._submit(thought, stack)
        yield from self._text(thought, thought=True)
        self.service.drop_reply(thought)
        closing = () if thought.finish == "pause" else (stop,)
        after = tokenizer.tokenize(AFTER_CLOSED_THOUGHT)
        reply.passage = thought.passage.followed_by((*closing, *after))

    def _other_branches(
        self, sampler: FlowSampler, pictures: list[Picture], stack: ExitStack, max_pictures: int, born: float
    ) -> dict[Branch, Reply]:
        """Readings of the other branches that guidance needs, none if nothing may be painted."""
        if not max_pictures:
            return {}
        passages = {
            Branch.PICTURES: self._tokenizer.passage(pictures_text(len(pictures)), pictures),
            Branch.UNCONDITIONAL: self._tokenizer.passage(pictures_text(0) + IMAGE_START),
        }
        needed = [branch for branch in passages if branch in sampler.every_branch]
        replies = {branch: Reply(passages[branch], born=born) for branch in needed}
        for reply in replies.values():
            self._submit(reply, stack)
        return replies

    def _paint(
        self, answer: Answer, sampler: FlowSampler, grid: Grid, num_previews: int
    ) -> Generator[Part, None, tuple[Picture, tuple[int, int]]]:
        """Paint where the answer paused, from the pages of its branches, and read the picture back into them. Returns
        it as it was read, and its width and height."""
        tokenizer, model = self._tokenizer, self._model
        for branch in answer.following:
            self._rest(branch)
            self.service.resume_reply(branch, (tokenizer.image_start,))
        replies = {Branch.CONDITIONAL: answer.reply, **answer.branches}
        used = {branch: take(replies, branch) for branch in sampler.every_branch}
        noise = draw_noise(answer.generator, grid, noise_scale(model.config.flow, grid), model.dtype).to(model.device)
        job = Job(noise, grid, sampler, {branch: i for i, branch in enumerate(used)})
        conditions = tuple(model.condition(reply.passage) for reply in used.values())
        order = Order(conditions, (job,), lease=finish(self.service.borrow(list(used.values()))))
        previews = Previews(order, num_previews)
        self.service.submit_order(order)
        with closing(self.service.finish_order(order)) as turns:
            for _ in turns:
                yield from (PreviewPart(_shown(to_pixels(seen.state, grid)), seen.number) for seen in previews.take())
        picture = painted_picture(job.state, grid)
        for branch in [answer.reply, *answer.following]:
            self.service.resume_reply(branch, picture, (tokenizer.image_stop,))
        answer.num_pictures += 1
        pixels = to_pixels(job.state, grid)
        part = PicturePart(_shown(pixels), pixels)
        yield part
        return picture, part.image.size

    def _rest(self, reply: Reply) -> None:
        finish(self.service.rest_reply(reply))

    def _grid(self, painting: PaintingOptions, index: int, ratio: tuple[int, int]) -> Grid:
        if painting.sizes:
            width, height = painting.sizes[min(index, len(painting.sizes) - 1)]
        else:
            width, height = fit_to_area(*ratio, self._model.checkpoint.defaults.reference_resolution, CELL)
        return height // CELL, width // CELL


@dataclass(frozen=True, eq=False)
class Opening:
    """A dialogue up to where the assistant answers, all its pictures, and the ratio of the last one."""

    passage: Passage
    pictures: list[Picture]
    ratio: tuple[int, int]


def _shown(pixels: Tensor) -> Image.Image:
    return to_picture((pixels.float() * 0.5 + 0.5).clamp(0, 1))


def _placed(text: str, missing: int, reads_only: bool) -> str:
    """The text of a turn with tags for its ``missing`` pictures in front, numbered only where they may be edited."""
    return f"{IMAGE_TAG}\n" * missing + text if reads_only else with_tags(text, text.count(IMAGE_TAG) + missing)


def _think_tokens(think: bool, limit: int | None) -> int:
    """How many tokens a thought may have, 0 for none. Raises BadParameter."""
    check_think(think)
    if limit is None:
        return DEFAULT_THINK_TOKENS if think else 0
    if check_count("max_think_tokens", limit) and not think:
        raise BadParameter("max_think_tokens has no effect without think", param="max_think_tokens")
    return limit


def _sampling_options(sampling: Mapping[str, Any]) -> SamplingOptions:
    known = set(SamplingOptions.__dataclass_fields__)
    if unknown := sampling.keys() - known:
        raise BadParameter(f"unknown parameters: {', '.join(sorted(unknown))}; known are {', '.join(sorted(known))}")
    values = dict(sampling)
    if isinstance(values.get("stop"), list):
        values["stop"] = tuple(values["stop"])
    return SamplingOptions(**values)


def _read_messages(messages: Sequence[Mapping[str, str]]) -> tuple[str, list[Message]]:
    """The system message, and the turns. Raises BadParameter."""
    system = ""
    dialogue: list[Message] = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise BadParameter(f"message {i + 1} must have a role and a text as content", param="messages")
        role, content = message.get("role"), message.get("content")
        if message.keys() - {"role", "content"} or not isinstance(content, str):
            raise BadParameter(f"message {i + 1} must have a role and a text as content", param="messages")
        check_text("messages", content)
        if role == "system" and i == 0:
            system = content
        elif role == "user":
            dialogue.append(Message("user", content))
        elif role == "assistant":
            dialogue.append(Message("assistant", content))
        else:
            raise BadParameter(f"message {i + 1} has the role {role!r}; use user, assistant, or system first")
    if not dialogue or dialogue[-1].speaker != "user":
        raise BadParameter("the last message must be the user's", param="messages")
    return system, dialogue
