"""Partitions: which part of a global array each rank holds, as rules that every rank can replay.

A partition is a mesh of ranks and, for each mesh axis, the dimension that the axis splits. Splits
are replayed on index ranges in the order of the mesh axes, with the rule of `torch.chunk`: n
elements over p parts give parts of ceil(n / p), the last ones shorter or empty.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ucpstore.geometry.box import Box, Index, Piece

Range = tuple[int, int]
"""Start and exclusive end, in elements."""


@dataclass(frozen=True, slots=True)
class Split:
    """One mesh axis splits dimension `dim`.

    `factor` above 1 interleaves: the range is first cut into `factor` parts and each of them is
    split over the axis (torch's `_StridedShard`), as FSDP over tensor parallelism does.
    """

    dim: int
    factor: int = 1


@dataclass(frozen=True, slots=True)
class Partition:
    """A mesh of ranks over which an array is split or replicated.

    `axes` is the mesh's shape, `ranks` its ranks in row-major order (ranks of the process group
    of the call), `splits` one entry per axis, None where the axis replicates.
    """

    axes: Index
    ranks: Index
    splits: tuple[Split | None, ...]

    @staticmethod
    def whole(ranks: Sequence[int]) -> Partition:
        """Every one of `ranks` holds the entire array."""
        return Partition((len(ranks),), tuple(ranks), (None,))


def chunk_ranges(ranges: Sequence[Range], parts: int) -> list[list[Range]]:
    """Split the concatenation of `ranges` into `parts` lists by the rule of `torch.chunk`."""
    total = sum(stop - start for start, stop in ranges)
    size = -(-total // parts)
    result: list[list[Range]] = [[] for _ in range(parts)]
    position = 0
    for start, stop in ranges:
        while start < stop:
            part = position // size
            take = min(stop - start, (part + 1) * size - position)
            result[part].append((start, start + take))
            start += take
            position += take
    return result


def split_ranges(ranges: Sequence[Range], split: Split, parts: int) -> list[list[Range]]:
    """The ranges that each of `parts` coordinates of one mesh axis keeps."""
    if split.factor == 1:
        return chunk_ranges(ranges, parts)
    result: list[list[Range]] = [[] for _ in range(parts)]
    for section in chunk_ranges(ranges, split.factor):
        for part, kept in enumerate(chunk_ranges(section, parts)):
            result[part].extend(kept)
    return [_joined(kept) for kept in result]


def _joined(ranges: Sequence[Range]) -> list[Range]:
    joined: list[Range] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


@lru_cache(maxsize=4096)
def fragments(partition: Partition, shape: Index) -> dict[int, tuple[Piece, ...]]:
    """The non-empty pieces of every rank of the partition; a rank without data has none.

    The local box counts along the rank's local tensor, in which the ranges of a dimension follow
    each other without gaps. Callers must not change the result.
    """
    start: list[list[Range]] = [[(0, extent)] for extent in shape]
    held = [start]
    for size, split in zip(partition.axes, partition.splits, strict=True):
        following: list[list[list[Range]]] = []
        for ranges in held:
            if split is None:
                following.extend([ranges] * size)
                continue
            for kept in split_ranges(ranges[split.dim], split, size):
                changed = list(ranges)
                changed[split.dim] = kept
                following.append(changed)
        held = following
    return {rank: _pieces(ranges) for rank, ranges in zip(partition.ranks, held, strict=True)}


def _pieces(ranges: Sequence[Sequence[Range]]) -> tuple[Piece, ...]:
    per_dim: list[list[tuple[int, int, int]]] = []
    for kept in ranges:
        local = 0
        spans = []
        for start, stop in kept:
            if stop > start:
                spans.append((start, local, stop - start))
                local += stop - start
        per_dim.append(spans)
    pieces = []
    for combination in itertools.product(*per_dim):
        extent = tuple(n for _, _, n in combination)
        pieces.append(
            Piece(
                Box(tuple(g for g, _, _ in combination), extent),
                Box(tuple(x for _, x, _ in combination), extent),
            )
        )
    return tuple(pieces)


def local_shape(partition: Partition, shape: Index, rank: int) -> Index:
    """Shape of the rank's local tensor, `(0, ...)` extents included.

    Raises KeyError for a rank outside of the mesh.
    """
    position = dict(zip(partition.ranks, itertools.count(), strict=False))[rank]
    extents: list[list[Range]] = [[(0, extent)] for extent in shape]
    below = math.prod(partition.axes)
    for size, split in zip(partition.axes, partition.splits, strict=True):
        below //= size
        coordinate = position // below % size
        if split is not None:
            extents[split.dim] = split_ranges(extents[split.dim], split, size)[coordinate]
    return tuple(sum(stop - start for start, stop in kept) for kept in extents)
