"""When a picture is shown while it is painted."""

import pytest

from underpaint.generation.previews import preview_steps


@pytest.mark.parametrize("num_steps", [1, 2, 7, 50])
def test_more_previews_than_steps_are_one_a_step_and_cost_nothing(num_steps: int) -> None:
    for num_previews in (num_steps - 1, num_steps, 3 * num_steps, 10**18):
        assert preview_steps(num_previews, num_steps) == list(range(1, num_steps))


def test_few_previews_stand_evenly() -> None:
    assert preview_steps(3, 8) == [2, 4, 6]
    assert preview_steps(0, 8) == []
