"""From logits to a token."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from underpaint.errors import BadParameter
from underpaint.request import MAX_SEED, check_count, check_int, check_text

CUT = "\ufffd"
"""What a character that is cut in the middle decodes to."""
NO_TOKEN = -1
"""On the device: what stands for a token where none can be chosen, see ``likeliest_tokens``."""


@dataclass(frozen=True)
class SamplingOptions:
    """How to choose tokens, and when to stop.

    ``temperature`` 0 is greedy. ``top_p`` keeps the likeliest tokens that together reach that probability, ``top_k``
    the k likeliest (0: all). ``repetition_penalty`` divides the positive logits of tokens that the dialogue or the
    answer already has, and multiplies negative ones (arXiv 1909.05858); 1 is none. ``stop``: texts that end the
    answer, not part of it. ``seed``: None draws one.
    """

    max_tokens: int = 1024
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        check_count("max_tokens", self.max_tokens)
        _check_range("temperature", self.temperature, 0.0)
        _check_range("top_p", self.top_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0)
        for name in ("top_p", "repetition_penalty"):
            if getattr(self, name) == 0:
                raise BadParameter(f"{name} must be above 0", param=name)
        if check_int("top_k", self.top_k) < 0:
            raise BadParameter("top_k must be from 0 (all tokens) up", param="top_k")
        if self.seed is not None and not 0 <= check_int("seed", self.seed) <= MAX_SEED:
            raise BadParameter(f"seed must be from 0 to {MAX_SEED}", param="seed")
        if not isinstance(self.stop, tuple | list) or "" in self.stop:
            raise BadParameter("stop must be a list of non-empty texts", param="stop")
        for text in self.stop:
            check_text("stop", text)


def _check_range(name: str, value: float, low: float, high: float = sys.float_info.max) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise BadParameter(f"{name} must be a number, not {value!r}", param=name)
    if not low <= value <= high:
        up = "up" if high == sys.float_info.max else f"to {high:g}"
        raise BadParameter(f"{name} is {value}; it must be from {low:g} {up}", param=name)


@dataclass(eq=False)
class TokenSampler:
    """What the tokens of one answer are chosen by. ``seen``: those that the penalty is for; whoever puts a token into
    the dialogue adds it. The generator is its own and on the CPU, so that company and device do not change what it
    draws. ``number``: what it drew for a token that is not chosen yet."""

    options: SamplingOptions
    seen: set[int] = field(default_factory=set)
    generator: torch.Generator = field(default_factory=lambda: torch.Generator("cpu"))
    number: Tensor | None = None

    @classmethod
    def of(cls, options: SamplingOptions, prompt_ids: Sequence[int]) -> "TokenSampler":
        sampler = cls(options, set(prompt_ids))
        if options.seed is None:
            sampler.generator.seed()
        else:
            sampler.generator.manual_seed(options.seed)
        return sampler

    def draw(self) -> Tensor:
        """A number in [0, 1), 0-dim: the same until a token is chosen by it, however often choosing breaks."""
        if self.number is None:
            self.number = torch.rand((), generator=self.generator)
        return self.number

    def penalised(self, logits: Tensor) -> Tensor:
        """(vocab_size,) logits after the repetition penalty."""
        penalty = self.options.repetition_penalty
        return penalise(logits, sorted(self.seen), penalty) if penalty != 1 and self.seen else logits


def likeliest_tokens(logits: Tensor) -> Tensor:
    """(rows,) int64: the likeliest token of each row of (rows, vocab_size) logits; NO_TOKEN where one is NaN or +inf,
    or all are -inf. The largest tells of damaged weights and of overflows, so nothing else is looked at."""
    likeliest = logits.argmax(dim=-1)  # which takes NaN for the largest
    largest = logits.gather(1, likeliest[:, None])[:, 0]
    return likeliest.masked_fill_(largest - largest != 0, NO_TOKEN)  # 0 for finite numbers, and NaN for all others


def choose_tokens(samplers: Sequence[TokenSampler], logits: Tensor, likeliest: Tensor) -> list[int | None]:
    """A token for each row of (rows, vocab_size) logits, of which ``likeliest_tokens`` are known; one sampler a row.
    None where there is no likeliest token.

    Chosen on the logits' device, and brought to the host in one copy.
    """
    drawing = [row for row, sampler in enumerate(samplers) if sampler.options.temperature > 0]
    penalised = [row for row, sampler in enumerate(samplers) if sampler.options.repetition_penalty != 1]
    chosen = likeliest.clone() if drawing or penalised else likeliest
    if penalised:
        logits = logits.clone()
    for row in penalised:
        logits[row] = samplers[row].penalised(logits[row])
        chosen[row] = logits[row].argmax()
    if drawing:
        index = torch.tensor(drawing, device=logits.device)
        chosen[index] = draw(logits[index], [samplers[row] for row in drawing])
    if chosen is not likeliest:
        chosen.masked_fill_(likeliest == NO_TOKEN, NO_TOKEN)
    tokens = chosen.tolist()  # which waits for the device, and raises what went wrong there
    for row in drawing:
        samplers[row].number = None
    return [None if token == NO_TOKEN else token for token in tokens]


def draw(logits: Tensor, samplers: Sequence[TokenSampler]) -> Tensor:
    """(rows,) tokens: for each row the first at which the sum of the kept probabilities, the likeliest first, passes a
    number in [0, 1) from the row's own generator."""
    options = [sampler.options for sampler in samplers]
    fp32 = torch.finfo(torch.float32)  # in which a temperature must be neither 0 nor infinite: 0 / 0 is no number
    temperatures = [min(max(o.temperature, fp32.tiny), fp32.max) for o in options]
    numbers = torch.tensor([temperatures, [o.top_p for o in options]])
    drawn = torch.stack([sampler.draw() for sampler in samplers])
    temperature, top_p, level = torch.cat([numbers, drawn[None]]).to(logits.device)
    top_k = torch.tensor([min(o.top_k, logits.shape[-1]) for o in options], device=logits.device)
    logits = logits.float()
    below = logits - logits.amax(dim=-1, keepdim=True)  # so that dividing them overflows to no probability at all
    probabilities, order = keep(below / temperature[:, None], top_k, top_p)
    reached = probabilities.cumsum(dim=-1)
    place = (reached <= level[:, None] * reached[:, -1:]).sum(dim=-1)
    place = torch.minimum(place, (probabilities > 0).sum(dim=-1) - 1)  # where rounding lifts the level to the whole sum
    return order.gather(1, place[:, None].clamp_(min=0))[:, 0]  # no probability is above 0 where logits are NaN


def penalise(logits: Tensor, tokens: Sequence[int], penalty: float) -> Tensor:
    """A copy of (vocab_size,) logits in which ``tokens`` are less likely: as far as the dtype goes, not to infinity,
    for a penalty may forbid tokens, but not leave none to be chosen."""
    index, held = torch.tensor(tokens, device=logits.device), torch.finfo(logits.dtype)
    values = logits[index].double()
    values = torch.where(values > 0, values / penalty, values * penalty).clamp(held.min, held.max)
    return logits.index_copy(0, index, values.to(logits.dtype))


def keep(logits: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities of (rows, vocab_size) logits, the likeliest first, and the tokens that they belong to.

    Those that ``top_k`` and then ``top_p``, (rows,) each, do not leave are 0; at least one stays.
    """
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    place = torch.arange(values.shape[-1], device=values.device)
    values = values.masked_fill((top_k > 0)[:, None] & (place >= top_k[:, None]), -torch.inf)
    probabilities = values.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = torch.where((before < top_p[:, None]) | (place == 0), probabilities, 0.0)
    return kept / kept.sum(dim=-1, keepdim=True), order


class Transcript:
    """The text of tokens that come one by one. A token is turned into text once, those of a cut character until it is
    whole."""

    def __init__(self) -> None:
        self._settled = ""
        self._open: list[int] = []

    def add(self, token: int) -> None:
        self._open.append(token)

    def text(self, detokenize: Callable[[Sequence[int]], str]) -> str:
        """All of it; a character that is cut in the middle at its end stands as U+FFFD. ``detokenize``: of a byte-level
        tokenizer, whose texts can be joined wherever a character ends."""
        text = detokenize(self._open) if self._open else ""
        if text.endswith(CUT):
            return self._settled + text
        self._settled += text
        self._open = []
        return self._settled


class StopWatch:
    """Finds stop texts in an answer as it grows, and holds back what may become one.

    A token can end in the middle of a character, and a stop text can begin in one token and end in another; so text is
    released only when neither can still change it.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.stop = tuple(stop)
        self._released = 0

    def feed(self, text: str, last: bool) -> tuple[str, bool]:
        """``text``: the whole answer so far. Returns what of it is new and settled, and whether a stop text ended it.
        ``last``: nothing will follow."""
        ends = [at for at in (text.find(stop) for stop in self.stop) if at >= 0]
        if ends:
            stop_at, stopped = min(ends), True
        else:
            stop_at, stopped = len(text) - (0 if last else self._unsettled(text)), False
        new = text[self._released : stop_at]
        self._released = max(self._released, stop_at)
        return new, stopped

    def _unsettled(self, text: str) -> int:
        """Characters at the end that may still change or become part of a stop text."""
        # Up to three of them for a character of four bytes.
        cut = len(text) - len(text.rstrip(CUT))
        whole = text[: len(text) - cut]
        partial = max(
            (n for stop in self.stop for n in range(1, len(stop)) if whole.endswith(stop[:n])),
            default=0,
        )
        return cut + partial
