"""The chunks of one object in a buffer, filled from parts of the array that come in any order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ucpstore import dtypes
from ucpstore.arrays.raw import RawArray, copy_raw, part, raw_dtype
from ucpstore.geometry.box import Box, Index
from ucpstore.geometry.grid import Grid

Bytes = npt.NDArray[np.uint8]


@lru_cache(maxsize=8)  # small arrays alike come one after the other; boxes of many chunks are large
def _chunks_of(grid: Grid, index: Index) -> tuple[Index, tuple[Box, ...]]:
    """How many chunks an object stores along each dimension, and their boxes."""
    return grid.stored_chunks(index), grid.chunks(index)


class Chunks:
    """Views of the chunks that an object stores, in stored order, padded as they become whole.

    The first chunk starts at byte `start` of the buffer and the next ones follow every `stride`
    bytes. The buffer may hold anything at first. Not thread-safe.
    """

    __slots__ = ("_boxes", "_fill", "_grid", "_missing", "_stored", "_views")

    def __init__(
        self, buffer: Bytes, grid: Grid, index: Index, dtype: str, *, start: int, stride: int
    ) -> None:
        itemsize = dtypes.itemsize(dtype)
        raw, chunk_bytes = raw_dtype(itemsize), grid.chunk_bytes(itemsize)
        self._grid = grid
        self._stored, self._boxes = _chunks_of(grid, index)
        self._missing = [box.size for box in self._boxes]
        self._views = [
            buffer[at : at + chunk_bytes].view(raw).reshape(grid.chunk)
            for at in range(start, start + len(self._boxes) * stride, stride)
        ]
        self._fill = np.frombuffer(dtypes.fill_bytes(dtype), dtype=raw)[0]

    def fill(self, box: Box, values: RawArray) -> Iterator[int]:
        """Copy `values` to the region `box` of the global array, which must lie in the object.

        `values` has the shape of `box`, any strides, and the item size of the dtype. Parts must not
        overlap. Yields the number of every chunk that is whole now, while it is still in the
        processor's cache; nothing is copied unless the iterator is used up.
        """
        if values.shape != box.shape:
            raise ValueError(f"{box} needs values of its shape, but they are {values.shape}")
        if box.size == 0:
            return
        values = values.view(self._views[0].dtype)
        left = box.size
        for number in self._touched(box):
            chunk = self._boxes[number]
            common = chunk.intersect(box)
            if common is None:
                continue
            whole = common.shape == box.shape
            copy_raw(
                part(self._views[number], common.relative_to(chunk.offset)),
                values if whole else part(values, common.relative_to(box.offset)),
            )
            left -= common.size
            self._missing[number] -= common.size
            if self._missing[number] == 0:
                self._pad(number)
                yield number
        if left:
            raise ValueError(f"{box} is not within the object of {self._boxes[0]} and following")

    def check_whole(self) -> None:
        """Raise RuntimeError where parts are missing or came twice: an object is written whole."""
        for number, missing in enumerate(self._missing):
            if missing:
                box = self._boxes[number]
                raise RuntimeError(
                    f"chunk {number} at {box.offset} needs its {box.size} elements once each, but "
                    f"{box.size - missing} were given; the plan of this save is wrong"
                )

    def __len__(self) -> int:
        return len(self._boxes)

    def _touched(self, box: Box) -> list[int]:
        """Numbers of the stored chunks that may share elements with `box`."""
        origin = self._boxes[0].offset
        spans = [
            range(max(0, (start - base) // extent), min(count, -(-(stop - base) // extent)))
            for start, stop, base, extent, count in zip(
                box.offset, box.stop, origin, self._grid.chunk, self._stored, strict=True
            )
        ]
        numbers = []
        for position in itertools.product(*spans):
            number = 0
            for at, count in zip(position, self._stored, strict=True):
                number = number * count + at
            numbers.append(number)
        return numbers

    def _pad(self, number: int) -> None:
        """Put the fill value beyond the array's edge."""
        view = self._views[number]
        for dim, (kept, extent) in enumerate(
            zip(self._boxes[number].shape, self._grid.chunk, strict=True)
        ):
            if kept < extent:
                view[(slice(None),) * dim + (slice(kept, None),)] = self._fill
