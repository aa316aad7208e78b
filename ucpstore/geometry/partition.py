"""Partitions: which part of a global array each rank holds, as rules that every rank can replay.

A partition is a mesh of ranks and, for each mesh axis, what it does. A `Split` cuts one dimension;
splits are replayed on index ranges in the order of the mesh axes. What they leave to a rank is its
block. A `Flat` cuts the blocks, flattened in row-major order, as ZeRO and Megatron's distributed
optimizer do; it comes after all splits, wherever its axis is in the mesh.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from ucpstore.geometry.box import Box, Index, Piece, run_boxes
from ucpstore.geometry.splits import Range, Split, split_ranges

Ranges = Sequence[Sequence[Range]]
"""What is kept of each dimension."""


@dataclass(frozen=True, slots=True)
class Flat:
    """One mesh axis cuts the flattened block, which lies in a longer row of elements.

    The row is cut into parts of `part` elements, at least 1, one for each coordinate. The block
    starts at `offset` in it; what lies before and behind is other tensors and padding.
    """

    offset: int
    part: int


@dataclass(frozen=True, slots=True)
class Partition:
    """A mesh of ranks over which an array is cut or replicated.

    `axes` is the mesh's shape, `ranks` its ranks in row-major order (ranks of the process group
    of the call), `splits` one entry per axis, None where the axis replicates. `padded` is the shape
    that is split where it is larger than the array's: the rest is padding, which is not stored.
    """

    axes: Index
    ranks: Index
    splits: tuple[Split | Flat | None, ...]
    padded: Index = ()

    @staticmethod
    def whole(ranks: Sequence[int]) -> Partition:
        """Every one of `ranks` holds the entire array."""
        return Partition((len(ranks),), tuple(ranks), (None,))

    @property
    def flat(self) -> tuple[int, Flat] | None:
        """The axis that cuts flattened blocks, and how; at most one does."""
        for axis, split in enumerate(self.splits):
            if isinstance(split, Flat):
                return axis, split
        return None


@dataclass(frozen=True, slots=True)
class FlatView:
    """Elements of a rank's flat range that are a box of its block.

    They lie from `start` on in the range, in row-major order of `shape`. Local boxes of the pieces
    count along the view.
    """

    start: int
    shape: Index
    pieces: tuple[Piece, ...]


@lru_cache(maxsize=4096)
def fragments(partition: Partition, shape: Index) -> dict[int, tuple[Piece, ...]]:
    """The non-empty pieces of every rank of the partition; a rank without data may be left out.

    The local box counts along the rank's block, in which the ranges of a dimension follow each
    other without gaps. Ranks that hold the same share one tuple. Callers must not change the
    result.
    """
    found: dict[int, tuple[Piece, ...]] = {}
    boxes: dict[Index, list[list[Box]]] = {}
    for ranges, holders in zip(_blocks(partition, shape), _holders(partition), strict=True):
        extent = _extent(ranges)
        if extent not in boxes:
            boxes[extent] = _boxes(partition, extent)
        for ranks, parts in zip(holders, boxes[extent], strict=True):
            if parts:
                pieces = [piece for box in parts for piece in _pieces(ranges, shape, box)]
                found.update(dict.fromkeys(ranks, tuple(pieces)))
    return found


def block_starts(partition: Partition, shape: Index) -> tuple[set[int], ...]:
    """Where, along each dimension, the ranks' blocks and the parts of their sections start."""
    starts: tuple[set[int], ...] = tuple(set() for _ in shape)
    for ranges in _blocks(partition, shape):
        kept = [
            {start for start, _ in each if start < extent}
            for each, extent in zip(ranges, shape, strict=True)
        ]
        if all(kept):
            for all_starts, own in zip(starts, kept, strict=True):
                all_starts |= own
    return starts


def blocks_of(partition: Partition) -> Partition:
    """The same mesh without its flat cut: who holds which block, in part or whole."""
    splits = tuple(None if isinstance(split, Flat) else split for split in partition.splits)
    return replace(partition, splits=splits)


def local_shape(partition: Partition, shape: Index, rank: int) -> Index:
    """Shape of the rank's local tensor, `(0, ...)` extents included; that of its block under Flat.

    Raises KeyError for a rank outside of the mesh.
    """
    return _extent(_block(partition, shape, _position(partition, rank)))


def flat_views(partition: Partition, shape: Index, rank: int) -> tuple[Range, tuple[FlatView, ...]]:
    """The rank's range of its flattened block, and the views that together are the range.

    A range of an n-dimensional block is at most 2 n - 1 boxes.
    """
    flat = partition.flat
    assert flat is not None, "no axis cuts flattened blocks"
    axis, row = flat
    position = _position(partition, rank)
    ranges = _block(partition, shape, position)
    extent = _extent(ranges)
    coordinate = position // math.prod(partition.axes[axis + 1 :]) % partition.axes[axis]
    start, stop = _range(row, coordinate, math.prod(extent))
    views = []
    first = 0
    for box in run_boxes(extent, start, stop):
        pieces = tuple(
            Piece(piece.box, piece.local.relative_to(box.offset))
            for piece in _pieces(ranges, shape, box)
        )
        views.append(FlatView(first, box.shape, pieces))
        first += box.size
    return (start, stop), tuple(views)


def _range(row: Flat, coordinate: int, size: int) -> Range:
    """The elements of a block of `size` that lie in one part of the row."""
    start = min(max(coordinate * row.part - row.offset, 0), size)
    return start, min(max((coordinate + 1) * row.part - row.offset, start), size)


def _boxes(partition: Partition, extent: Index) -> list[list[Box]]:
    """The boxes of a block of `extent` that each coordinate of the flat axis holds."""
    flat = partition.flat
    if flat is None:
        return [[Box.whole(extent)]]
    axis, row = flat
    size = math.prod(extent)
    held: list[list[Box]] = [[] for _ in range(partition.axes[axis])]
    first, last = row.offset // row.part, -(-(row.offset + size) // row.part)
    for coordinate in range(first, min(last, len(held))):
        held[coordinate] = list(run_boxes(extent, *_range(row, coordinate, size)))
    return held


def _blocks(partition: Partition, shape: Index) -> list[Ranges]:
    """What the splits leave of each dimension, for all coordinates of the axes that split."""
    whole: Ranges = [[(0, extent)] for extent in partition.padded or shape]
    held = [whole]
    for size, split in zip(partition.axes, partition.splits, strict=True):
        if isinstance(split, Split):
            before, behind = slice(split.dim), slice(split.dim + 1, None)
            held = [
                [*ranges[before], kept, *ranges[behind]]
                for ranges in held
                for kept in split_ranges(ranges[split.dim], split, size)
            ]
    return held


def _holders(partition: Partition) -> list[list[list[int]]]:
    """For each of `_blocks`, and each coordinate of the flat axis, the ranks that hold it."""
    kinds: list[list[int]] = [[], [], []]
    for axis, split in enumerate(partition.splits):
        kinds[0 if isinstance(split, Split) else 1 if isinstance(split, Flat) else 2].append(axis)
    sizes = [math.prod([partition.axes[axis] for axis in axes]) for axes in kinds]
    ranks = np.array(partition.ranks, dtype=np.int64).reshape(partition.axes)
    held: list[list[list[int]]] = (
        ranks.transpose(list(itertools.chain(*kinds))).reshape(sizes).tolist()
    )
    return held


def _block(partition: Partition, shape: Index, position: int) -> Ranges:
    """What the splits leave of each dimension to one position of the mesh."""
    ranges: list[Sequence[Range]] = [[(0, extent)] for extent in partition.padded or shape]
    below = math.prod(partition.axes)
    for size, split in zip(partition.axes, partition.splits, strict=True):
        below //= size
        if isinstance(split, Split):
            kept = split_ranges(ranges[split.dim], split, size)
            ranges[split.dim] = kept[position // below % size]
    return ranges


def _position(partition: Partition, rank: int) -> int:
    try:
        return partition.ranks.index(rank)
    except ValueError:
        raise KeyError(rank) from None


def _extent(ranges: Ranges) -> Index:
    return tuple([sum([stop - start for start, stop in kept]) for kept in ranges])


def _pieces(ranges: Ranges, shape: Index, box: Box) -> list[Piece]:
    """What a box of a block holds of the array; no padding."""
    # each dimension's spans: where they start in the array and in the block, and their lengths
    by_dim: list[list[tuple[int, int, int]]] = []
    for kept, extent, first, length in zip(ranges, shape, box.offset, box.shape, strict=True):
        local, last = 0, first + length
        spans = []
        for start, stop in kept:
            begin = first if first > local else local
            end = min(last, local + stop - start, local + extent - start)
            if begin < end:
                spans.append((start + begin - local, begin, end - begin))
            local += stop - start
        if not spans:
            return []
        by_dim.append(spans)
    pieces = []
    for chosen in itertools.product(*by_dim):
        there, here, extents = tuple(zip(*chosen, strict=True)) or ((), (), ())
        pieces.append(Piece(Box(there, extents), Box(here, extents)))
    return pieces
