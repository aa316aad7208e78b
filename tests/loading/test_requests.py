"""What is asked for of objects: the ranges, and where the values of their chunks go."""

from __future__ import annotations

import torch

from ucpstore.arrays.metadata import ArrayMetadata
from ucpstore.arrays.packed import Extent
from ucpstore.describe import Read, View
from ucpstore.geometry import Box, Grid, Piece
from ucpstore.loading.requests import REQUEST_BYTES, Requests, joined
from ucpstore.plan import ChunkRead

# 2 x 2 objects of 2 x 2 chunks of 2 x 4 elements; slots of 2 * 4 * 4 + 4 = 36 bytes
GRID = Grid((8, 16), (2, 4), (4, 8), True)


def read(pieces: tuple[Piece, ...], path: str = "m/w") -> Read:
    return Read(path, (View(torch.empty(0), pieces),), "float32")


def requests(*boxes: Box, grid: Grid = GRID) -> list[tuple[str, int, int, list[int]]]:
    """Object, start and bytes of the range, and numbers of its chunks."""
    pieces = tuple(Piece(box, Box.whole(box.shape)) for box in boxes)
    array = ArrayMetadata(grid, "float32")
    found = Requests().of(read(pieces), array)
    ranges = [(each.object.name, each.object.range) for each in found]
    return [(name, r.start, r.bytes, [p.number for p in r.parts]) for name, r in ranges if r]


def test_chunks_that_follow_each_other_are_one_range() -> None:
    assert requests(Box((0, 0), (4, 8))) == [("c.0.0", 0, 144, [0, 1, 2, 3])]


def test_chunks_that_are_not_needed_part_ranges() -> None:
    assert requests(Box((0, 5), (4, 2))) == [("c.0.0", 36, 36, [1]), ("c.0.0", 108, 36, [3])]


def test_a_range_ends_at_the_largest_request() -> None:
    chunk = (1, REQUEST_BYTES // 4 // 2 - 1)  # with its checksum just half of a request
    grid = Grid((5, chunk[1]), chunk, (5, chunk[1]), True)
    found = requests(Box.whole(grid.shape), grid=grid)
    half = REQUEST_BYTES // 2
    assert found == [
        ("c.0.0", 0, 2 * half, [0, 1]),
        ("c.0.0", 2 * half, 2 * half, [2, 3]),
        ("c.0.0", 4 * half, half, [4]),
    ]


def test_copies_select_what_a_chunk_and_a_piece_have_in_common() -> None:
    piece = Piece(Box((1, 3), (2, 2)), Box((5, 7), (2, 2)))
    (found,) = Requests().of(read((piece,)), ArrayMetadata(GRID, "float32"))
    assert found.object.range is not None
    s = slice
    assert [part.copies for part in found.object.range.parts] == [
        ((0, (..., s(1, 2), s(3, 4)), (..., s(5, 6), s(7, 8))),),
        ((0, (..., s(1, 2), s(0, 1)), (..., s(5, 6), s(8, 9))),),
        ((0, (..., s(0, 1), s(3, 4)), (..., s(6, 7), s(7, 8))),),
        ((0, (..., s(0, 1), s(0, 1)), (..., s(6, 7), s(8, 9))),),
    ]


def test_arrays_that_are_cut_alike_share_their_plan_but_not_their_targets() -> None:
    planned = Requests()
    piece = Piece(Box((0, 0), (4, 8)), Box.whole((4, 8)))
    array = ArrayMetadata(GRID, "float32")
    first, second = (planned.of(read((piece,), f"m/{name}"), array)[0] for name in "vw")
    assert first.object is second.object
    assert (first.read.path, second.read.path) == ("m/v", "m/w")
    half = Read("m/x", (View(torch.empty(0), (piece,)),), "int16")
    (other,) = planned.of(half, ArrayMetadata(GRID, "int16"))
    assert other.object.range is not None
    assert other.object.range.bytes == 4 * (2 * 4 * 2 + 4), "items of another size"


def test_stored_chunks_are_joined_by_where_they_lie() -> None:
    chunks = [ChunkRead(number, Box((0,), (1,)), ()) for number in range(3)]
    extents = [Extent(50, 10), Extent(0, 20), Extent(20, 30)]
    found = [(r.start, r.bytes, [p.number for p in r.parts]) for r in joined(chunks, extents)]
    assert found == [(0, 60, [1, 2, 0])]
    apart = [(r.start, [p.number for p in r.parts]) for r in joined(chunks[:2], extents)]
    assert apart == [(0, [1]), (50, [0])]


def test_a_chunk_that_several_views_need_is_read_once() -> None:
    row = Piece(Box((0, 2), (1, 6)), Box.whole((1, 6)))
    rest = Piece(Box((1, 0), (3, 8)), Box.whole((3, 8)))
    views = (View(torch.empty(0), (row,)), View(torch.empty(0), (rest,)))
    array = ArrayMetadata(GRID, "float32")
    (found,) = Requests().of(Read("m/w", views, "float32"), array)
    assert found.object.range is not None
    parts = found.object.range.parts
    assert [part.number for part in parts] == [0, 1, 2, 3]
    assert [[view for view, _, _ in part.copies] for part in parts] == [[0, 1], [0, 1], [1], [1]]
