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

from ucpstore.geometry.blocks import Numbers
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

    def __hash__(self) -> int:
        # Not of all ranks: there are thousands, and few meshes differ in others only.
        ends = self.ranks[:1], self.ranks[-1:], len(self.ranks)
        return hash((self.axes, ends, self.splits, self.padded))

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
def pieces_of(partition: Partition, shape: Index, rank: int) -> tuple[Piece, ...]:
    """The non-empty pieces of one rank; none outside of the mesh.

    The local box counts along the rank's block, in which the ranges of a dimension follow each
    other without gaps.
    """
    if rank not in partition.ranks:
        return ()
    position = _position(partition, rank)
    ranges = _block(partition, shape, position)
    extent = extent_of(ranges)
    boxes = [Box.whole(extent)]
    if partition.flat is not None:
        boxes = list(run_boxes(extent, *_own_range(partition, position, extent)))
    return tuple(piece for box in boxes for piece in _pieces(ranges, shape, box))


def fragments(partition: Partition, shape: Index) -> dict[int, tuple[Piece, ...]]:
    """The non-empty pieces of every rank of the mesh."""
    return {rank: pieces_of(partition, shape, rank) for rank in partition.ranks}


def block_starts(partition: Partition, shape: Index) -> tuple[set[int], ...]:
    """Where, along each dimension, the ranks' blocks and the parts of their sections start."""
    starts: tuple[set[int], ...] = tuple(set() for _ in shape)
    for ranges in split_blocks(partition, shape):
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
    return extent_of(_block(partition, shape, _position(partition, rank)))


def flat_views(partition: Partition, shape: Index, rank: int) -> tuple[Range, tuple[FlatView, ...]]:
    """The rank's range of its flattened block, and the views that together are the range.

    A range of an n-dimensional block is at most 2 n - 1 boxes.
    """
    position = _position(partition, rank)
    ranges = _block(partition, shape, position)
    extent = extent_of(ranges)
    start, stop = _own_range(partition, position, extent)
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


def _own_range(partition: Partition, position: int, extent: Index) -> Range:
    """The elements of its block of `extent` that one position of the mesh holds."""
    flat = partition.flat
    assert flat is not None, "no axis cuts flattened blocks"
    axis, row = flat
    size = math.prod(extent)
    coordinate = position // math.prod(partition.axes[axis + 1 :]) % partition.axes[axis]
    start = min(max(coordinate * row.part - row.offset, 0), size)
    return start, min(max((coordinate + 1) * row.part - row.offset, start), size)


def split_blocks(partition: Partition, shape: Index) -> list[Ranges]:
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


def holders_of(partition: Partition) -> Numbers:
    """The ranks that hold each part of a row of each of `split_blocks`: (blocks x parts, ranks).

    Without a flat axis each block has one part.
    """
    kinds: list[list[int]] = [[], [], []]
    for axis, split in enumerate(partition.splits):
        kinds[0 if isinstance(split, Split) else 1 if isinstance(split, Flat) else 2].append(axis)
    copies = math.prod([partition.axes[axis] for axis in kinds[2]])
    parts = math.prod([partition.axes[axis] for axis in (*kinds[0], *kinds[1])])
    ranks = np.array(partition.ranks, dtype=np.int64).reshape(partition.axes)
    return ranks.transpose(list(itertools.chain(*kinds))).reshape(parts, copies)


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


def extent_of(ranges: Ranges) -> Index:
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
