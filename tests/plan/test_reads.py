import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ucpstore.geometry import Box, Grid, Piece
from ucpstore.plan import plan_reads


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    dims = draw(st.integers(0, 3))
    shape = tuple(draw(st.integers(0, 9)) for _ in range(dims))
    chunk = tuple(draw(st.integers(1, 4)) for _ in range(dims))
    return Grid(shape, chunk, tuple(c * draw(st.integers(1, 3)) for c in chunk), sharded=True)


@st.composite
def reads(draw: st.DrawFn) -> tuple[Grid, list[Piece]]:
    """A grid and pieces, each of which goes to the same place of a tensor like the array."""
    grid = draw(grids())
    pieces = []
    for _ in range(draw(st.integers(0, 3))):
        offset = tuple(draw(st.integers(0, e)) for e in grid.shape)
        spans = zip(offset, grid.shape, strict=True)
        box = Box(offset, tuple(draw(st.integers(0, e - o)) for o, e in spans))
        pieces.append(Piece(box, box))
    return grid, pieces


@given(reads())
def test_the_chunks_that_touch_are_read_once_and_fill_the_pieces(case) -> None:
    grid, pieces = case
    wanted = np.zeros(grid.shape, bool)
    for piece in pieces:
        wanted[piece.box.slices()] = True
    filled = np.zeros(grid.shape, bool)
    found = []
    for read in plan_reads([pieces], grid):
        stored = grid.chunks(read.index)
        for chunk in read.chunks:
            assert stored[chunk.number] == chunk.chunk
            found.append((read.index, chunk.number))
            for view, source, target in chunk.copies:
                assert view == 0
                assert source.shifted(chunk.chunk.offset) == target
                filled[target.slices()] = True
    np.testing.assert_array_equal(filled, wanted)
    assert found == [
        (index, number)
        for index in grid.object_indices()
        for number, chunk in enumerate(grid.chunks(index))
        if wanted[chunk.slices()].any()
    ]


def test_a_piece_over_two_chunks_is_copied_in_two_parts() -> None:
    grid = Grid((4, 6), (2, 3), (2, 6), sharded=True)
    piece = Piece(Box((1, 2), (1, 3)), Box((0, 0), (1, 3)))
    (read,) = plan_reads([[piece]], grid)
    assert read.index == (0, 0)
    assert [(c.number, c.chunk, c.copies) for c in read.chunks] == [
        (0, Box((0, 0), (2, 3)), ((0, Box((1, 2), (1, 1)), Box((0, 0), (1, 1))),)),
        (1, Box((0, 3), (2, 3)), ((0, Box((1, 0), (1, 2)), Box((0, 1), (1, 2))),)),
    ]


def test_numbers_count_stored_chunks_only() -> None:
    """The second object of a row has one column of chunks inside the array instead of two."""
    grid = Grid((4, 6), (2, 2), (4, 4), sharded=True)
    corner = Box((2, 4), (2, 2))
    (read,) = plan_reads([[Piece(corner, corner)]], grid)
    assert (read.index, read.chunks[0].number) == ((0, 1), 1)
