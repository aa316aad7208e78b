"""The proof that ranks hold an array, against counting each element."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucpstore.errors import StateError
from ucpstore.geometry import Block, Blocks, Box, run_boxes
from ucpstore.geometry.coverage import prove_coverage, tiles

HUGE = (1 << 40, 1 << 40)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A box that is cut in two again and again."""
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    boxes = [Box.whole(shape)] if math.prod(shape) else []
    for _ in range(draw(st.integers(0, 8)) if boxes and shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[dim]))
        for offset, length in ((0, at), (at, box.shape[dim] - at)):
            if length:
                start, extent = list(box.offset), list(box.shape)
                start[dim] += offset
                extent[dim] = length
                boxes.append(Box(tuple(start), tuple(extent)))
    return shape, draw(st.permutations(boxes))


def held(shape: tuple[int, ...], boxes: list[Box]) -> Blocks:
    """Each box by a rank of its own."""
    return Blocks.of(len(shape), [Block(box, (number,)) for number, box in enumerate(boxes)])


@settings(max_examples=500, deadline=None)
@given(tilings(), st.data())
def test_what_is_covered_once_and_only_that_is_proved(case, data) -> None:
    shape, boxes = case
    boxes = list(boxes)
    change = data.draw(st.sampled_from(["none", "drop", "double", "move", "grow"]))
    if change != "none" and boxes:
        number = data.draw(st.integers(0, len(boxes) - 1))
        box = boxes[number]
        if change in ("drop", "move"):
            del boxes[number]
        if change == "double":
            boxes.append(box)
        if change == "move":
            by = data.draw(st.tuples(*(st.integers(-2, 2) for _ in shape)))
            boxes.append(box.shifted(by))
        if change == "grow":
            by = data.draw(st.tuples(*(st.integers(0, 2) for _ in shape)))
            boxes[number] = Box(
                box.offset, tuple(n + more for n, more in zip(box.shape, by, strict=True))
            )
    margin = 10
    count = np.zeros(tuple(extent + 2 * margin for extent in shape), int)
    for box in boxes:
        count[box.shifted((margin,) * len(shape)).slices()] += 1
    expected = np.zeros_like(count)
    expected[tuple(slice(margin, margin + extent) for extent in shape)] = 1
    blocks = held(shape, boxes)
    assert tiles(shape, blocks) is bool((count == expected).all())
    if (count == expected).all():
        prove_coverage("a", shape, blocks)
    else:
        with pytest.raises(StateError, match=r"^a: "):
            prove_coverage("a", shape, blocks)


def test_a_gap_is_named() -> None:
    """Ranks hold rows of 4 columns, but rank 1 only two columns of its row."""
    rows = [Box((0, 0), (1, 4)), Box((1, 0), (1, 2)), Box((2, 0), (2, 4))]
    with pytest.raises(
        StateError,
        match=r"a: nobody holds Box\(offset=\(1, 2\), shape=\(1, 2\)\); the ranks hold 14 of",
    ):
        prove_coverage("a", (4, 4), held((4, 4), rows))


def test_an_overlap_is_named_with_few_of_many_ranks() -> None:
    one = Block(Box((0,), (5,)), tuple(range(100)))
    other = Block(Box((4,), (4,)), (7,))
    with pytest.raises(
        StateError,
        match=r"a: ranks 0, 1, 2, 3, 4, 5, 6, 7, \.\.\. \(100 in all\) and rank 7 hold overlapping "
        r"parts that are not the same, Box\(offset=\(0,\), shape=\(5,\)\) and "
        r"Box\(offset=\(4,\), shape=\(4,\)\)",
    ):
        prove_coverage("a", (8,), Blocks.of(1, [one, other]))


def test_a_part_outside_of_the_array_is_named() -> None:
    with pytest.raises(
        StateError, match=r"a: .*\(9,\)\), held by rank 3, lies outside of .* shape \(8,\)"
    ):
        prove_coverage("a", (8,), Blocks.of(1, [Block(Box((0,), (9,)), (3,))]))


def test_arrays_too_large_for_the_quick_proof() -> None:
    halves = [Box((0, 0), (1 << 39, 1 << 40)), Box((1 << 39, 0), (1 << 39, 1 << 40))]
    assert not tiles(HUGE, held(HUGE, halves))
    prove_coverage("a", HUGE, held(HUGE, halves))
    with pytest.raises(StateError, match="nobody holds"):
        prove_coverage("a", HUGE, held(HUGE, halves[1:]))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=4).map(tuple), st.data())
def test_a_run_is_at_most_2n_minus_1_boxes_in_order(shape, data) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    numbers = np.arange(size).reshape(shape)
    boxes = list(run_boxes(shape, start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    found = [numbers[box.slices()].ravel() for box in boxes]
    assert [n for values in found for n in values.tolist()] == list(range(start, stop))
