"""Objects without compression: chunks packed in row-major order, each with its checksum.

    chunk 0 | crc32c | chunk 1 | crc32c | ... | index | crc32c of the index

Every chunk is stored whole, little-endian, padded with the fill value where the array's edge cuts
it; chunks wholly outside of the array are left out. The index is there where the grid is sharded:
offset and length of each chunk of the object's full chunk grid as two little-endian uint64, both
2^64 - 1 for a chunk left out. So every offset follows from the grid, and a read needs no index.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ucpstore import dtypes
from ucpstore.arrays.chunks import Bytes, Chunks
from ucpstore.arrays.raw import RawArray, raw_dtype
from ucpstore.errors import CorruptError
from ucpstore.format.documents import crc32c
from ucpstore.geometry.box import Box, Index
from ucpstore.geometry.grid import CHECKSUM_BYTES, INDEX_ENTRY_BYTES, Grid

LEFT_OUT = 2**64 - 1
"""Offset and length, in the index, of a chunk that is not stored."""


def slot_bytes(grid: Grid, itemsize: int) -> int:
    """Bytes that every chunk takes up in an object: the whole chunk and its checksum."""
    return grid.chunk_bytes(itemsize) + CHECKSUM_BYTES


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a stored chunk lies in its object, in bytes, its checksum included."""

    offset: int
    length: int

    @property
    def stop(self) -> int:
        """The first byte behind it."""
        return self.offset + self.length


def chunk_extent(grid: Grid, number: int, itemsize: int) -> Extent:
    """Where in its object, without compression, the chunk lies that is stored as `number`-th."""
    slot = slot_bytes(grid, itemsize)
    return Extent(number * slot, slot)


def expected_index(grid: Grid, index: Index, itemsize: int) -> bytes:
    """The bytes behind the last chunk of the object: index and checksum, b"" for a plain one."""
    if not grid.sharded:
        return b""
    return _index(grid.stored_chunks(index), grid.chunks_per_object, slot_bytes(grid, itemsize))


@lru_cache(maxsize=64)
def _index(stored: Index, full: Index, slot: int) -> bytes:
    count = math.prod(stored)
    return build_index(stored, full, np.arange(count, dtype="<u8") * np.uint64(slot), slot)


def build_index(
    stored: Index, full: Index, offsets: npt.ArrayLike, lengths: npt.ArrayLike
) -> bytes:
    """Index and checksum of an object of `full` chunks, of which `stored` are there, in order."""
    table = np.full((*full, 2), LEFT_OUT, dtype="<u8")
    inside = table[tuple(slice(n) for n in stored)]
    for column, values in enumerate((offsets, lengths)):
        inside[..., column] = np.broadcast_to(np.asarray(values, "<u8"), math.prod(stored)).reshape(
            stored
        )
    entries = table.tobytes()
    return entries + crc32c(entries).to_bytes(CHECKSUM_BYTES, "little")


class ObjectEncoder:
    """Builds one object in a caller's buffer, from parts that come in any order.

    The buffer may hold anything at first; it must have `grid.object_bytes(index, itemsize)` bytes
    at least and stay untouched by others until the object is written. A chunk is padded and
    checksummed with its last part, while it is still in the processor's cache. Not thread-safe.
    """

    __slots__ = ("_chunk_bytes", "_chunks", "_object", "_tail")

    def __init__(self, buffer: Bytes, grid: Grid, index: Index, dtype: str) -> None:
        itemsize = dtypes.itemsize(dtype)
        size = grid.object_bytes(index, itemsize)
        if buffer.size < size:
            raise ValueError(f"the object needs {size} bytes, but the buffer has {buffer.size}")
        self._object = buffer[:size]
        self._chunk_bytes = grid.chunk_bytes(itemsize)
        self._chunks = Chunks(
            buffer, grid, index, dtype, start=0, stride=slot_bytes(grid, itemsize)
        )
        self._tail = expected_index(grid, index, itemsize)

    def fill(self, box: Box, values: RawArray) -> None:
        """Copy `values` to the region `box` of the global array, which must lie in the object.

        `values` has the shape of `box`, any strides, and the item size of the dtype. Parts must not
        overlap.
        """
        for number in self._chunks.fill(box, values):
            self._seal(number)

    def finish(self) -> memoryview:
        """The bytes of the whole object, in the buffer.

        Raises RuntimeError where parts are missing or came twice: an object is written whole.
        """
        self._chunks.check_whole()
        if self._tail:
            self._object[-len(self._tail) :] = np.frombuffer(self._tail, dtype=np.uint8)
        return self._object.data

    def _seal(self, number: int) -> None:
        start = number * (self._chunk_bytes + CHECKSUM_BYTES)
        end = start + self._chunk_bytes
        checksum = crc32c(self._object[start:end])
        self._object[end : end + CHECKSUM_BYTES] = np.frombuffer(
            checksum.to_bytes(CHECKSUM_BYTES, "little"), dtype=np.uint8
        )


def decode_chunk(
    buffer: bytes | memoryview | Bytes, grid: Grid, dtype: str, key: str, number: int
) -> RawArray:
    """The chunk in `buffer`, its checksum behind it, verified: a raw view of shape `grid.chunk`.

    Nothing is copied; elements beyond the array's edge are padding. Raises CorruptError, naming
    the object's `key` and the chunk's stored `number`, where length or checksum are wrong.
    """
    itemsize = dtypes.itemsize(dtype)
    data = buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, dtype=np.uint8)
    size = grid.chunk_bytes(itemsize)
    if data.size != size + CHECKSUM_BYTES:
        raise CorruptError(
            f"{key}: chunk {number} should have {size + CHECKSUM_BYTES} bytes, found {data.size}; "
            f"{ADVICE}"
        )
    values = data[:size]
    if crc32c(values) != int.from_bytes(data[size:].data, "little"):
        check_crc32c(values, data[size:], f"{key}: chunk {number}")
    return values.view(raw_dtype(itemsize)).reshape(grid.chunk)


def check_index(data: bytes, grid: Grid, index: Index, itemsize: int, key: str) -> None:
    """Prove that the bytes behind the last chunk of an object are the ones its grid asks for.

    Raises CorruptError, naming `key` and what is wrong. Other readers find chunks through them.
    """
    expected = expected_index(grid, index, itemsize)
    if data == expected:
        return
    if len(data) != len(expected):
        raise CorruptError(
            f"{key}: {len(expected)} bytes should follow the last chunk, found {len(data)}; "
            f"{ADVICE}"
        )
    raw = np.frombuffer(data, dtype=np.uint8)
    check_crc32c(raw[:-CHECKSUM_BYTES], raw[-CHECKSUM_BYTES:], f"{key}: index")
    for slot, at in enumerate(range(0, len(data), INDEX_ENTRY_BYTES)):
        entry, wanted = data[at : at + INDEX_ENTRY_BYTES], expected[at : at + INDEX_ENTRY_BYTES]
        if entry != wanted:
            raise CorruptError(
                f"{key}: index entry {slot} should be {_entry(wanted)}, found {_entry(entry)}; "
                f"{ADVICE}"
            )


ADVICE = "restore the object from a copy, or use another step"
"""What to do about a damaged object."""


def check_crc32c(values: Bytes, stored: Bytes, what: str) -> None:
    """Raise CorruptError, naming `what`, unless `stored` is the checksum of `values`."""
    written, found = int.from_bytes(stored.tobytes(), "little"), crc32c(values)
    if written != found:
        raise CorruptError(
            f"{what} is damaged: its checksum is {written:08x}, but its bytes give {found:08x}; "
            f"{ADVICE}"
        )


def _entry(raw: bytes) -> str:
    offset, length = (int(n) for n in np.frombuffer(raw, dtype="<u8"))
    return "no chunk" if offset == length == LEFT_OUT else f"{length} bytes at {offset}"
