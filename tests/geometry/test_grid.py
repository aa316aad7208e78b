import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ucpstore.geometry import Box, Grid


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    dims = draw(st.integers(0, 3))
    shape = tuple(draw(st.integers(0, 9)) for _ in range(dims))
    chunk = tuple(draw(st.integers(1, 4)) for _ in range(dims))
    return Grid(shape, chunk, tuple(c * draw(st.integers(1, 3)) for c in chunk), sharded=True)


@given(grids())
def test_objects_and_chunks_cover_every_element_once(grid: Grid) -> None:
    objects, chunks = np.zeros(grid.shape, int), np.zeros(grid.shape, int)
    for index in grid.object_indices():
        box = grid.object_box(index)
        objects[box.slices()] += 1
        stored = grid.chunks(index)
        assert len(stored) == math.prod(grid.stored_chunks(index))
        for chunk in stored:
            assert chunk.size > 0
            assert box.contains(chunk)
            chunks[chunk.slices()] += 1
    assert (objects == 1).all()
    assert (chunks == 1).all()


@given(grids())
def test_a_chunks_slot_is_its_place_in_the_full_object(grid: Grid) -> None:
    for index in grid.object_indices():
        origin = grid.object_box(index).offset
        full = list(itertools.product(*(range(n) for n in grid.chunks_per_object)))
        for number, chunk in enumerate(grid.chunks(index)):
            position = tuple(
                (o - s) // c for o, s, c in zip(chunk.offset, origin, grid.chunk, strict=True)
            )
            assert full[grid.chunk_slot(index, number)] == position


def test_sizes_count_padding_checksums_and_index() -> None:
    grid = Grid((10, 7), (4, 4), (8, 8), sharded=True)
    assert grid.objects == (2, 1)
    assert grid.chunk_bytes(4) == 64
    assert grid.index_bytes == 4 * 16 + 4
    assert grid.object_bytes((0, 0), 4) == 4 * (64 + 4) + 68
    assert grid.object_bytes((1, 0), 4) == 2 * (64 + 4) + 68
    assert grid.chunks((1, 0)) == (Box((8, 0), (2, 4)), Box((8, 4), (2, 3)))
    plain = Grid((3, 5), (3, 5), (3, 5), sharded=False)
    assert plain.object_bytes((0, 0), 2) == 30 + 4


def test_keys() -> None:
    assert Grid((10, 7), (4, 4), (8, 8), sharded=True).key((1, 0)) == "c.1.0"
    assert Grid((), (), (), sharded=False).key(()) == "c"


def test_a_zero_extent_has_no_objects_and_0d_has_one() -> None:
    assert list(Grid((0, 3), (1, 3), (1, 3), sharded=False).object_indices()) == []
    scalar = Grid((), (), (), sharded=False)
    assert list(scalar.object_indices()) == [()]
    assert scalar.object_bytes((), 8) == 12
