"""The codec chain of an array: which encoder builds its objects, and what decodes its chunks.

Without a compressor the project encodes and decodes by itself, and every offset is known
(`packed`); with one the codecs are those of zarr-python, and an index has the offsets
(`compressed`).
"""

from __future__ import annotations

from typing import Protocol

from ucpstore.arrays.chunks import Bytes
from ucpstore.arrays.metadata import ArrayMetadata
from ucpstore.arrays.packed import ObjectEncoder, decode_chunk
from ucpstore.arrays.raw import RawArray
from ucpstore.dtypes import itemsize
from ucpstore.errors import UnsupportedError
from ucpstore.geometry.box import Box, Index
from ucpstore.geometry.grid import Grid


class Encoder(Protocol):
    """Builds one object in a caller's buffer; see `ObjectEncoder`."""

    def fill(self, box: Box, values: RawArray) -> None:
        """Copy values to a region of the global array."""

    def finish(self) -> memoryview:
        """The whole object, in the buffer."""


def buffer_bytes(grid: Grid, index: Index, dtype: str, codec: str | None) -> int:
    """Bytes of the buffer that an object's encoder needs."""
    if codec is None:
        return grid.object_bytes(index, itemsize(dtype))
    from ucpstore.arrays import compressed

    return compressed.buffer_bytes(grid, index, itemsize(dtype))


def encoder(buffer: Bytes, grid: Grid, index: Index, dtype: str, codec: str | None) -> Encoder:
    """The encoder of one object, in a buffer of `buffer_bytes`."""
    if codec is None:
        return ObjectEncoder(buffer, grid, index, dtype)
    from ucpstore.arrays.compressed import CompressedEncoder

    return CompressedEncoder(buffer, grid, index, dtype, codec)


def check_codec(array: ArrayMetadata, path: str) -> None:
    """Raise UnsupportedError, naming `path` and the codec, where nothing here decodes it."""
    if array.codec is None:
        return
    from ucpstore.arrays.compressors import compressor

    try:
        compressor(array.codec, itemsize(array.dtype))
    except UnsupportedError as error:
        raise UnsupportedError(f"{path}: {error}") from error


def decode(
    buffer: Bytes, grid: Grid, dtype: str, codec: str | None, key: str, number: int
) -> RawArray:
    """The stored chunk in `buffer`, verified: a raw array of shape `grid.chunk`.

    Raises CorruptError, naming the object's `key` and the chunk's `number`.
    """
    if codec is None:
        return decode_chunk(buffer, grid, dtype, key, number)
    from ucpstore.arrays.compressed import decode_compressed

    return decode_compressed(buffer, grid, dtype, codec, key, number)
