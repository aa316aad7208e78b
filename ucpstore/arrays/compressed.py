"""Objects with a compressor: chunks of any length behind each other, found through the index.

    chunk 0, compressed | crc32c | chunk 1, compressed | crc32c | ... | index | crc32c of the index

As in packed objects chunks are padded, in row-major order, and left out where they lie wholly
outside of the array; a plain object is one chunk without an index. Only the lengths differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ucpstore import dtypes
from ucpstore.arrays.chunks import Bytes, Chunks
from ucpstore.arrays.compressors import bound_bytes, compressor
from ucpstore.arrays.packed import ADVICE, LEFT_OUT, Extent, build_index, check_crc32c
from ucpstore.arrays.raw import RawArray, raw_dtype
from ucpstore.errors import CorruptError, UnsupportedError
from ucpstore.format.documents import crc32c
from ucpstore.geometry.box import Box, Index
from ucpstore.geometry.grid import CHECKSUM_BYTES, INDEX_ENTRY_BYTES, Grid


def object_bound(grid: Grid, index: Index, itemsize: int) -> int:
    """Most bytes that an object can have, whatever its values."""
    slot = bound_bytes(grid.chunk_bytes(itemsize)) + CHECKSUM_BYTES
    return len(grid.chunks(index)) * slot + grid.index_bytes


def buffer_bytes(grid: Grid, index: Index, itemsize: int) -> int:
    """Bytes of the buffer of a `CompressedEncoder`, those that the codec needs meanwhile too."""
    return object_bound(grid, index, itemsize) + bound_bytes(grid.chunk_bytes(itemsize))


class CompressedEncoder:
    """Builds one object in a caller's buffer of `buffer_bytes`, from parts in any order.

    The chunks are filled at the buffer's end and compressed one by one to its beginning: what is
    written never reaches what is still to be read, since the room in front is what all chunks
    together may grow by. Not thread-safe.
    """

    __slots__ = ("_buffer", "_chunk_bytes", "_chunks", "_compressor", "_grid", "_index", "_start")

    def __init__(self, buffer: Bytes, grid: Grid, index: Index, dtype: str, codec: str) -> None:
        itemsize = dtypes.itemsize(dtype)
        size = object_bound(grid, index, itemsize)
        if buffer.size < size:
            raise ValueError(f"the object needs {size} bytes, but the buffer has {buffer.size}")
        self._buffer = buffer
        self._grid = grid
        self._index = index
        self._compressor = compressor(codec, itemsize)
        self._chunk_bytes = grid.chunk_bytes(itemsize)
        self._start = size - grid.index_bytes - len(grid.chunks(index)) * self._chunk_bytes
        self._chunks = Chunks(
            buffer, grid, index, dtype, start=self._start, stride=self._chunk_bytes
        )

    def fill(self, box: Box, values: RawArray) -> None:
        """As `ObjectEncoder.fill`."""
        for _ in self._chunks.fill(box, values):
            pass

    def finish(self) -> memoryview:
        """The bytes of the whole object, in the buffer; call it once.

        Raises RuntimeError where parts are missing or came twice.
        """
        self._chunks.check_whole()
        end = 0
        extents = []
        for number in range(len(self._chunks)):
            start = self._start + number * self._chunk_bytes
            encoded = self._compressor.encode(self._buffer[start : start + self._chunk_bytes])
            stop = end + encoded.size
            if encoded.size > bound_bytes(self._chunk_bytes):
                raise UnsupportedError(
                    f"codec {self._compressor.name!r} made {encoded.size} bytes of "
                    f"{self._chunk_bytes}; use another one"
                )
            checksum = crc32c(encoded).to_bytes(CHECKSUM_BYTES, "little")
            self._buffer[end:stop] = encoded
            self._buffer[stop : stop + CHECKSUM_BYTES] = np.frombuffer(checksum, np.uint8)
            extents.append(Extent(end, encoded.size + CHECKSUM_BYTES))
            end = stop + CHECKSUM_BYTES
        tail = _index(self._grid, self._index, extents)
        self._buffer[end : end + len(tail)] = np.frombuffer(tail, np.uint8)
        return self._buffer[: end + len(tail)].data


def _index(grid: Grid, index: Index, extents: Sequence[Extent]) -> bytes:
    if not grid.sharded:
        return b""
    return build_index(
        grid.stored_chunks(index),
        grid.chunks_per_object,
        [each.offset for each in extents],
        [each.length for each in extents],
    )


def parse_index(tail: bytes, grid: Grid, index: Index, size: int, key: str) -> tuple[Extent, ...]:
    """Where each stored chunk lies in an object of `size` bytes, of which `tail` is the index.

    Raises CorruptError, naming `key`, where the index is damaged or leaves out a chunk that holds
    elements of the array, and where it names bytes that the object does not have.
    """
    raw = np.frombuffer(tail, dtype=np.uint8)
    check_crc32c(raw[:-CHECKSUM_BYTES], raw[-CHECKSUM_BYTES:], f"{key}: index")
    table = np.frombuffer(tail[:-CHECKSUM_BYTES], "<u8").reshape(-1, 2)
    room = size - len(tail)
    extents = []
    for number in range(len(grid.chunks(index))):
        offset, length = table[grid.chunk_slot(index, number)].tolist()
        if offset == length == LEFT_OUT:
            raise CorruptError(f"{key}: chunk {number} is missing; {ADVICE}")
        if length < CHECKSUM_BYTES or offset + length > room:
            raise CorruptError(
                f"{key}: chunk {number} should lie in the first {room} bytes, but the index has "
                f"{length} bytes at {offset}; {ADVICE}"
            )
        extents.append(Extent(offset, length))
    return tuple(extents)


def check_order(
    tail: bytes, extents: Sequence[Extent], grid: Grid, index: Index, size: int, key: str
) -> None:
    """Prove that chunks follow each other without gaps and fill the object, and no others do.

    Raises CorruptError, naming `key`.
    """
    end = 0
    for number, each in enumerate(extents):
        if each.offset != end:
            raise CorruptError(
                f"{key}: chunk {number} should be at {end}, the index has it at {each.offset}; "
                f"{ADVICE}"
            )
        end = each.stop
    if end + len(tail) != size:
        raise CorruptError(
            f"{key} should have {end + len(tail)} bytes by its index, found {size}; {ADVICE}"
        )
    table = np.frombuffer(tail[:-CHECKSUM_BYTES], "<u8").reshape(-1, INDEX_ENTRY_BYTES // 8)
    named = int((table != LEFT_OUT).any(axis=1).sum())
    if named != len(extents):
        raise CorruptError(
            f"{key}: its index should name {len(extents)} chunks, found {named}; {ADVICE}"
        )


def decode_compressed(
    buffer: Bytes, grid: Grid, dtype: str, codec: str, key: str, number: int
) -> RawArray:
    """The chunk in `buffer`, its checksum behind it, verified and decompressed.

    A raw array of shape `grid.chunk`, in memory of its own; elements beyond the array's edge are
    padding. Raises CorruptError, naming `key` and the stored `number`, for damage, and
    UnsupportedError where the codec is not there.
    """
    what = f"{key}: chunk {number}"
    itemsize = dtypes.itemsize(dtype)
    made = compressor(codec, itemsize)
    if buffer.size < CHECKSUM_BYTES:
        raise CorruptError(f"{what} should have its checksum, found {buffer.size} bytes; {ADVICE}")
    stored = buffer[:-CHECKSUM_BYTES]
    check_crc32c(stored, buffer[-CHECKSUM_BYTES:], what)
    try:
        values = made.decode(stored)
    except Exception as error:
        raise CorruptError(f"{what} is not what {made.name} reads: {error}; {ADVICE}") from error
    expected = grid.chunk_bytes(itemsize)
    if values.size != expected:
        raise CorruptError(
            f"{what} should have {expected} bytes decompressed, found {values.size}; {ADVICE}"
        )
    return values.view(raw_dtype(itemsize)).reshape(grid.chunk)
