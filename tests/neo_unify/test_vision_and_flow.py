"""Pixels to cells to embeddings, sizes, noise and times."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from neo_unify.cases import difference, generator, golden
from underpaint.errors import BadParameter, BadSize
from underpaint.models.neo_unify import PaintGuidance
from underpaint.models.neo_unify.config import CELL, FlowConfig
from underpaint.models.neo_unify.driver import PaintOptions
from underpaint.models.neo_unify.flow import draw_noise, flow_step, flow_times, noise_scale, velocity
from underpaint.models.neo_unify.vision import (
    PixelBounds,
    normalise,
    painted_picture,
    read_picture,
    reference_bounds,
    smart_resize,
    to_cells,
    to_patches,
    to_pixels,
)
from underpaint.models.painter import cell_places


def test_cells_and_pixels() -> None:
    pixels = torch.arange(3 * 64 * 96).reshape(3, 64, 96)
    cells = to_cells(pixels)
    assert cells.shape == (6, 3072)
    assert torch.equal(to_pixels(cells, (2, 3)), pixels)
    assert torch.equal(cells[4], pixels[:, 32:64, 32:64].permute(1, 2, 0).flatten())
    assert torch.equal(to_patches(cells)[4, 1], pixels[:, 32:48, 48:64].flatten())
    assert cell_places((2, 3)).tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]


@pytest.mark.parametrize("grid", [(1, 1), (3, 2)])
def test_embedding_is_two_convolutions(grid: tuple[int, int]) -> None:
    """Against convolutions over the whole picture, the turn between them written out pair by pair."""
    embedding = golden("dense").model.network.vision_model
    pixels = torch.randn(3, grid[0] * CELL, grid[1] * CELL, generator=generator(0))
    first, second = (embedding.embeddings[f"{name}_embedding"] for name in ("patch", "dense"))
    assert isinstance(first, nn.Conv2d)
    assert isinstance(second, nn.Conv2d)
    patches = F.gelu(first(pixels[None])).permute(0, 2, 3, 1)
    turned = patches.clone()
    half = patches.shape[-1] // 2
    for row in range(2 * grid[0]):
        for column in range(2 * grid[1]):
            for i in range(half):
                place = column if i < half // 2 else row
                angle = torch.tensor(place * 10000.0 ** (-2 * (i % (half // 2)) / half))
                even, odd = patches[0, row, column, 2 * i], patches[0, row, column, 2 * i + 1]
                turned[0, row, column, 2 * i] = even * angle.cos() - odd * angle.sin()
                turned[0, row, column, 2 * i + 1] = odd * angle.cos() + even * angle.sin()
    want = second(turned.permute(0, 3, 1, 2))[0].flatten(1).T
    assert difference(embedding(to_cells(pixels), cell_places(grid)), want) < 1e-5


@given(width=st.integers(1, 5000), height=st.integers(1, 5000), least=st.integers(0, 1 << 20))
def test_smart_resize(width: int, height: int, least: int) -> None:
    bounds = PixelBounds(least, 4 << 20)
    new_width, new_height = smart_resize(width, height, bounds)
    assert new_width % CELL == new_height % CELL == 0
    assert least <= new_width * new_height
    # A side has a cell at least, so only a very long picture may have more pixels than it should.
    assert new_width * new_height <= bounds.most or CELL in (new_width, new_height)


def test_defect_l_smart_resize_keeps_what_fits() -> None:
    assert smart_resize(640, 480, PixelBounds(65536, 4194304)) == (640, 480)
    assert smart_resize(200, 300, reference_bounds(1)) == (448, 640)
    assert smart_resize(4096, 4096, reference_bounds(1)) == (2048, 2048)
    assert smart_resize(4096, 4096, reference_bounds(16)) == (1024, 1024)


def test_transparency_is_white(draw_image: Callable[..., Image.Image]) -> None:
    image = draw_image(64, 64)
    image.putalpha(0)
    white = read_picture(Image.new("RGB", (64, 64), "white"), PixelBounds(0, 1 << 20))
    got = read_picture(image, PixelBounds(0, 1 << 20))
    assert torch.equal(got.cells, white.cells)
    assert got.content == white.content


def test_u42_the_cells_of_a_picture_fill_its_grid(draw_image: Callable[..., Image.Image]) -> None:
    for size in ((1, 1), (33, 200), (640, 480)):
        picture = read_picture(draw_image(*size), PixelBounds(0, 1 << 20))
        assert picture.cells.shape == (picture.grid[0] * picture.grid[1], 3072)


def test_defect_m_a_painting_is_read_back_from_its_tensor() -> None:
    """Neither rounded to 8 bits, nor clamped to what a file can hold."""
    cells = torch.randn(2, 3072, generator=generator(0)) * 2
    picture = painted_picture(cells, (1, 2))
    assert torch.equal(picture.cells, normalise(cells * 0.5 + 0.5))
    assert painted_picture(cells + 1e-4, (1, 2)).content != picture.content


@pytest.mark.parametrize(
    ("grid", "cap", "scale"),
    [((32, 32), 8.0, 4.0), ((64, 64), 8.0, 8.0), ((128, 128), 8.0, 8.0), ((128, 128), 16.0, 16.0)],
)
def test_noise_scale(grid: tuple[int, int], cap: float, scale: float) -> None:
    assert noise_scale(FlowConfig(noise_scale_max_value=cap), grid) == scale


def test_noise_is_drawn_as_pixels() -> None:
    cells = draw_noise(generator(3), (2, 1), 4.0, torch.float32)
    assert torch.equal(to_pixels(cells, (2, 1)), 4.0 * torch.randn(1, 3, 64, 32, generator=generator(3))[0])


def test_times() -> None:
    assert flow_times(4, 3.0).tolist() == pytest.approx([0.0, 0.1, 0.25, 0.5, 1.0])
    assert flow_times(5, 1.0).tolist() == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])


@pytest.mark.parametrize("shift", [1e-300, 1e-9, 1e-7, 1e8, 1e9, 1e300])
def test_a_shift_that_leaves_steps_no_time_is_refused(shift: float) -> None:
    """It would paint NaN, begin in the middle, or divide a preview by nothing."""
    with pytest.raises(BadParameter, match="is too far from 1 to have 8 steps"):
        flow_times(8, shift)


@pytest.mark.parametrize("shift", [0.001, 0.1, 1, 15, 1000])
@pytest.mark.parametrize("num_steps", [1, 50, 1000])
def test_usual_shifts_are_not(shift: float, num_steps: int) -> None:
    times = flow_times(num_steps, shift)
    assert (times[0].item(), times[-1].item()) == pytest.approx((0, 1), abs=1e-4)


def test_a_perfect_prediction_is_reached_in_one_step() -> None:
    state, pixels = (torch.randn(2, 3072, generator=generator(i)) for i in range(2))
    time = torch.tensor(0.25)
    direction = velocity(pixels, state, time[None, None])
    torch.testing.assert_close(flow_step(state, direction, time, torch.tensor(1.0)), pixels)


def test_the_last_moment_is_not_divided_by_nothing() -> None:
    state, pixels = torch.zeros(1, 3072), torch.ones(1, 3072)
    assert torch.equal(velocity(pixels, state, torch.tensor([[0.999]])), pixels / torch.tensor(0.02))


def test_half_precision_times_do_not_change_the_state() -> None:
    state = torch.zeros(1, 3072, dtype=torch.bfloat16)
    direction = velocity(torch.ones_like(state), state, torch.tensor([[0.5]]))
    assert flow_step(state, direction, torch.tensor(0.5), torch.tensor(1.0)).dtype == torch.bfloat16


@pytest.mark.parametrize("size", [(100, 64), (64, 0), (4128, 64)])
def test_u39_u42_sizes_that_cannot_be_painted_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(BadSize, match="must be a multiple of 32 up to 4096"):
        PaintOptions(size, 4, PaintGuidance())
