"""The layout against its rules in words, on random layouts."""

from hypothesis import given
from hypothesis import strategies as st

from underpaint.layout import Grid, Layout, neo_positions, qwen_positions

grids = st.tuples(st.integers(1, 5), st.integers(1, 5))
parts = st.lists(st.one_of(st.integers(1, 7), grids), min_size=1, max_size=8)

IMAGE_THEN_TEXT: list[int | Grid] = [(2, 3), 4]
IMAGES_TOUCHING: list[int | Grid] = [2, (2, 2), (1, 3), 3]
TEXT_ONLY: list[int | Grid] = [6]
MANY_REFERENCES: list[int | Grid] = [3, (2, 2), 2, (3, 1), 2, (2, 4), 5, (2, 2)]
NAMED = (IMAGE_THEN_TEXT, IMAGES_TOUCHING, TEXT_ONLY, MANY_REFERENCES)


def sees(layout: Layout, row: int, key: int) -> bool:
    """The rule in words: text sees what is before it and itself, an image also the whole of itself."""
    if key <= row:
        return True
    return any(image.start <= row < image.stop and image.start <= key < image.stop for image in layout.images)


def check_mask(layout: Layout) -> None:
    stops = layout.visible_stop().tolist()
    for row in range(layout.num_rows):
        for key in range(layout.num_rows):
            assert (key < stops[row]) == sees(layout, row, key), (row, key)


@given(parts)
def test_visible_stop_is_the_rule_in_words(drawn: list[int | Grid]) -> None:
    check_mask(Layout.of(drawn))


def test_visible_stop_of_the_named_shapes() -> None:
    for shape in NAMED:
        check_mask(Layout.of(shape))


def test_touching_images_are_two_blocks() -> None:
    layout = Layout.of([(1, 2), (1, 2)])
    assert layout.visible_stop().tolist() == [2, 2, 4, 4]


@given(parts, st.data())
def test_plan_gives_every_row_its_visible_stop(drawn: list[int | Grid], data: st.DataObject) -> None:
    layout = Layout.of(drawn)
    inside = {row for image in layout.images for row in range(image.start + 1, image.stop)}
    borders = [row for row in range(layout.num_rows + 1) if row not in inside]
    start, stop = sorted([data.draw(st.sampled_from(borders)), data.draw(st.sampled_from(borders))])
    stops = layout.visible_stop().tolist()
    covered = []
    for call in layout.plan(start, stop):
        for row in range(call.start, call.stop):
            assert (row + 1 if call.causal else call.stop) == stops[row]
            covered.append(row)
    assert covered == list(range(start, stop))


@given(parts)
def test_trunk_units_cover_the_trunk_and_end_with_images(drawn: list[int | Grid]) -> None:
    layout = Layout.of(drawn)
    units = layout.trunk_units()
    assert [unit.stop for unit in units] == [image.stop for image in layout.images]
    assert [unit.start for unit in units] == [0, *(unit.stop for unit in units)][: len(units)]
    assert layout.trunk_stop == (units[-1].stop if units else 0)


@given(parts, parts, st.integers(1, 6))
def test_paged_units_are_pages_of_text_and_images_with_their_text(
    drawn: list[int | Grid], more: list[int | Grid], page_rows: int
) -> None:
    layout = Layout.of(drawn)
    units = layout.paged_units(page_rows)
    assert [unit.start for unit in units] == [0, *(unit.stop for unit in units)][: len(units)]
    stops = {image.stop for image in layout.images}
    inside = {row for image in layout.images for row in range(image.start, image.stop)}
    for unit in units:
        text = sum(row not in inside for row in range(unit.start, unit.stop))
        if unit.stop in stops:
            assert text < page_rows, "a page of text would have been a unit of its own"
        else:
            assert text == page_rows == unit.stop - unit.start
    assert stops <= {unit.stop for unit in units}
    assert layout.num_rows - (units[-1].stop if units else 0) < page_rows
    longer = Layout.of([*drawn, (1, 1), *more])
    assert longer.paged_units(page_rows)[: len(units)] == units


@given(parts, st.integers(0, 30), st.integers(1, 9))
def test_a_chunk_never_ends_inside_an_image(drawn: list[int | Grid], start: int, max_rows: int) -> None:
    layout = Layout.of(drawn)
    inside = {row for image in layout.images for row in range(image.start + 1, image.stop)}
    if start >= layout.num_rows or start in inside:
        return
    stop = layout.chunk_stop(start, max_rows)
    assert stop not in inside
    assert start < stop <= layout.num_rows
    first = next(segment for segment in layout.segments if segment.start <= start < segment.stop)
    assert stop - start <= max_rows or (first.kind == "image" and stop == first.stop)
    assert (
        stop == layout.num_rows
        or stop - start == max_rows
        or any(image.start == stop or image.stop == stop for image in layout.images)
    )


@given(parts, parts)
def test_what_follows_a_trunk_changes_nothing_in_it(drawn: list[int | Grid], more: list[int | Grid]) -> None:
    """Why trunks can be shared: neither mask nor positions of earlier rows know what comes later."""
    short, long = Layout.of([*drawn, (2, 2)]), Layout.of([*drawn, (2, 2), *more])
    n = short.num_rows
    assert long.visible_stop()[:n].tolist() == short.visible_stop().tolist()
    for rule in (qwen_positions, neo_positions):
        assert rule(long)[:n].tolist() == rule(short).tolist()


def qwen_positions_in_words(layout: Layout) -> list[list[int]]:
    rows = []
    position = 0
    for segment in layout.segments:
        if segment.grid is None:
            for _ in range(segment.start, segment.stop):
                rows.append([position] * 3)
                position += 1
        else:
            height, width = segment.grid
            for y in range(height):
                for x in range(width):
                    rows.append([position, y - (height - height // 2), x - (width - width // 2)])
            position += max(height, width)
    return rows


@given(parts)
def test_qwen_positions(drawn: list[int | Grid]) -> None:
    layout = Layout.of(drawn)
    assert qwen_positions(layout).tolist() == qwen_positions_in_words(layout)


@given(parts)
def test_neo_positions(drawn: list[int | Grid]) -> None:
    layout = Layout.of(drawn)
    rows, t = [], 0
    for segment in layout.segments:
        if segment.grid is None:
            rows += [[t + i, 0, 0] for i in range(segment.stop - segment.start)]
            t += segment.stop - segment.start
        else:
            height, width = segment.grid
            rows += [[t, y, x] for y in range(height) for x in range(width)]
            t += 1
    assert neo_positions(layout).tolist() == rows


def test_an_empty_layout_has_no_rows() -> None:
    layout = Layout.of([])
    assert layout.num_rows == 0
    assert layout.visible_stop().shape == (0,)
    assert qwen_positions(layout).shape == neo_positions(layout).shape == (0, 3)
