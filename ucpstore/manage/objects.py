"""Stored objects one by one: which an array has, and whether the bytes of one are whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ucpstore.arrays.metadata import ArrayMetadata
from ucpstore.arrays.packed import check_index, decode_chunk, slot_bytes
from ucpstore.dtypes import itemsize
from ucpstore.errors import CorruptError
from ucpstore.geometry import Index
from ucpstore.options import MIB
from ucpstore.staging import BufferPool
from ucpstore.storage import Storage

READ_BYTES = 4 * MIB
"""Objects are read in parts of whole chunks up to this size, or of one chunk where it is larger."""


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """One object of an array: its key below the step, its index in the grid, its stored bytes."""

    key: str
    metadata: ArrayMetadata
    index: Index
    size: int


def objects_of(path: str, metadata: ArrayMetadata) -> Iterator[ObjectRef]:
    """All objects of the array at `path`, in row-major order."""
    grid, size = metadata.grid, itemsize(metadata.dtype)
    for index in grid.object_indices():
        yield ObjectRef(
            f"{path}/{grid.key(index)}", metadata, index, grid.object_bytes(index, size)
        )


def check_object(
    storage: Storage, key: str, each: ObjectRef, pool: BufferPool
) -> list[CorruptError]:
    """Read an object that has its right size; what is wrong with its chunks and its index.

    Raises what `read_into` does.
    """
    grid, dtype = each.metadata.grid, each.metadata.dtype
    slot = slot_bytes(grid, itemsize(dtype))
    count = (each.size - grid.index_bytes) // slot
    most = max(1, READ_BYTES // slot)
    found = []
    for first in range(0, count, most):
        numbers = range(first, min(first + most, count))
        with pool.take(len(numbers) * slot) as buffer:
            storage.read_into(key, first * slot, buffer.data)
            for number in numbers:
                start = (number - first) * slot
                try:
                    decode_chunk(buffer[start : start + slot], grid, dtype, key, number)
                except CorruptError as error:
                    found.append(error)
    if grid.sharded:
        tail = bytearray(grid.index_bytes)
        storage.read_into(key, count * slot, memoryview(tail))
        try:
            check_index(bytes(tail), grid, each.index, itemsize(dtype), key)
        except CorruptError as error:
            found.append(error)
    return found
