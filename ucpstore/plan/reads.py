"""Plans of loads: which chunks a rank reads for its pieces, and where their values go."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ucpstore.geometry import Box, Grid, Index, Piece


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """One chunk to read: its stored position in the object and its region of the array.

    `chunk` is cut at the array's edge. Each copy is a box within the chunk and the box of the
    rank's local tensor that takes its values.
    """

    number: int
    chunk: Box
    copies: tuple[tuple[Box, Box], ...]


@dataclass(frozen=True, slots=True)
class ObjectRead:
    """The chunks to read from one object, in stored order."""

    index: Index
    chunks: tuple[ChunkRead, ...]


def plan_reads(pieces: Sequence[Piece], grid: Grid) -> tuple[ObjectRead, ...]:
    """The chunks that touch `pieces`, each once, by object in row-major order."""
    touched: dict[Index, list[Piece]] = {}
    for piece in pieces:
        for position in _chunks_touching(piece.box, grid):
            touched.setdefault(position, []).append(piece)
    objects: dict[Index, list[ChunkRead]] = {}
    for position in sorted(touched):
        index, number = _address(position, grid)
        objects.setdefault(index, []).append(
            _chunk_read(number, _chunk_box(position, grid), touched[position])
        )
    return tuple(
        ObjectRead(index, tuple(sorted(objects[index], key=lambda read: read.number)))
        for index in sorted(objects)
    )


def _chunks_touching(box: Box, grid: Grid) -> Iterator[Index]:
    """Positions in the array's grid of chunks, row-major."""
    if box.size == 0:
        return iter(())
    spans = zip(box.offset, box.stop, grid.chunk, strict=True)
    return itertools.product(*(range(o // c, -(-e // c)) for o, e, c in spans))


def _address(position: Index, grid: Grid) -> tuple[Index, int]:
    """The object of a chunk and the chunk's number in stored order."""
    per_object = grid.chunks_per_object
    index = tuple(p // n for p, n in zip(position, per_object, strict=True))
    number = 0
    for p, n, stored in zip(position, per_object, grid.stored_chunks(index), strict=True):
        number = number * stored + p % n
    return index, number


def _chunk_box(position: Index, grid: Grid) -> Box:
    offset = tuple(p * c for p, c in zip(position, grid.chunk, strict=True))
    spans = zip(offset, grid.chunk, grid.shape, strict=True)
    return Box(offset, tuple(min(c, e - o) for o, c, e in spans))


def _chunk_read(number: int, chunk: Box, pieces: Sequence[Piece]) -> ChunkRead:
    parts = [part for piece in pieces if (part := piece.part(chunk)) is not None]
    return ChunkRead(
        number, chunk, tuple((p.box.relative_to(chunk.offset), p.local) for p in parts)
    )
