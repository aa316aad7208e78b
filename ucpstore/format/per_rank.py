"""Per-rank values: one document per index of an axis, packed as rows of one uint8 array.

Short documents are rows of `<path>/packed`, each with its length in front; longer ones are arrays
of their own, `<path>/<index>`. The length of a row is a power of two, so that it stays the same
while documents grow a little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ucpstore.errors import CorruptError

LENGTH_BYTES: Final = 4
MAX_ROW_BYTES: Final = 64 * 1024
MIN_ROW_BYTES: Final = 64
ALONE: Final = 0xFFFFFFFF
"""Stands in the place of the length where the document is an array of its own."""


@dataclass(frozen=True, slots=True)
class PerRankLayout:
    """How the documents of one value are stored, from their lengths alone.

    `row_bytes` is 0 where no document is short; then there is no packed array.
    """

    count: int
    row_bytes: int
    alone: tuple[int, ...]


def layout_of(lengths: Sequence[int]) -> PerRankLayout:
    """The layout for documents of these lengths in bytes, by index."""
    short = [length for length in lengths if length + LENGTH_BYTES <= MAX_ROW_BYTES]
    alone = tuple(
        index for index, length in enumerate(lengths) if length + LENGTH_BYTES > MAX_ROW_BYTES
    )
    row_bytes = 0
    if short:
        row_bytes = max(MIN_ROW_BYTES, 1 << (max(short) + LENGTH_BYTES - 1).bit_length())
    return PerRankLayout(len(lengths), row_bytes, alone)


def packed_path(path: str) -> str:
    """The path of the packed array."""
    return f"{path}/packed"


def alone_path(path: str, index: int) -> str:
    """The path of the array of one long document."""
    return f"{path}/{index}"


def to_row(data: bytes, row_bytes: int) -> bytes:
    """The row of a document: its length, little-endian, its bytes, zeros up to `row_bytes`."""
    if len(data) + LENGTH_BYTES > MAX_ROW_BYTES:
        return ALONE.to_bytes(LENGTH_BYTES, "little").ljust(row_bytes, b"\0")
    return (len(data).to_bytes(LENGTH_BYTES, "little") + data).ljust(row_bytes, b"\0")


def from_row(row: bytes, key: str) -> bytes | None:
    """The document in a row; None where it is an array of its own.

    Raises CorruptError, naming `key`, where the length does not fit the row.
    """
    length = int.from_bytes(row[:LENGTH_BYTES], "little")
    if length == ALONE:
        return None
    end = LENGTH_BYTES + length
    if len(row) < end:
        raise CorruptError(
            f"{key}: a document of {length} bytes cannot lie in a row of {len(row)} bytes"
        )
    return row[LENGTH_BYTES:end]
