import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ucpstore.geometry import Box, Piece


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    offset = draw(st.tuples(st.integers(0, 6), st.integers(0, 6)))
    return Box(offset, draw(st.tuples(st.integers(0, 5), st.integers(0, 5))))


def cells(box: Box) -> np.ndarray:
    marked = np.zeros((12, 12), bool)
    marked[box.slices()] = True
    return marked


@given(boxes(), boxes())
def test_intersection_is_the_common_cells(a: Box, b: Box) -> None:
    both = cells(a) & cells(b)
    common = a.intersect(b)
    assert (common is None) == (not both.any())
    if common is not None:
        np.testing.assert_array_equal(cells(common), both)
        assert common.size == both.sum()
        assert a.contains(common)
        assert b.contains(common)


def test_a_0d_box_has_one_element() -> None:
    box = Box.whole(())
    assert box.size == 1
    assert box.intersect(box) == box


def test_stop_is_exclusive() -> None:
    assert Box((2, 3), (4, 5)).stop == (6, 8)
    assert Box((0,), (2,)).intersect(Box((2,), (2,))) is None


def test_boxes_move() -> None:
    box = Box((2, 3), (4, 5))
    assert box.relative_to((1, 1)) == Box((1, 2), (4, 5))
    assert box.shifted((1, 1)) == Box((3, 4), (4, 5))


def test_a_part_of_a_piece_keeps_its_values() -> None:
    piece = Piece(Box((10, 20), (4, 6)), Box((0, 2), (4, 6)))
    part = piece.part(Box((12, 0), (100, 22)))
    assert part == Piece(Box((12, 20), (2, 2)), Box((2, 2), (2, 2)))
    assert piece.part(Box((0, 0), (10, 30))) is None
