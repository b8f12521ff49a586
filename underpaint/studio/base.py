"""What the pipeline needs of a family, and what families share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor

from underpaint.errors import BadParameter
from underpaint.generation.job import Job, Order
from underpaint.images import fit_to_area, read_image
from underpaint.layout import Grid
from underpaint.request import PaintRequest, check_side


@dataclass(frozen=True, eq=False)
class Plan:
    """A request with everything settled that the checkpoint decides, and nothing encoded yet. ``noise``: what each
    picture starts from, (tokens, channels)."""

    references: tuple[Image.Image, ...]
    grid: Grid
    sampler: Any
    noise: tuple[Tensor, ...]


class Studio(Protocol):
    def plan(self, request: PaintRequest) -> Plan:
        """Settle and check what needs the model. Raises BadRequest."""
        ...

    def order(self, request: PaintRequest, plan: Plan) -> Order:
        """Encode the conditions, and make a job for each picture, in the order of ``request.seeds``."""
        ...

    def output(self, request: PaintRequest, job: Job) -> Any:
        """What the caller gets of a finished job, as ``request.output_type`` says."""
        ...


@dataclass(frozen=True)
class Limits:
    """What a family can paint. Sides in pixels."""

    side_multiple: int
    max_side: int
    max_references: int


def read_references(request: PaintRequest, limits: Limits) -> tuple[Image.Image, ...]:
    """The pictures of a request, upright RGBA. Raises BadRequest."""
    if len(request.images) > limits.max_references:
        message = f"{len(request.images)} references are given, the limit is {limits.max_references}"
        raise BadParameter(message, param="images")
    for name, side in (("width", request.width), ("height", request.height)):
        if side is not None:
            check_side(name, side, limits.side_multiple, limits.max_side)
    return tuple(read_image(image, f"image {i + 1}") for i, image in enumerate(request.images))


def target_size(
    request: PaintRequest, references: Sequence[Image.Image], resolution: int, limits: Limits
) -> tuple[int, int]:
    """Width and height to paint: as asked for, else the last reference's ratio at ``resolution``. Raises BadSize."""
    ratio = references[-1].size if references else (1, 1)
    own_width, own_height = fit_to_area(*ratio, resolution, limits.side_multiple)
    return (
        check_side("width", request.width or own_width, limits.side_multiple, limits.max_side),
        check_side("height", request.height or own_height, limits.side_multiple, limits.max_side),
    )


def given_latents(request: PaintRequest, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> list[Tensor]:
    """The noise that the caller brought, one tensor of ``shape`` a picture. Raises BadParameter."""
    assert request.latents is not None
    given = request.latents[None] if request.latents.ndim == len(shape) else request.latents
    if tuple(given.shape) != (request.num_pictures, *shape):
        raise BadParameter(
            f"latents has shape {tuple(request.latents.shape)}; {request.num_pictures} x {shape} is needed",
            param="latents",
        )
    latents = given.to(device, dtype)
    if not latents.isfinite().all():
        raise BadParameter(f"latents holds NaN or infinity in {dtype}", param="latents")
    return list(latents)


def refuse(request: PaintRequest, names: Sequence[str], family: str) -> None:
    """Raises BadParameter if the caller set one of ``names``, which ``family`` does not have."""
    for name in names:
        if getattr(request, name) is not None:
            raise BadParameter(f"{name} is not a parameter of {family}", param=name)
