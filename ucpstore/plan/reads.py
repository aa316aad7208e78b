"""Plans of loads: which chunks a rank reads for its pieces, and where their values go."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ucpstore.geometry import Box, Grid, Index, Piece


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """One chunk to read: its stored position in the object and its region of the array.

    `chunk` is cut at the array's edge. Each copy is the number of a view of the rank's memory, a
    box within the chunk, and the box of the view that takes its values.
    """

    number: int
    chunk: Box
    copies: tuple[tuple[int, Box, Box], ...]


@dataclass(frozen=True, slots=True)
class ObjectRead:
    """The chunks to read from one object, in stored order."""

    index: Index
    chunks: tuple[ChunkRead, ...]


def plan_reads(views: Sequence[Sequence[Piece]], grid: Grid) -> tuple[ObjectRead, ...]:
    """The chunks that touch the pieces of `views`, each once, by object in row-major order."""
    found: dict[Index, dict[int, ChunkRead]] = {}
    steps: dict[Index, Index] = {}
    for view, piece in ((view, piece) for view, pieces in enumerate(views) for piece in pieces):
        if not piece.box.size:
            continue
        for spans in itertools.product(*_spans(piece, grid)):
            index = tuple([span.object for span in spans])
            if index not in found:
                found[index], steps[index] = {}, _steps(grid.stored_chunks(index))
            number = sum([s.within * n for s, n in zip(spans, steps[index], strict=True)])
            copy = (
                view,
                Box(tuple([s.inside for s in spans]), shape := tuple([s.extent for s in spans])),
                Box(tuple([s.local for s in spans]), shape),
            )
            known = found[index].get(number)
            if known is None:
                chunk = Box(tuple([s.start for s in spans]), tuple([s.chunk for s in spans]))
                found[index][number] = ChunkRead(number, chunk, (copy,))
            else:
                found[index][number] = replace(known, copies=(*known.copies, copy))
    return tuple(
        ObjectRead(index, tuple([chunks[number] for number in sorted(chunks)]))
        for index, chunks in sorted(found.items())
    )


@dataclass(frozen=True, slots=True)
class _Span:
    """What a piece and one chunk have in common along one dimension.

    `object` and `within` are the positions of the object and of the chunk in it, `start` and
    `chunk` where the chunk lies in the array, `inside` and `extent` where the common elements lie
    in the chunk, `local` where they start in the rank's local tensor.
    """

    object: int
    within: int
    start: int
    chunk: int
    inside: int
    extent: int
    local: int


def _spans(piece: Piece, grid: Grid) -> list[list[_Span]]:
    """By dimension, the spans of a piece that has elements: all chunks it touches are products."""
    return [
        [
            _Span(
                position // per_object,
                position % per_object,
                start := position * chunk,
                min(chunk, extent - start),
                (first := max(offset, start)) - start,
                min(stop, start + chunk) - first,
                first - offset + local,
            )
            for position in range(offset // chunk, -(-stop // chunk))
        ]
        for offset, stop, local, chunk, per_object, extent in zip(
            piece.box.offset,
            piece.box.stop,
            piece.local.offset,
            grid.chunk,
            grid.chunks_per_object,
            grid.shape,
            strict=True,
        )
    ]


def _steps(stored: Index) -> Index:
    """By how much the stored number grows with each position along each dimension."""
    steps = [1] * len(stored)
    for dim in range(len(stored) - 2, -1, -1):
        steps[dim] = steps[dim + 1] * stored[dim + 1]
    return tuple(steps)
