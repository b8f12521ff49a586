"""The Python API that talks."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from underpaint.chat.answer import Answer, Ending
from underpaint.chat.dialogue import Dialogue, Reader
from underpaint.chat.options import MAX_PICTURES, AnswerOptions, PaintingOptions
from underpaint.chat.parts import Part
from underpaint.errors import BadParameter
from underpaint.images import ImageInput, read_image
from underpaint.models.neo_unify import FlowSampler
from underpaint.pipeline import load_service
from underpaint.request import as_images
from underpaint.service import Service


class Chat:
    """One dialogue after another with a SenseNova-U1. Token ids and painted tensors are kept between turns, so a
    later turn finds the dialogue in pages and nothing is made again from text or pixels.

    ``finish``: why the last answer ended: stop, length (of tokens) or pictures (no more were allowed).
    """

    def __init__(self, service: Service) -> None:
        """Use ``from_pretrained``, or share a service with a ``Pipeline``. Raises BadConfig for another family."""
        self.service = service
        self.finish: Ending | None = None
        self.ids: list[int] = []
        self.logits: list[Tensor] = []
        self._model = service.neo
        self._dialogue: Dialogue | None = None

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
        ``painting``: how pictures are painted, refused where none may be. ``seed``: of the noise of all pictures and
        of the tokens. ``forced_ids`` overrule the first tokens chosen. ``sampling``: the other fields of
        ``SamplingOptions``.

        Raises BadRequest before any work. The dialogue goes on from an answer that was read to its end; if it breaks
        or is abandoned, it stays where it was, and no page stays taken.
        """
        options = AnswerOptions.of(
            max_pictures=max_pictures, think=think, max_think_tokens=max_think_tokens, painting=painting, seed=seed,
            **sampling,
        )  # fmt: skip
        forced = self._forced(forced_ids)
        sampler = options.painting.sampler(self._model.checkpoint.defaults)
        pictures = [read_image(image, f"image {i + 1}") for i, image in enumerate(as_images(images))]
        reader = Reader(self._model, reads_only=not max_pictures, think=think)
        if isinstance(messages, str) and self._dialogue is not None:
            dialogue = reader.go_on(self._dialogue, messages, pictures)
        else:
            turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
            dialogue = reader.begin(turns, pictures)
        return self._answer(dialogue, options, sampler, forced)

    def _forced(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Raises BadParameter: on a GPU a token that there is not would break the device for all."""
        limit = self._model.config.language.vocab_size
        if not isinstance(ids, Sequence) or not all(type(token) is int and 0 <= token < limit for token in ids):
            raise BadParameter(f"forced_ids must be token ids below {limit}", param="forced_ids")
        return tuple(ids)

    def _answer(
        self, dialogue: Dialogue, options: AnswerOptions, sampler: FlowSampler, forced_ids: Sequence[int]
    ) -> Iterator[Part]:
        answer = Answer(self.service, dialogue, options, sampler, forced_ids)
        self.finish, self.ids, self.logits = None, answer.reply.ids, answer.reply.logits
        yield from answer.parts()
        self.finish, self._dialogue = answer.finish, answer.dialogue
