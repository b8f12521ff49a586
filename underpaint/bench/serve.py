"""How a running server answers under load: any server with OpenAI's API, ours or a peer's.

Open loop: requests arrive at a rate, at random times, whether or not earlier ones are answered, and their times count
from when they should have begun. Closed loop: as many clients as said, each asking again when it is answered. Either
way the same seed sends the same requests.
"""

import asyncio
import io
import json
import math
import platform
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import httpx
from PIL import Image

from underpaint.errors import BadParameter, EngineFailure
from underpaint.report import Report, Table

SUBJECTS = ("circle", "square", "triangle", "lighthouse", "teapot", "garden", "harbour", "mountain")
COLOURS = ("red", "green", "blue", "yellow", "purple", "orange", "white", "black")
REFUSED = (429, 503)
PERCENTILES = (0.5, 0.95, 0.99)
MAX_REASONS = 5
CONNECT_SECONDS = 10.0


class Kind(Enum):
    """What a request asks for."""

    TEXT = "text"
    PAINT = "paint"
    EDIT = "edit"


@dataclass(frozen=True)
class Load:
    """What to send, and how. ``weights``: of each kind. Exactly one of ``rate`` (requests a second) and
    ``concurrency`` (clients). ``cancel_share`` of the requests are left after up to ``cancel_within`` seconds.

    Edits take ``references_per_edit`` pictures out of ``num_references`` that all of them share. ``plain`` sends only
    what OpenAI's API has, and no streams: for peers; then there are no first tokens or previews to time.
    """

    url: str
    weights: dict[Kind, float]
    num_requests: int = 100
    rate: float | None = None
    concurrency: int | None = None
    seed: int = 0
    size: str = "auto"
    num_steps: int | None = None
    num_images: int = 1
    num_previews: int = 1
    max_tokens: int = 64
    num_references: int = 4
    references_per_edit: int = 1
    reference_side: int = 512
    cancel_share: float = 0.0
    cancel_within: float = 1.0
    timeout_seconds: float = 600.0
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    plain: bool = False

    def __post_init__(self) -> None:
        """Raises BadParameter."""
        if (self.rate is None) == (self.concurrency is None):
            raise BadParameter("give a rate (requests a second) or a concurrency (clients), one of them")
        if min(self.weights.values()) < 0 or not sum(self.weights.values()) > 0:
            raise BadParameter("weights cannot be negative, and one must be above 0")
        if not 0 <= self.cancel_share <= 1:
            raise BadParameter(f"cancel_share is {self.cancel_share}; it must be from 0 to 1")
        if self.references_per_edit > self.num_references:
            raise BadParameter("references_per_edit cannot be more than num_references")
        for name in ("num_requests", "rate", "concurrency", "cancel_within", "references_per_edit", "reference_side"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise BadParameter(f"{name} is {value}; it must be above 0")


@dataclass(frozen=True)
class Plan:
    """One request, drawn before any is sent. ``at``: seconds after the begin, in an open loop. ``leave_after``: seconds
    until its client is gone."""

    kind: Kind
    at: float
    prompt: str
    references: tuple[int, ...]
    seed: int
    leave_after: float | None


@dataclass(eq=False)
class Outcome:
    """What became of a request. ``start``, ``end``, ``first`` (token or preview): seconds after the begin. ``gaps``:
    seconds between tokens."""

    kind: Kind
    start: float
    end: float = 0.0
    fate: Literal["answered", "rejected", "cancelled", "failed"] = "failed"
    reason: str = ""
    first: float | None = None
    num_images: int = 0
    num_tokens: int = 0
    gaps: list[float] = field(default_factory=list)


def serve(load: Load) -> Report:
    """Send the load, and say how it was answered. Raises EngineFailure if nothing answers at the URL at all."""
    plans = draw(load)
    return report(load, asyncio.run(Client(load).run(plans)))


def draw(load: Load) -> list[Plan]:
    """The requests of a load; the same seed draws the same ones."""
    generator = random.Random(load.seed)
    kinds, weights = zip(*load.weights.items(), strict=True)
    plans, at = [], 0.0
    for i in range(load.num_requests):
        kind = generator.choices(kinds, weights)[0]
        at += generator.expovariate(load.rate) if load.rate else 0.0
        thing = f"a {generator.choice(COLOURS)} {generator.choice(SUBJECTS)}"
        prompt = f"tell me about {thing}, number {i}" if kind is Kind.TEXT else f"{thing}, number {i}"
        references = tuple(generator.sample(range(load.num_references), load.references_per_edit))
        leaves = generator.random() < load.cancel_share
        leave_after = generator.uniform(0, load.cancel_within) if leaves else None
        plans.append(Plan(kind, at, prompt, references if kind is Kind.EDIT else (), load.seed + i, leave_after))
    return plans


def draw_references(load: Load) -> list[bytes]:
    """Pictures of blocks in random colours, as PNG files."""
    generator = random.Random(load.seed)
    files = []
    for _ in range(load.num_references):
        small = Image.frombytes("RGB", (8, 8), generator.randbytes(8 * 8 * 3))
        file = io.BytesIO()
        small.resize((load.reference_side, load.reference_side), Image.Resampling.NEAREST).save(file, "PNG")
        files.append(file.getvalue())
    return files


class Client:
    """Sends requests, and times what comes back."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._files = draw_references(load)
        self._begin = 0.0

    async def run(self, plans: Sequence[Plan]) -> list[Outcome]:
        """The outcomes, in the order of the plans."""
        load = self._load
        headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
        timeout = httpx.Timeout(load.timeout_seconds, connect=CONNECT_SECONDS)
        async with httpx.AsyncClient(
            base_url=load.url, headers=headers, timeout=timeout, limits=httpx.Limits(max_connections=None)
        ) as http:
            await self._find(http)
            self._begin = time.perf_counter()
            if load.concurrency is None:
                return list(await asyncio.gather(*(self._at_its_time(http, plan) for plan in plans)))
            left = iter(list(enumerate(plans)))
            outcomes: dict[int, Outcome] = {}

            async def ask() -> None:
                for i, plan in left:
                    outcomes[i] = await self._send(http, plan, self._now())

            await asyncio.gather(*(ask() for _ in range(load.concurrency)))
            return [outcomes[i] for i in range(len(plans))]

    async def _find(self, http: httpx.AsyncClient) -> None:
        """Raises EngineFailure if this is no server with OpenAI's API; else a load would only count failures."""
        try:
            response = await http.get("/v1/models")
        except httpx.HTTPError as error:
            raise EngineFailure(f"nothing answers at {self._load.url}: {type(error).__name__}") from error
        if response.status_code != 200:
            raise EngineFailure(f"{self._load.url}/v1/models answers {response.status_code}; it must be 200")

    async def _at_its_time(self, http: httpx.AsyncClient, plan: Plan) -> Outcome:
        await asyncio.sleep(max(0.0, plan.at - self._now()))
        return await self._send(http, plan, plan.at)

    async def _send(self, http: httpx.AsyncClient, plan: Plan, start: float) -> Outcome:
        outcome = Outcome(plan.kind, start)
        try:
            async with asyncio.timeout(plan.leave_after):
                await self._ask(http, plan, outcome)
        except TimeoutError:
            outcome.fate = "cancelled"
        except (httpx.HTTPError, ValueError, KeyError) as error:
            outcome.reason = f"{type(error).__name__}: {error}"
        outcome.end = self._now()
        return outcome

    async def _ask(self, http: httpx.AsyncClient, plan: Plan, outcome: Outcome) -> None:
        path, body = self._request(plan)
        async with http.stream("POST", path, **body) as response:
            if response.status_code != 200:
                outcome.fate = "rejected" if response.status_code in REFUSED else "failed"
                outcome.reason = f"HTTP {response.status_code}: {_message(await response.aread())}"
                return
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                await self._listen(response, plan.kind, outcome)
            else:
                _count(json.loads(await response.aread()), plan.kind, outcome)
        if not outcome.reason:
            outcome.fate = "answered"

    async def _listen(self, response: httpx.Response, kind: Kind, outcome: Outcome) -> None:
        """Time a stream of events up to its end."""
        last: float | None = None
        async for event in _events(response):
            now = self._now()
            if event.get("error"):
                outcome.reason = str(event["error"].get("message", event["error"]))
            elif kind is Kind.TEXT:
                if usage := event.get("usage"):
                    outcome.num_tokens = usage["completion_tokens"]
                if any(choice["delta"].get("content") for choice in event.get("choices", ())):
                    outcome.gaps += [] if last is None else [now - last]
                    last = now
                    outcome.first = outcome.first or now
            elif event["type"].endswith(".partial_image"):
                outcome.first = outcome.first or now
            elif event["type"].endswith(".completed"):
                outcome.num_images += 1
        if not outcome.reason and kind is not Kind.TEXT and outcome.num_images != self._load.num_images:
            outcome.reason = f"the stream ended with {outcome.num_images} pictures"

    def _request(self, plan: Plan) -> tuple[str, dict[str, Any]]:
        """The path, and the body as httpx takes it."""
        load = self._load
        common: dict[str, Any] = {"model": load.model} if load.model else {}
        if not load.plain:
            common |= {"seed": plan.seed, "stream": True}
        if plan.kind is Kind.TEXT:
            messages = [{"role": "user", "content": plan.prompt}]
            usage = {} if load.plain else {"stream_options": {"include_usage": True}}
            return "/v1/chat/completions", {
                "json": {"messages": messages, "max_tokens": load.max_tokens, **common, **usage}
            }
        body = {"prompt": plan.prompt, "size": load.size, "n": load.num_images, **common}
        if not load.plain:
            body |= {"partial_images": load.num_previews}
            body |= {"num_inference_steps": load.num_steps} if load.num_steps else {}
        if plan.kind is Kind.PAINT:
            return "/v1/images/generations", {"json": body}
        name = "image" if len(plan.references) == 1 else "image[]"
        files = [(name, (f"{i}.png", self._files[i], "image/png")) for i in plan.references]
        form = {key: str(value).lower() if isinstance(value, bool) else value for key, value in body.items()}
        return "/v1/images/edits", {"data": form, "files": files}

    def _now(self) -> float:
        return time.perf_counter() - self._begin


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The data of server-sent events."""
    async for line in response.aiter_lines():
        if line.startswith("data:") and line[5:].strip() != "[DONE]":
            yield json.loads(line[5:])


def _count(answer: dict[str, Any], kind: Kind, outcome: Outcome) -> None:
    if kind is Kind.TEXT:
        outcome.num_tokens = answer["usage"]["completion_tokens"]
    else:
        outcome.num_images = len(answer["data"])


def _message(body: bytes) -> str:
    """What an error says, in OpenAI's shape or not."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:100].decode("utf-8", "replace")


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of all do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def report(load: Load, outcomes: Sequence[Outcome]) -> Report:
    """Counts, times and rates."""
    seconds = max(outcome.end for outcome in outcomes) - min(outcome.start for outcome in outcomes)
    images, tokens = (sum(getattr(outcome, name) for outcome in outcomes) for name in ("num_images", "num_tokens"))
    answered = sum(outcome.fate == "answered" for outcome in outcomes)
    fates = ("answered", "rejected", "cancelled", "failed")
    counts: list[tuple[str | int | float, ...]] = []
    for kind in load.weights:
        own = [outcome for outcome in outcomes if outcome.kind is kind]
        if own:
            counts.append((kind.value, len(own), *(sum(one.fate == fate for one in own) for fate in fates)))
    arrivals = f"{load.rate:g} requests a second, Poisson" if load.rate else f"{load.concurrency} clients"
    reasons = Counter(outcome.reason for outcome in outcomes if outcome.reason)
    return Report(
        (
            f"{load.url}: {arrivals}; {load.num_requests} requests, seed {load.seed}; size {load.size}, "
            f"{load.num_images} a request, steps {load.num_steps or 'default'}, max_tokens {load.max_tokens}",
            f"client: Python {platform.python_version()}, httpx {httpx.__version__}",
            *(f"{number} x {reason}" for reason, number in reasons.most_common(MAX_REASONS)),
        ),
        (
            Table("Requests", ("kind", "sent", *fates), counts),
            Table("Seconds", ("kind", "what", "p50", "p95", "p99"), list(_times(load, outcomes))),
            Table(
                "Throughput",
                ("seconds", "answers/s", "images/s", "tokens/s"),
                [(seconds, answered / seconds, images / seconds, tokens / seconds)],
            ),
        ),
    )


def _times(load: Load, outcomes: Sequence[Outcome]) -> list[tuple[str | float, ...]]:
    """One line for everything that was timed, of what was answered."""
    lines: list[tuple[str | float, ...]] = []
    for kind in load.weights:
        own = [outcome for outcome in outcomes if outcome.kind is kind and outcome.fate == "answered"]
        first = "first token" if kind is Kind.TEXT else "first preview"
        for what, values in (
            ("whole", [outcome.end - outcome.start for outcome in own]),
            (first, [outcome.first - outcome.start for outcome in own if outcome.first is not None]),
            ("between tokens", [gap for outcome in own for gap in outcome.gaps]),
        ):
            if values:
                lines.append((kind.value, what, *(percentile(values, share) for share in PERCENTILES)))
    return lines
