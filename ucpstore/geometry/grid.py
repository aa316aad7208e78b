"""Grids: how an array is cut into objects, the unit of writing, and chunks, the unit of reading.

These are facts of the stored format: names, order and sizes follow from a grid alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from ucpstore.geometry.box import Box, Index

PLAIN_LIMIT_BYTES = 1024 * 1024
"""Arrays of at most this many bytes are stored as one plain chunk."""

CHECKSUM_BYTES = 4
"""Bytes of the crc32c behind every chunk and behind the index."""

INDEX_ENTRY_BYTES = 16
"""Bytes per chunk in the index at an object's end: offset and length."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A regular grid of objects over an array of `shape`, each made of whole chunks.

    `object` is a multiple of `chunk` along every dimension. `sharded` says whether an object
    carries an index; if not, an object is one chunk. Where `shape` has a zero extent there are no
    objects.
    """

    shape: Index
    chunk: Index
    object: Index
    sharded: bool

    @property
    def objects(self) -> Index:
        """Number of objects along each dimension."""
        return tuple(-(-e // n) for e, n in zip(self.shape, self.object, strict=True))

    @property
    def chunks_per_object(self) -> Index:
        """Number of chunks along each dimension of an object, those outside the array too."""
        return tuple(n // c for n, c in zip(self.object, self.chunk, strict=True))

    def object_indices(self) -> Iterator[Index]:
        """The indices of all objects, in row-major order."""
        return itertools.product(*(range(n) for n in self.objects))

    def object_box(self, index: Index) -> Box:
        """The region of the array that the object holds, cut at the array's edge."""
        offset = tuple(i * n for i, n in zip(index, self.object, strict=True))
        return _clipped(offset, self.object, self.shape)

    def key(self, index: Index) -> str:
        """Name of the object below the array's path."""
        return ".".join(("c", *map(str, index)))

    def stored_chunks(self, index: Index) -> Index:
        """Number of chunks that the object stores along each dimension."""
        box = self.object_box(index)
        return tuple(-(-n // c) for n, c in zip(box.shape, self.chunk, strict=True))

    def chunks(self, index: Index) -> tuple[Box, ...]:
        """Regions of the chunks that the object stores, in stored order, cut at the array's edge.

        Chunks wholly outside of the array are not stored.
        """
        origin = tuple(i * n for i, n in zip(index, self.object, strict=True))
        boxes = []
        for position in itertools.product(*(range(n) for n in self.stored_chunks(index))):
            offset = tuple(o + p * c for o, p, c in zip(origin, position, self.chunk, strict=True))
            boxes.append(_clipped(offset, self.chunk, self.shape))
        return tuple(boxes)

    def chunk_bytes(self, itemsize: int) -> int:
        """Bytes of one chunk, padding included, checksum not."""
        return math.prod(self.chunk) * itemsize

    def object_bytes(self, index: Index, itemsize: int) -> int:
        """Stored bytes of the object without compression: chunks, checksums and index."""
        count = math.prod(self.stored_chunks(index))
        return count * (self.chunk_bytes(itemsize) + CHECKSUM_BYTES) + self.index_bytes

    @property
    def index_bytes(self) -> int:
        """Bytes of the index at the end of every object, its checksum included."""
        if not self.sharded:
            return 0
        return INDEX_ENTRY_BYTES * math.prod(self.chunks_per_object) + CHECKSUM_BYTES

    def chunk_slot(self, index: Index, number: int) -> int:
        """Position in the object's index of the chunk that is stored as `number`-th."""
        slot, weight = 0, 1
        counts = zip(self.stored_chunks(index), self.chunks_per_object, strict=True)
        for stored, full in reversed(list(counts)):
            number, position = divmod(number, stored)
            slot += position * weight
            weight *= full
        return slot


def _clipped(offset: Index, extent: Index, shape: Index) -> Box:
    return Box(offset, tuple(min(n, e - o) for o, n, e in zip(offset, extent, shape, strict=True)))
