"""``POST /v1/responses``: OpenAI's newer API, with its image_generation tool, over the dialogues and paintings of the
other endpoints. Nothing is stored."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from underpaint.errors import BadRequest, UnderpaintError
from underpaint.server.deliver import SSE_HEADERS, ClientGone, begun, finished, follow, gone, sse
from underpaint.server.faults import STREAMED
from underpaint.server.media import Sent, load_images, open_images
from underpaint.server.news import Begun, Event, Opened, Painted, Preview, Said, Shown
from underpaint.server.paint import Painting, read_body, total
from underpaint.server.response_input import CHAT_NAMES, PAINTING_NAMES, Plan, as_asked, read_response
from underpaint.server.response_schema import ResponseBody, plain
from underpaint.server.site import Site
from underpaint.server.talk import PARAM_NAMES, Answer, Talk, read_dialogue, read_talk
from underpaint.server.task import Task

Json = dict[str, Any]
TALK_NAMES = {**CHAT_NAMES, **{name: CHAT_NAMES.get(param, param) for name, param in PARAM_NAMES.items()}}
REASONS = {"length": "max_output_tokens"}


def response_routes(site: Site) -> APIRouter:
    """The endpoint."""
    router = APIRouter(prefix="/v1/responses")

    @router.post("", responses=STREAMED)
    async def respond(body: ResponseBody, request: Request) -> Response:
        """Go on with a dialogue, or paint. With ``stream``, events as they happen."""
        plan = read_response(body, site.atelier, site.config)
        names = TALK_NAMES if plan.chat else PAINTING_NAMES
        try:
            work, num_bytes = await _work(site, plan)
        except BadRequest as error:
            raise as_asked(error, CHAT_NAMES if plan.chat else PAINTING_NAMES) from error
        task = site.desk.accept(work, num_bytes, body.priority or "normal")
        writing = Writing(_head(site, body, task))
        try:
            if not body.stream:
                result = await finished(task, request, names)
                for event in task.events:
                    list(writing.take(event))
                return JSONResponse(writing.whole(result))
            events = follow(task, request, names)
            await begun(events, Opened if plan.chat else Begun)
            stream = _stream(task, events, writing)
            return StreamingResponse(stream, media_type="text/event-stream", headers=SSE_HEADERS)
        except ClientGone:
            return gone()

    return router


async def _work(site: Site, plan: Plan) -> tuple[Talk | Painting, int]:
    """The work, and the bytes of its pictures. Raises BadRequest, in the words of the other endpoints."""
    if plan.painting is not None:
        files = await load_images(plan.urls, site.fetcher, site.config, "images")
        await asyncio.to_thread(open_images, files, site.config, "images")
        streams = bool(plan.painting.stream)
        return read_body(plan.painting, files, site.atelier, site.config, streams), sum(map(len, files))
    assert plan.chat is not None
    dialogue = read_dialogue(plan.chat)
    files = await load_images(dialogue.urls, site.fetcher, site.config, "messages")
    await asyncio.to_thread(open_images, files, site.config, "messages")
    return read_talk(plan.chat, dialogue, files, site.atelier, site.config), sum(map(len, files))


def _head(site: Site, body: ResponseBody, task: Task) -> Json:
    """What a response says beside its output: who it is, and what was asked for."""
    return {
        "id": f"resp_{task.id}", "object": "response", "created_at": int(task.created), "status": "in_progress",
        "error": None, "incomplete_details": None, "model": site.config.model_id, "output": [], "usage": None,
        "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls, "metadata": body.metadata or {},
        "parallel_tool_calls": bool(body.parallel_tool_calls), "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None}, "store": False,
        "temperature": body.temperature, "top_p": body.top_p, "text": {"format": {"type": "text"}},
        "tool_choice": body.tool_choice if isinstance(body.tool_choice, str) else plain(body.tool_choice) or "auto",
        "tools": [plain(tool) for tool in body.tools or []], "truncation": "disabled", "background": False,
    }  # fmt: skip


async def _stream(task: Task, events: AsyncIterator[Event | None], writing: "Writing") -> AsyncIterator[str]:
    """Server-sent events up to a terminal one: ``response.completed``, ``.incomplete`` or ``.failed``."""
    number = 0

    def tell(told: Iterable[Json]) -> Iterator[str]:
        nonlocal number
        for event in told:
            yield sse({**event, "sequence_number": number}, event["type"])
            number += 1

    try:
        for line in tell({"type": f"response.{name}", "response": writing.head} for name in ("created", "in_progress")):
            yield line
        async for event in events:
            for line in tell(writing.take(event)):
                yield line
        for line in tell(writing.close()):
            yield line
        response = writing.whole(task.result)
    except UnderpaintError as error:
        response = writing.broken(error)
    except ClientGone:
        return
    for line in tell([{"type": f"response.{response['status']}", "response": response}]):
        yield line


@dataclass(eq=False)
class Writing:
    """A response as it grows. Every event of the work becomes events of the protocol, and their sum is ``output``; so
    a stream and a whole answer cannot differ."""

    head: Json
    output: list[Json] = field(default_factory=list)
    _open: Json | None = None
    _in_picture: bool = False

    def take(self, event: Event | None) -> Iterator[Json]:
        """What to tell of one event of the work."""
        match event:
            case Said(text=text, thought=thought) if text:
                yield from self._say(text, thought)
            case Preview(number=number, picture=picture):
                yield from self._begin_picture()
                yield self._of_item(
                    "image_generation_call.partial_image", partial_image_index=number, partial_image_b64=picture.b64,
                    size=picture.size, background=picture.background, output_format=picture.format, quality="auto",
                )  # fmt: skip
            case Shown(picture=picture):
                yield from self._finish_picture(picture, {})
            case Painted(picture=picture, seed=seed):
                yield from self._finish_picture(picture, {"seed": seed})

    def close(self) -> Iterator[Json]:
        """End the text that is being written, if there is one."""
        if self._open is None:
            return
        item, self._open = self._open, None
        (part,) = item["content"]
        item["status"] = "completed"
        extra: Json = {"logprobs": []} if part["type"] == "output_text" else {}
        yield self._of_item(f"{part['type']}.done", content_index=0, text=part["text"], **extra)
        yield self._of_item("content_part.done", content_index=0, part=dict(part))
        yield self._of_item("output_item.done", item=item)

    def whole(self, result: Answer | list[Painted]) -> Json:
        """The response when the work is done."""
        list(self.close())
        finish = result.finish if isinstance(result, Answer) else "stop"
        reason = REASONS.get(finish)
        return {
            **self.head,
            "status": "incomplete" if reason else "completed",
            "incomplete_details": {"reason": reason} if reason else None,
            "output": self.output,
            **_usage(result),
        }

    def broken(self, error: UnderpaintError) -> Json:
        """The response when the work broke."""
        return {
            **self.head,
            "status": "failed",
            "error": {"code": error.code, "message": str(error)},
            "output": [item for item in self.output if item is not self._open and item.get("status") == "completed"],
        }

    def _say(self, text: str, thought: bool) -> Iterator[Json]:
        kind = "reasoning" if thought else "message"
        if self._open is None or self._open["type"] != kind:
            yield from self.close()
            yield from self._begin_text(kind)
        assert self._open is not None
        (part,) = self._open["content"]
        part["text"] += text
        extra: Json = {"logprobs": []} if part["type"] == "output_text" else {}
        yield self._of_item(f"{part['type']}.delta", content_index=0, delta=text, **extra)

    def _begin_text(self, kind: str) -> Iterator[Json]:
        if kind == "message":
            item = self._add("msg", {"type": kind, "role": "assistant"})
            part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = self._add("rs", {"type": kind, "summary": []})
            part = {"type": "reasoning_text", "text": ""}
        yield self._of_item("output_item.added", item={**item, "content": []})
        item["content"] = [part]
        self._open = item
        yield self._of_item("content_part.added", content_index=0, part=dict(part))

    def _begin_picture(self) -> Iterator[Json]:
        """A picture has begun, unless it had before."""
        yield from self.close()
        if self._in_picture:
            return
        self._in_picture = True
        item = self._add("ig", {"type": "image_generation_call", "result": None})
        yield self._of_item("output_item.added", item=dict(item))
        yield self._of_item("image_generation_call.in_progress")
        yield self._of_item("image_generation_call.generating")

    def _finish_picture(self, picture: Sent, more: Mapping[str, Any]) -> Iterator[Json]:
        yield from self._begin_picture()
        self._in_picture = False
        self.output[-1] |= {
            "status": "completed", "result": picture.b64, "size": picture.size, "background": picture.background,
            "output_format": picture.format, "quality": "auto", **more,
        }  # fmt: skip
        yield self._of_item("image_generation_call.completed")
        yield self._of_item("output_item.done", item=self.output[-1])

    def _add(self, prefix: str, item: Json) -> Json:
        name = f"{prefix}_{self.head['id'].removeprefix('resp_')}_{len(self.output)}"
        self.output.append({"id": name, "status": "in_progress", **item})
        return self.output[-1]

    def _of_item(self, kind: str, **values: Any) -> Json:
        """An event about the last item."""
        about: Json = {"type": f"response.{kind}", "output_index": len(self.output) - 1}
        return about | ({} if "item" in values else {"item_id": self.output[-1]["id"]}) | values


def _usage(result: Answer | list[Painted]) -> Json:
    """Tokens read and written. Tokens found in the cache, and those of thoughts, are counted but not told apart: 0."""
    if isinstance(result, Answer):
        read, written = result.num_prompt_tokens, result.num_answer_tokens
        tools: Json = {}
    else:
        painted = total(result)
        read, written = painted.text_tokens + painted.image_tokens, painted.output_tokens
        tools = {"tool_usage": {"image_gen": painted.as_json(), "web_search": {"num_requests": 0}}}
    return {
        "usage": {
            "input_tokens": read, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": written, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": read + written,
        },
        **tools,
    }  # fmt: skip
