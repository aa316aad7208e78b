"""Stored objects one by one: which an array has, and whether the bytes of one are whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ucpstore.arrays.chain import decode
from ucpstore.arrays.compressed import check_order, parse_index
from ucpstore.arrays.metadata import ArrayMetadata
from ucpstore.arrays.packed import ADVICE, Extent, check_index, chunk_extent
from ucpstore.catalog import read_tail
from ucpstore.dtypes import itemsize
from ucpstore.errors import CorruptError
from ucpstore.geometry import Index
from ucpstore.geometry.grid import CHECKSUM_BYTES
from ucpstore.options import MIB
from ucpstore.staging import BufferPool
from ucpstore.storage import Storage, read_into

READ_BYTES = 4 * MIB
"""Objects are read in parts of whole chunks up to this size, or of one chunk where it is larger."""


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """One object of an array: its key below the step, its index in the grid, its stored bytes.

    `size` is None where a compressor decides about it.
    """

    key: str
    metadata: ArrayMetadata
    index: Index
    size: int | None


def objects_of(path: str, metadata: ArrayMetadata) -> Iterator[ObjectRef]:
    """All objects of the array at `path`, in row-major order."""
    grid, item = metadata.grid, itemsize(metadata.dtype)
    for index in grid.object_indices():
        size = grid.object_bytes(index, item) if metadata.codec is None else None
        yield ObjectRef(f"{path}/{grid.key(index)}", metadata, index, size)


def check_tail(storage: Storage, key: str, each: ObjectRef, size: int) -> list[CorruptError]:
    """Read the index of a compressed object of `size` bytes; what is wrong with it.

    Raises what `read_into` does.
    """
    try:
        _extents(storage, key, each, size)
    except CorruptError as error:
        return [error]
    return []


def check_object(
    storage: Storage, key: str, each: ObjectRef, size: int, pool: BufferPool
) -> list[CorruptError]:
    """Read a whole object of `size` bytes; what is wrong with its chunks and its index.

    Raises what `read_into` does.
    """
    metadata = each.metadata
    grid, dtype, codec = metadata.grid, metadata.dtype, metadata.codec
    found = []
    try:
        extents = _extents(storage, key, each, size)
    except CorruptError as error:
        return [error]  # nothing tells where its chunks are
    room = 0 if codec is None else grid.chunk_bytes(itemsize(dtype))
    for numbers in _runs(extents):
        start = extents[numbers[0]].offset
        length = extents[numbers[-1]].stop - start
        with pool.take(length + room) as buffer:
            read_into(storage, key, start, buffer[:length].data)
            for number in numbers:
                here = extents[number]
                part = buffer[here.offset - start : here.stop - start]
                try:
                    decode(part, grid, dtype, codec, key, number)
                except CorruptError as error:
                    found.append(error)
    if codec is None and grid.sharded:
        tail = read_tail(storage, key, grid, size)
        try:
            check_index(tail, grid, each.index, itemsize(dtype), key)
        except CorruptError as error:
            found.append(error)
    return found


def _extents(storage: Storage, key: str, each: ObjectRef, size: int) -> tuple[Extent, ...]:
    """Where the chunks of an object lie: by its grid, or with a compressor by its index."""
    grid, index = each.metadata.grid, each.index
    if each.metadata.codec is None:
        item, count = itemsize(each.metadata.dtype), math.prod(grid.stored_chunks(index))
        return tuple(chunk_extent(grid, number, item) for number in range(count))
    if not grid.sharded:
        if size < CHECKSUM_BYTES:
            raise CorruptError(
                f"{key} should have at least the {CHECKSUM_BYTES} bytes of its checksum, found "
                f"{size}; {ADVICE}"
            )
        return (Extent(0, size),)
    tail = read_tail(storage, key, grid, size)
    extents = parse_index(tail, grid, index, size, key)
    check_order(tail, extents, grid, index, size, key)
    return extents


def _runs(extents: Sequence[Extent]) -> Iterator[range]:
    """Numbers of chunks to read together, about `READ_BYTES`; the extents follow each other."""
    first = 0
    for number, each in enumerate(extents):
        if number > first and each.stop - extents[first].offset > READ_BYTES:
            yield range(first, number)
            first = number
    if extents:
        yield range(first, len(extents))
