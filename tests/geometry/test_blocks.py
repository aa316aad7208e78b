"""Tables of blocks, against the same in sets and dicts."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ucpstore.geometry import Block, Blocks, Box, spread, starts_of
from ucpstore.geometry.blocks import join

boxes = st.builds(
    Box, st.tuples(st.integers(0, 3), st.integers(0, 3)), st.tuples(*[st.integers(1, 2)] * 2)
)
ranks = st.sets(st.integers(0, 9), min_size=1).map(lambda each: tuple(sorted(each)))
tables = st.lists(st.builds(Block, boxes, ranks), max_size=6)


@settings(deadline=None)
@given(tables)
def test_a_table_gives_its_blocks_back(blocks) -> None:
    table = Blocks.of(2, blocks)
    assert (len(table), list(table)) == (len(blocks), blocks)


@settings(deadline=None)
@given(st.lists(tables, min_size=1, max_size=3))
def test_equal_boxes_are_joined_and_all_are_in_order(several) -> None:
    expected: dict[Box, set[int]] = {}
    for block in (block for blocks in several for block in blocks):
        expected.setdefault(block.box, set()).update(block.ranks)
    found = join([Blocks.of(2, blocks) for blocks in several])
    assert list(found) == [Block(box, tuple(sorted(expected[box]))) for box in sorted(expected)]


def test_blocks_of_scalars_are_joined() -> None:
    scalar = Box((), ())
    found = join([Blocks.of(0, [Block(scalar, (4, 5))]), Blocks.of(0, [Block(scalar, (1,))])])
    assert list(found) == [Block(scalar, (1, 4, 5))]


def test_rows_are_spread_over_their_places() -> None:
    rows, places = spread(np.array([10, 20, 30]), np.array([2, 0, 3]))
    assert (rows.tolist(), places.tolist()) == ([0, 0, 2, 2, 2], [10, 11, 30, 31, 32])


def test_starts_have_numbers_that_do_not_occur_too() -> None:
    assert starts_of(np.array([0, 0, 2]), 4).tolist() == [0, 2, 2, 3, 3]
