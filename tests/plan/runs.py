"""What flat ranges share, send and read under a plan, counted element by element."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from geometry.oracle import PADDING, oracle_blocks, oracle_ranges

from ucpstore.geometry import ArraySpec, Grid, Partition, RankClass, flat_views, merge
from ucpstore.options import Options
from ucpstore.plan import plan_reads, plan_save
from ucpstore.plan.save import SavePlan

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """The part of one rank's range inside one section of its block; sizes in elements.

    `sent` are elements that it sends, `read` those of the chunks that it touches, cut at the
    array's edge. `extents` are the section's.
    """

    rank: int
    size: int
    sent: int
    read: int
    extents: Shape


def plan_of(partition: Partition, shape: Shape, dtype: str, options: Options) -> SavePlan:
    """The plan of one array."""
    names = tuple("xyzt"[: len(shape)])
    ranks = tuple(sorted(partition.ranks))
    spec = ArraySpec("a", shape, dtype, names, partition)
    return plan_save(merge([RankClass(ranks, (spec,))]), len(ranks), options)


def check_writers(plan: SavePlan) -> None:
    """Each object has one writer, gets each element once, and from ranks that hold it."""
    grid = plan.arrays[0].grid
    filled: dict[Shape, int] = {}
    for rank in range(plan.size):
        own = plan.rank(rank)
        for write in (*own.writes, *(w for each in own.rounds for w in each.writes)):
            assert write.index not in filled, "an object with two writers"
            filled[write.index] = sum(box.size for box in write.own)
    for rank in range(plan.size):
        for each in plan.rank(rank).rounds:
            for message in each.sends:
                for transfer in message.transfers:
                    filled[transfer.index] += transfer.box.size
    assert filled == {index: grid.object_box(index).size for index in grid.object_indices()}


def runs_of(plan: SavePlan, partition: Partition, shape: Shape, most: int = 8) -> Iterator[Run]:
    """The runs of every rank, or of `most` ranks, if there are more."""
    grid = plan.arrays[0].grid
    blocks = oracle_blocks(partition, shape)
    held = sorted(oracle_ranges(partition, shape).items())
    for rank, (_, whole) in held[:: -(-len(held) // most)]:
        values = whole[whole != PADDING].numpy()
        sent = np.zeros(shape, bool)
        for each in plan.rank(rank).rounds:
            for message in each.sends:
                for transfer in message.transfers:
                    sent[transfer.box.slices()] = True
        at = np.unravel_index(values, shape)
        touched = chunk_numbers(grid, at)
        assert chunks_read(grid, partition, shape, rank) == set(touched.tolist())
        block = blocks[rank].numpy()
        kept = np.unravel_index(block[block != PADDING], shape)
        groups = [sections(np.unique(along)) for along in kept]
        for section in itertools.product(*groups):
            inside = np.ones(values.size, bool)
            for along, (first, last) in zip(at, section, strict=True):
                inside &= (along >= first) & (along < last)
            if not inside.any():
                continue
            read = elements(grid, np.unique(touched[inside]))
            extents = tuple(last - first for first, last in section)
            sending = int(sent.reshape(-1)[values[inside]].sum())
            yield Run(rank, int(inside.sum()), sending, read, extents)


def sections(places: np.ndarray) -> list[tuple[int, int]]:
    """The stretches of places that follow each other."""
    breaks = np.flatnonzero(np.diff(places) != 1) + 1
    parts = np.split(places, breaks) if places.size else []
    return [(int(part[0]), int(part[-1]) + 1) for part in parts]


def chunk_counts(grid: Grid) -> Shape:
    """The number of chunks along each dimension."""
    return tuple(-(-extent // c) for extent, c in zip(grid.shape, grid.chunk, strict=True))


def chunk_numbers(grid: Grid, at: tuple[np.ndarray, ...]) -> np.ndarray:
    """The chunk of each element, in row-major order of all chunks of the array."""
    along = tuple(a // c for a, c in zip(at, grid.chunk, strict=True))
    return np.ravel_multi_index(along, chunk_counts(grid))


def elements(grid: Grid, numbers: np.ndarray) -> int:
    """Elements of the array that the chunks hold together."""
    size = np.ones(numbers.shape, int)
    at = np.unravel_index(numbers, chunk_counts(grid))
    for along, chunk, extent in zip(at, grid.chunk, grid.shape, strict=True):
        size *= np.minimum(chunk, extent - along * chunk)
    return int(size.sum())


def chunks_read(grid: Grid, partition: Partition, shape: Shape, rank: int) -> set[int]:
    """The chunks that a load of the rank's range reads."""
    _, views = flat_views(partition, shape, rank)
    corners = [
        chunk.chunk.offset
        for read in plan_reads([view.pieces for view in views], grid)
        for chunk in read.chunks
    ]
    at = tuple(np.array(corners, int).reshape(-1, len(shape)).T)
    return set(chunk_numbers(grid, at).tolist())


def chunk_row(grid: Grid, extents: Shape) -> int:
    """Elements of the chunks of a section at one place of the first dimension that cuts chunks
    longer than 1.
    """
    first = next((dim for dim, n in enumerate(grid.chunk) if n > 1), 0)
    return math.prod(extents[first + 1 :]) * grid.chunk[first]
