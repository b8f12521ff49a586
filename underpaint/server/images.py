"""``POST /v1/images/generations`` and ``/v1/images/edits``: OpenAI's images API."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import ValidationError
from starlette.datastructures import UploadFile

from underpaint.errors import BadParameter, UnderpaintError
from underpaint.server.deliver import SSE_HEADERS, ClientGone, begun, finished, follow, gone, sse
from underpaint.server.faults import STREAMED, MissingField, UnknownField, error_body, field_error
from underpaint.server.media import check_number_of_images, load_images, open_images
from underpaint.server.paint import PARAM_NAMES, Begun, Painted, Painting, Preview, read_body, total
from underpaint.server.schema import EditBody, ImageUrl, PaintBody
from underpaint.server.site import Site
from underpaint.server.task import Task

FILE_FIELDS = ("image", "image[]")
MAX_PARTS = 100
MAX_TEXT_BYTES = 1 << 20


@dataclass(frozen=True)
class Upload:
    """An edit as it came: the body, and the bytes of its pictures. ``param`` is what the client calls those."""

    body: PaintBody
    files: tuple[bytes, ...]
    param: str

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.files))


def image_routes(site: Site) -> APIRouter:
    """The two endpoints."""
    router = APIRouter(prefix="/v1/images")

    @router.post("/generations", responses=STREAMED)
    async def generate(body: PaintBody, request: Request) -> Response:
        """Paint ``n`` pictures."""
        painting = read_body(body, (), site.atelier, site.config, streams=bool(body.stream))
        return await _answer(site, body, painting, 0, request, "image_generation", PARAM_NAMES)

    @router.post("/edits", openapi_extra=_edit_schema(), responses=STREAMED)
    async def edit(request: Request) -> Response:
        """Edit pictures: files ``image`` or ``image[]`` of a form, or ``images`` of a JSON body."""
        upload = await read_edit(request, site)
        painting = await read_upload(site, upload, streams=bool(upload.body.stream))
        names = {**PARAM_NAMES, "images": upload.param}
        return await _answer(site, upload.body, painting, upload.num_bytes, request, "image_edit", names)

    return router


async def read_edit(request: Request, site: Site) -> Upload:
    """An edit from a form or from JSON. Raises BadRequest."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        try:
            return await _read_form(request)
        except UnicodeError as error:
            raise BadParameter("the form names an encoding that its texts cannot be read by") from error
    if kind != "application/json":
        raise BadParameter("send an edit as multipart/form-data or application/json")
    try:
        values = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise BadParameter("the body is not JSON") from error
    try:
        body = EditBody.model_validate(values)
    except ValidationError as error:
        raise field_error(error.errors()) from error
    _refuse_mask(body.mask)
    if not body.images:
        raise MissingField("images is empty: an edit needs a picture", param="images")
    return await upload_of(body, body.images, site)


async def upload_of(body: PaintBody, images: list[ImageUrl], site: Site) -> Upload:
    """A body with the bytes of its pictures. Raises BadRequest."""
    urls = [image.image_url for image in images]
    return Upload(body, await load_images(urls, site.fetcher, site.config, "images"), "images")


async def read_upload(site: Site, upload: Upload, streams: bool) -> Painting:
    """An upload as a painting, its pictures' headers checked. Raises BadRequest."""
    await asyncio.to_thread(open_images, upload.files, site.config, upload.param)
    return read_body(upload.body, upload.files, site.atelier, site.config, streams)


async def _read_form(request: Request) -> Upload:
    async with request.form(max_files=MAX_PARTS, max_fields=MAX_PARTS, max_part_size=MAX_TEXT_BYTES) as form:
        pictures: list[UploadFile] = []
        values: dict[str, str] = {}
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                if name == "mask":
                    _refuse_mask(value)
                if name not in FILE_FIELDS:
                    raise UnknownField(f"unknown file: {name}; pictures are called image or image[]", param=name)
                pictures.append(value)
            elif name in FILE_FIELDS:
                raise BadParameter(f"{name} must be a file", param="image")
            elif name in values:
                raise BadParameter(f"{name} is given more than once", param=name)
            elif name in ("images", "mask"):
                raise BadParameter("in a form, pictures are the files image or image[]; there is no mask", param=name)
            else:
                values[name] = value
        if not pictures:
            raise MissingField("image is missing: an edit needs a picture", param="image")
        check_number_of_images(len(pictures), "image")
        files = tuple([await picture.read() for picture in pictures])
    try:
        return Upload(PaintBody.model_validate(values, strict=False), files, "image")
    except ValidationError as error:
        raise field_error(error.errors()) from error


def _refuse_mask(mask: object) -> None:
    if mask is not None:
        raise BadParameter("masks are not supported; say in the prompt what to change", param="mask")


async def _answer(
    site: Site,
    body: PaintBody,
    painting: Painting,
    num_bytes: int,
    request: Request,
    kind: str,
    names: Mapping[str, str],
) -> Response:
    task = site.desk.accept(painting, num_bytes, body.priority or "normal")
    try:
        if not body.stream:
            return JSONResponse(images_json(await finished(task, request, names), int(task.created)))
        events = follow(task, request, names)
        await begun(events, Begun)
        return StreamingResponse(_stream(events, task, kind), media_type="text/event-stream", headers=SSE_HEADERS)
    except ClientGone:
        return gone()


async def _stream(events: AsyncIterator[Any], task: Task, kind: str) -> AsyncIterator[str]:
    """Server-sent events up to a terminal one: ``completed`` for each picture, or one ``error``."""
    created = int(task.created)
    try:
        async for event in events:
            if isinstance(event, Preview):
                name = f"{kind}.partial_image"
                yield sse({"type": name, **preview_json(event, created)}, name)
            elif isinstance(event, Painted):
                name = f"{kind}.completed"
                yield sse({"type": name, **painted_json(event, created)}, name)
    except UnderpaintError as error:
        yield sse({"type": "error", **error_body(error)}, "error")
    except ClientGone:
        return


def preview_json(preview: Preview, created: int) -> dict[str, Any]:
    picture = preview.picture
    return {
        "b64_json": picture.b64, "partial_image_index": preview.number, "index": preview.index, "created_at": created,
        "size": picture.size, "quality": "auto", "background": picture.background, "output_format": picture.format,
    }  # fmt: skip


def painted_json(painted: Painted, created: int) -> dict[str, Any]:
    picture = painted.picture
    return {
        "b64_json": picture.b64, "index": painted.index, "seed": painted.seed, "created_at": created,
        "size": picture.size, "quality": "auto", "background": picture.background, "output_format": picture.format,
        "usage": painted.usage.as_json(),
    }  # fmt: skip


def images_json(painted: list[Painted], created: int) -> dict[str, Any]:
    """The whole answer. All pictures have one size; ``background`` is transparent if one of them is."""
    first = painted[0].picture
    backgrounds = {one.picture.background for one in painted}
    return {
        "created": created,
        "data": [{"b64_json": one.picture.b64, "seed": one.seed} for one in painted],
        "size": first.size,
        "quality": "auto",
        "background": "transparent" if "transparent" in backgrounds else "opaque",
        "output_format": first.format,
        "usage": total(painted).as_json(),
    }


def _edit_schema() -> dict[str, Any]:
    """For the OpenAPI document: the JSON body, and the form."""
    form = PaintBody.model_json_schema(ref_template="#/components/schemas/{model}")
    form["properties"]["image"] = {"type": "array", "items": {"type": "string", "format": "binary"}}
    form["required"] = ["prompt", "image"]
    json_body = EditBody.model_json_schema()
    json_body["properties"]["images"]["items"] = json_body.pop("$defs")["ImageUrl"]
    content = {"application/json": {"schema": json_body}, "multipart/form-data": {"schema": form}}
    return {"requestBody": {"required": True, "content": content}}
