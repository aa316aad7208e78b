"""Boxes: axis-aligned regions of an array's index space, and pieces, which pair two of them.

Offsets and shapes are in elements, ends are exclusive. Pure arithmetic: no torch, no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

Index = tuple[int, ...]


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The region that starts at `offset` and spans `shape` elements along each dimension."""

    offset: Index
    shape: Index

    @staticmethod
    def whole(shape: Index) -> Box:
        """The box of an entire array."""
        return Box((0,) * len(shape), shape)

    @property
    def stop(self) -> Index:
        """Exclusive end along each dimension."""
        return tuple([o + n for o, n in zip(self.offset, self.shape, strict=True)])

    @property
    def size(self) -> int:
        """Number of elements; 1 for a 0-d box."""
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The region that both boxes cover, or None where they do not meet or it is empty."""
        offset, shape = [], []
        for one, length, two, extent in zip(
            self.offset, self.shape, other.offset, other.shape, strict=True
        ):
            start = one if one > two else two
            stop = min(one + length, two + extent)
            if start >= stop:
                return None
            offset.append(start)
            shape.append(stop - start)
        return Box(tuple(offset), tuple(shape))

    def contains(self, other: Box) -> bool:
        """Whether every element of `other` lies in this box."""
        return all(a <= b for a, b in zip(self.offset, other.offset, strict=True)) and all(
            a >= b for a, b in zip(self.stop, other.stop, strict=True)
        )

    def relative_to(self, origin: Index) -> Box:
        """The same region in coordinates whose zero is `origin`."""
        return Box(tuple([o - p for o, p in zip(self.offset, origin, strict=True)]), self.shape)

    def shifted(self, by: Index) -> Box:
        """The same shape, moved by `by` elements."""
        return Box(tuple([o + p for o, p in zip(self.offset, by, strict=True)]), self.shape)

    def slices(self) -> tuple[slice, ...]:
        """The box as an index expression for numpy and torch."""
        return tuple([slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True)])


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the global array and the box of the rank's local tensor with the same values."""

    box: Box
    local: Box

    def part(self, region: Box) -> Piece | None:
        """The part of this piece that lies in `region` of the global array, or None."""
        common = self.box.intersect(region)
        if common is None:
            return None
        if common.shape == self.box.shape:
            return self
        local = common.relative_to(self.box.offset).shifted(self.local.offset)
        return Piece(common, local)


def run_boxes(shape: Index, start: int, stop: int) -> Iterator[Box]:
    """The boxes of an array that are its elements `start` to `stop` in row-major order, in order.

    Each is contiguous in the flattened array. For n dimensions they are at most 2 n - 1.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    inner = math.prod(shape[1:])
    (first, head), (last, tail) = divmod(start, inner), divmod(stop, inner)
    if head:
        end = tail if first == last else inner
        yield from _in_row(first, run_boxes(shape[1:], head, end))
        first += 1
    if first < last:
        yield Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))
    if tail and first <= last:
        yield from _in_row(last, run_boxes(shape[1:], 0, tail))


def _in_row(row: int, boxes: Iterator[Box]) -> Iterator[Box]:
    return (Box((row, *box.offset), (1, *box.shape)) for box in boxes)
