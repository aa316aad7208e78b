"""What a load reads: for each target the byte ranges of its objects, and where the values go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import EllipsisType

from ucpstore.arrays.chain import check_codec
from ucpstore.arrays.metadata import ArrayMetadata
from ucpstore.arrays.packed import Extent, chunk_extent, slot_bytes
from ucpstore.describe import Read
from ucpstore.dtypes import itemsize
from ucpstore.geometry import Box, Grid, Index, Piece
from ucpstore.options import MIB
from ucpstore.plan import ChunkRead, ObjectRead, plan_reads

REQUEST_BYTES = 8 * MIB
"""Adjacent chunks are read in one request up to this size."""

Selection = tuple[EllipsisType | slice, ...]
"""An index expression, a view also of 0-d arrays."""


@dataclass(frozen=True, slots=True)
class Part:
    """A chunk in a range: its bytes from `start` to `stop` of the range, and where values go.

    Each copy is the number of a view of the target, what it selects of the chunk, and of the view.
    """

    number: int
    start: int
    stop: int
    copies: tuple[tuple[int, Selection, Selection], ...]


@dataclass(frozen=True, slots=True)
class Range:
    """Chunks that follow each other in an object: where they start in it, and bytes of all."""

    start: int
    bytes: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class ObjectRequest:
    """Chunks of one object, in stored order.

    One contiguous range, but where the array has a compressor: then all chunks that are needed of
    the object, whose index tells the ranges. `plain_bytes` are those of the chunks and their
    checksums as they are without a compressor.
    """

    index: Index
    name: str
    chunks: tuple[ChunkRead, ...]
    range: Range | None
    plain_bytes: int


@dataclass(frozen=True, slots=True)
class Request:
    """Chunks of one object for one target."""

    read: Read
    array: ArrayMetadata
    object: ObjectRequest


class Requests:
    """Plans the reads of one load. Arrays of one shape that are cut alike are planned once.

    Most of these have the very same pieces and metadata, which are found by identity: to compute
    the hash of all pieces costs more than all else.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[ObjectRequest, ...]] = {}
        self._same: dict[
            tuple[int, ...], tuple[Read, ArrayMetadata, tuple[ObjectRequest, ...]]
        ] = {}

    def of(self, read: Read, array: ArrayMetadata) -> list[Request]:
        """What to read for one target: no chunk that it does not touch, none twice.

        Raises UnsupportedError, naming the array, for a compressor that is not there.
        """
        check_codec(array, read.path)
        same = (id(array), *[id(view.pieces) for view in read.views])
        found = self._same.get(same)
        if found is None:
            # with the objects, so that others do not come to have their identities
            found = self._same[same] = (read, array, self._planned(read, array))
        return [Request(read, array, each) for each in found[2]]

    def _planned(self, read: Read, array: ArrayMetadata) -> tuple[ObjectRequest, ...]:
        size, packed = itemsize(read.dtype), array.codec is None
        views = tuple(view.pieces for view in read.views)
        key = (views, array.grid, size, packed)
        planned = self._known.get(key)
        if planned is None:
            planned = self._known[key] = tuple(_plan(views, array.grid, size, packed))
        return planned


def _plan(
    views: Sequence[Sequence[Piece]], grid: Grid, size: int, packed: bool
) -> Iterator[ObjectRequest]:
    slot = slot_bytes(grid, size)
    most = max(1, REQUEST_BYTES // slot)
    for found in plan_reads(views, grid):
        for run in _runs(found, most) if packed else [found.chunks]:
            extents = [chunk_extent(grid, each.number, size) for each in run]
            yield ObjectRequest(
                found.index,
                grid.key(found.index),
                run,
                _range(run, extents) if packed else None,
                len(run) * slot,
            )


def _runs(found: ObjectRead, most: int) -> Iterator[tuple[ChunkRead, ...]]:
    """At most `most` chunks each that follow each other in the object."""
    run: list[ChunkRead] = []
    for chunk in found.chunks:
        if run and (chunk.number != run[-1].number + 1 or len(run) == most):
            yield tuple(run)
            run = []
        run.append(chunk)
    yield tuple(run)


def joined(chunks: Sequence[ChunkRead], extents: Sequence[Extent]) -> Iterator[Range]:
    """Ranges of chunks that lie next to each other; `extents` are those of all stored chunks."""
    run: list[ChunkRead] = []
    for chunk in sorted(chunks, key=lambda each: extents[each.number].offset):
        here = extents[chunk.number]
        if run and (
            here.offset != extents[run[-1].number].stop
            or here.stop - extents[run[0].number].offset > REQUEST_BYTES
        ):
            yield _range(run, [extents[each.number] for each in run])
            run = []
        run.append(chunk)
    yield _range(run, [extents[each.number] for each in run])


def _range(chunks: Sequence[ChunkRead], extents: Sequence[Extent]) -> Range:
    start = extents[0].offset
    return Range(
        start,
        extents[-1].stop - start,
        tuple(
            Part(
                chunk.number,
                extent.offset - start,
                extent.stop - start,
                tuple(
                    (view, _selection(inside), _selection(local))
                    for view, inside, local in chunk.copies
                ),
            )
            for chunk, extent in zip(chunks, extents, strict=True)
        ),
    )


def _selection(box: Box) -> Selection:
    return (..., *box.slices())
