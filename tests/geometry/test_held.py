"""The table of what all ranks hold, against what each rank is told of itself."""

import math

import numpy as np
from geometry.oracle import partitions
from hypothesis import given, settings
from hypothesis import strategies as st

from ucpstore.geometry import Box, Partition, Split, pieces_of, run_boxes
from ucpstore.geometry.held import held_blocks, run_boxes_of


@settings(max_examples=500, deadline=None)
@given(st.booleans().flatmap(partitions))
def test_the_table_is_what_each_rank_is_told(case) -> None:
    partition, shape = case
    expected: dict[Box, set[int]] = {}
    for rank in partition.ranks:
        for piece in pieces_of(partition, shape, rank):
            expected.setdefault(piece.box, set()).add(rank)
    blocks = list(held_blocks(partition, shape))
    assert len({block.box for block in blocks}) == len(blocks)
    assert {block.box: block.ranks for block in blocks} == {
        box: tuple(sorted(ranks)) for box, ranks in expected.items()
    }


def test_a_rank_outside_of_the_mesh_has_no_pieces() -> None:
    assert pieces_of(Partition((2,), (0, 1), (Split(0),)), (4,), 2) == ()


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 4), st.data())
def test_runs_of_many_arrays_are_those_of_each(dims, data) -> None:
    shapes = st.tuples(*[st.integers(0, 5)] * dims)
    extents = data.draw(st.lists(shapes, min_size=1, max_size=5))
    runs = []
    for extent in extents:
        start = data.draw(st.integers(0, math.prod(extent)))
        runs.append((start, data.draw(st.integers(start, math.prod(extent)))))
    starts, stops = np.array(runs, np.int64).T
    table = np.array(extents, np.int64).reshape(len(extents), dims)
    which, offsets, lengths = run_boxes_of(table, starts, stops)
    found = {
        (row, Box(tuple(offset), tuple(shape)))
        for row, offset, shape in zip(
            which.tolist(), offsets.tolist(), lengths.tolist(), strict=True
        )
    }
    assert len(found) == len(which)
    assert found == {
        (row, box)
        for row, (extent, run) in enumerate(zip(extents, runs, strict=True))
        for box in run_boxes(extent, *run)
    }
