"""Which ranks hold what of every object: the work that arrays cut alike share.

An `Overlay` is made once per layout and item size; arrays with the same one only differ in the
owners of their objects. Objects and the parts of them that blocks have are numbered in row-major
order, the parts of one object in the order of the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ucpstore.geometry import Blocks, Box, Grid, Index, Layout, Numbers, spread, starts_of
from ucpstore.geometry.grid import CHECKSUM_BYTES
from ucpstore.options import Options
from ucpstore.plan.grid import choose_grid

NOBODY = -1
"""In place of a rank where the owner of an object is not settled yet."""


@dataclass(frozen=True, slots=True, eq=False)
class Senders:
    """The ranks that fill one object, in rising order, and what each sends, the owner too.

    `sent_bytes` has their bytes. Rank n of them sends `parts` from `starts[n]` to `starts[n + 1]`,
    which are numbers of parts of the overlay.
    """

    ranks: Numbers
    sent_bytes: Numbers
    starts: Numbers
    parts: Numbers

    @staticmethod
    def of(senders: Numbers, sizes: Numbers, first: int) -> Senders:
        """One sender for each part of an object, and the parts' bytes; parts begin at `first`."""
        order = np.argsort(senders, kind="stable")
        ranks, starts = np.unique(senders[order], return_index=True)
        return Senders(
            ranks,
            np.add.reduceat(sizes[order], starts),
            np.append(starts, len(order)),
            order + first,
        )

    def number(self, rank: int) -> int | None:
        """Which of the senders a rank is, None where it sends nothing."""
        number = int(self.ranks.searchsorted(rank))
        found = number < len(self.ranks) and self.ranks[number] == rank
        return number if found else None

    @property
    def total_bytes(self) -> int:
        """Bytes of all that is sent."""
        return int(self.sent_bytes.sum())

    def bytes_of(self, rank: int) -> int:
        """Bytes of the parts that a rank sends."""
        number = self.number(rank)
        return 0 if number is None else int(self.sent_bytes[number])

    def parts_of(self, rank: int) -> Sequence[int]:
        """The parts that a rank sends, in rising order."""
        number = self.number(rank)
        if number is None:
            return ()
        parts: list[int] = self.parts[self.starts[number] : self.starts[number + 1]].tolist()
        return parts


@dataclass(frozen=True, slots=True, eq=False)
class Overlay:
    """The grid laid over the blocks of a layout: objects, and the parts that blocks have of them.

    `of_blocks` and `sizes` (in elements) are by part; the others by object. `shared` says that no
    rank has all of an object, or that the mean of several ranks' values is stored; `sole` has the
    senders of such an object where there is no choice. `settled` is the only rank that may own an
    object, or `NOBODY`; all that may are `ranks` from `first` to `last`, in rising order.
    """

    grid: Grid
    itemsize: int
    blocks: Blocks
    of_blocks: Numbers
    sizes: Numbers
    starts: Numbers
    stored_bytes: Numbers
    shared: npt.NDArray[np.bool_]
    sole: dict[int, Senders]
    ranks: Numbers
    first: Numbers
    last: Numbers
    settled: Numbers

    def index(self, number: int) -> Index:
        """The index of an object in the grid."""
        return tuple([int(n) for n in np.unravel_index(number, self.grid.objects)])

    def parts_of(self, number: int) -> range:
        """The parts of an object."""
        return range(self.starts[number], self.starts[number + 1])

    def box(self, number: int, part: int) -> Box:
        """The region of one part of an object, in global coordinates."""
        block = self.blocks.box(self.of_blocks[part])
        common = block.intersect(self.grid.object_box(self.index(number)))
        assert common is not None, "a part of another object"
        return common

    def candidates(self, number: int) -> Numbers:
        """The ranks that may own an object."""
        return self.ranks[self.first[number] : self.last[number]]


def overlay_of(layout: Layout, itemsize: int, options: Options, *, mean: bool = False) -> Overlay:
    """Choose the grid and find every object's parts and candidates.

    With `mean` every holder of a part sends it, for their mean is stored.
    """
    grid = choose_grid(layout, itemsize, options)
    blocks = layout.blocks
    elements, stored_bytes = _object_sizes(grid, itemsize)
    count = len(elements)
    of_objects, of_blocks, sizes = _parts(blocks, grid)
    starts = starts_of(of_objects, count)
    several = np.zeros(count, bool)
    several[of_objects[np.diff(blocks.starts)[of_blocks] > 1]] = True
    averaged = several & mean
    # An object inside of one block belongs to the block's holders; only others are looked into.
    inside = (np.diff(starts) == 1) & ~averaged
    held = _holdings(blocks, of_objects, of_blocks, sizes, ~inside)
    whole = held.elements == elements[held.objects]
    shared = ~inside
    shared[held.objects[whole]] = False
    shared |= averaged
    may_own = whole | shared[held.objects]
    bounds = len(blocks.ranks) + starts_of(held.objects[may_own], count)
    only = of_blocks[starts[:-1]]  # the one block of objects inside of one
    first = np.where(inside, blocks.starts[only], bounds[:-1])
    last = np.where(inside, blocks.starts[only + 1], bounds[1:])
    ranks = np.concatenate([blocks.ranks, held.ranks[may_own]])
    return Overlay(
        grid,
        itemsize,
        blocks,
        of_blocks,
        sizes,
        starts,
        stored_bytes,
        shared,
        {
            number: held.senders(number, itemsize)
            for number in np.flatnonzero(shared & (averaged | ~several)).tolist()
        },
        ranks,
        first,
        last,
        np.where(last - first == 1, ranks[first], NOBODY),
    )


def _object_sizes(grid: Grid, itemsize: int) -> tuple[Numbers, Numbers]:
    """Elements of all objects, and their stored bytes without compression."""
    elements = chunks = np.ones(1, np.int64)
    for extent, chunk, along, count in zip(
        grid.shape, grid.chunk, grid.object, grid.objects, strict=True
    ):
        extents = np.minimum(along, extent - np.arange(count) * along)
        elements = np.multiply.outer(elements, extents).reshape(-1)
        chunks = np.multiply.outer(chunks, -(-extents // chunk)).reshape(-1)
    return elements, chunks * (grid.chunk_bytes(itemsize) + CHECKSUM_BYTES) + grid.index_bytes


def _parts(blocks: Blocks, grid: Grid) -> tuple[Numbers, Numbers, Numbers]:
    """Objects, blocks and elements of all parts, by object and then by block."""
    extents = np.array(grid.object, np.int64)
    first = blocks.offsets // extents
    stops = blocks.offsets + blocks.shapes
    touched = -(-stops // extents) - first
    counts = touched.prod(axis=1)
    of_blocks, within = spread(np.zeros_like(counts), counts)
    objects = np.zeros_like(within)
    sizes = np.ones_like(within)
    step = 1
    for dim in reversed(range(len(extents))):
        within, position = np.divmod(within, touched[of_blocks, dim])
        position += first[of_blocks, dim]
        start = np.maximum(blocks.offsets[of_blocks, dim], position * extents[dim])
        sizes *= np.minimum(stops[of_blocks, dim], (position + 1) * extents[dim]) - start
        objects += position * step
        step *= grid.objects[dim]
    order = np.argsort(objects, kind="stable")
    return objects[order], of_blocks[order], sizes[order]


@dataclass(frozen=True, slots=True, eq=False)
class _Holdings:
    """Who holds what of some of the objects: one row for each object and rank, in this order.

    `starts` is by object. A row's parts, `elements` together, are `parts` from `firsts` on, to
    those of the next row.
    """

    starts: Numbers
    objects: Numbers
    ranks: Numbers
    elements: Numbers
    firsts: Numbers
    parts: Numbers

    def senders(self, number: int, itemsize: int) -> Senders:
        """All holders of an object send all that they hold."""
        start, stop = self.starts[number], self.starts[number + 1]
        firsts = self.firsts[start : stop + 1]
        return Senders(
            self.ranks[start:stop],
            self.elements[start:stop] * itemsize,
            firsts - firsts[0],
            self.parts[firsts[0] : firsts[-1]],
        )


def _holdings(
    blocks: Blocks,
    of_objects: Numbers,
    of_blocks: Numbers,
    sizes: Numbers,
    looked: npt.NDArray[np.bool_],
) -> _Holdings:
    (parts,) = looked[of_objects].nonzero()
    starts = blocks.starts[of_blocks[parts]]
    rows, places = spread(starts, blocks.starts[of_blocks[parts] + 1] - starts)
    parts, ranks = parts[rows], blocks.ranks[places]
    order = np.lexsort((ranks, of_objects[parts]))
    parts, ranks = parts[order], ranks[order]
    objects = of_objects[parts]
    fresh = np.ones(len(parts), bool)
    fresh[1:] = (objects[1:] != objects[:-1]) | (ranks[1:] != ranks[:-1])
    (firsts,) = fresh.nonzero()
    return _Holdings(
        starts_of(objects[firsts], len(looked)),
        objects[firsts],
        ranks[firsts],
        np.add.reduceat(sizes[parts], firsts) if len(firsts) else sizes[:0],
        np.append(firsts, len(parts)),
        parts,
    )
