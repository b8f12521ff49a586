"""``POST /v1/chat/completions``: dialogues with a model that talks, and paints while it talks."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from underpaint.errors import BadParameter, UnderpaintError
from underpaint.server.deliver import SSE_HEADERS, ClientGone, begun, finished, follow, gone, sse
from underpaint.server.faults import STREAMED, error_body
from underpaint.server.media import Sent, load_images, open_images
from underpaint.server.news import Opened, Preview, Said, Shown
from underpaint.server.schema import ChatBody
from underpaint.server.site import Site
from underpaint.server.talk import PARAM_NAMES, Answer, read_dialogue, read_talk
from underpaint.server.task import Task

PARAM = "messages"


def chat_routes(site: Site) -> APIRouter:
    """The endpoint; a model that does not talk refuses."""
    router = APIRouter(prefix="/v1/chat")

    @router.post("/completions", responses=STREAMED)
    async def complete(body: ChatBody, request: Request) -> Response:
        """Go on with a dialogue. ``modalities`` ["text", "image"] lets the answer have pictures."""
        if not site.atelier.talks:
            raise BadParameter("this model paints and does not talk; use /v1/images/generations", param="model")
        dialogue = read_dialogue(body)
        files = await load_images(dialogue.urls, site.fetcher, site.config, PARAM)
        await asyncio.to_thread(open_images, files, site.config, PARAM)
        talk = read_talk(body, dialogue, files, site.atelier, site.config)
        task = site.desk.accept(talk, sum(map(len, files)), body.priority or "normal")
        try:
            if not body.stream:
                return JSONResponse(completion(site, task, await finished(task, request, PARAM_NAMES)))
            events = follow(task, request, PARAM_NAMES)
            await begun(events, Opened)
            usage = bool(body.stream_options and body.stream_options.include_usage)
            stream = _stream(site, task, events, usage)
            return StreamingResponse(stream, media_type="text/event-stream", headers=SSE_HEADERS)
        except ClientGone:
            return gone()

    return router


def completion(site: Site, task: Task, answer: Answer) -> dict[str, Any]:
    """The whole answer. ``content`` is a text, or a list of parts if there are pictures among it."""
    content: list[dict[str, Any]] = []
    for part in answer.parts:
        if isinstance(part, Shown):
            content.append(_picture(part.picture))
        elif not part.thought and content and content[-1]["type"] == "text":
            content[-1]["text"] += part.text
        elif not part.thought:
            content.append({"type": "text", "text": part.text})
    message: dict[str, Any] = {"role": "assistant"}
    has_pictures = any(part["type"] == "image_url" for part in content)
    message["content"] = content if has_pictures else "".join(part["text"] for part in content)
    thought = "".join(part.text for part in answer.parts if isinstance(part, Said) and part.thought)
    if thought:
        message["reasoning_content"] = thought
    choice = {"index": 0, "message": message, "finish_reason": answer.finish, "logprobs": None}
    return {**_head(site, task, "chat.completion"), "choices": [choice], "usage": answer.usage}


async def _stream(site: Site, task: Task, events: AsyncIterator[Any], usage: bool) -> AsyncIterator[str]:
    """Chunks, and ``[DONE]``; or one error, which is the end as well."""
    head = _head(site, task, "chat.completion.chunk")

    def chunk(delta: dict[str, Any], finish: str | None = None) -> str:
        return sse({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

    try:
        yield chunk({"role": "assistant", "content": ""})
        async for event in events:
            if isinstance(event, Said):
                yield chunk({"reasoning_content" if event.thought else "content": event.text})
            elif isinstance(event, Shown):
                yield chunk({"content": [_picture(event.picture)]})
            elif isinstance(event, Preview):  # not content: clients add that up
                number = {"index": event.index, "partial_image_index": event.number}
                yield chunk({"partial_image": {**number, **_picture(event.picture)}})
        answer: Answer = task.result
        yield chunk({}, answer.finish)
        if usage:
            yield sse({**head, "choices": [], "usage": answer.usage})
        yield sse("[DONE]")
    except UnderpaintError as error:
        yield sse(error_body(error))
    except ClientGone:
        return


def _head(site: Site, task: Task, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{task.id}",
        "object": kind,
        "created": int(task.created),
        "model": site.config.model_id,
    }


def _picture(picture: Sent) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": picture.url}}
