"""Blocks of an array: the boxes that ranks hold and who holds them, in tables of all ranks at once.

Flat ranges of a thousand parameters on a thousand ranks are millions of boxes: too many for an
object each, so they are columns of numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ucpstore.geometry.box import Box, Index

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Block:
    """One box of a global array and the ranks that hold it, in rising order."""

    box: Box
    ranks: Index


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Boxes of one array, none of them empty, and the ranks that hold each.

    `offsets` and `shapes` are (blocks, dims). The holders of block n are, in rising order, `ranks`
    from `starts[n]` to `starts[n + 1]`.
    """

    offsets: Numbers
    shapes: Numbers
    starts: Numbers
    ranks: Numbers

    @staticmethod
    def of(dims: int, blocks: Sequence[Block]) -> Blocks:
        """The table of blocks of an array of `dims` dimensions, in the order given."""
        counts = [len(block.ranks) for block in blocks]
        return Blocks(
            np.array([block.box.offset for block in blocks], np.int64).reshape(len(blocks), dims),
            np.array([block.box.shape for block in blocks], np.int64).reshape(len(blocks), dims),
            np.cumsum([0, *counts], dtype=np.int64),
            np.array([rank for block in blocks for rank in block.ranks], np.int64),
        )

    def __len__(self) -> int:
        return len(self.offsets)

    def __iter__(self) -> Iterator[Block]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, number: int) -> Block:
        return Block(self.box(number), tuple(self.holders(number).tolist()))

    def box(self, number: int) -> Box:
        """The box of one block."""
        return Box(tuple(self.offsets[number].tolist()), tuple(self.shapes[number].tolist()))

    def holders(self, number: int) -> Numbers:
        """The ranks that hold one block."""
        return self.ranks[self.starts[number] : self.starts[number + 1]]


def spread(starts: Numbers, counts: Numbers) -> tuple[Numbers, Numbers]:
    """`counts[n]` places for each row n: the row's number, and `starts[n]` and what follows it."""
    rows = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return rows, np.arange(len(rows)) + (starts - before)[rows]


def starts_of(numbers: Numbers, count: int) -> Numbers:
    """Where each of 0 to `count` begins in rising `numbers`, and their length."""
    return np.concatenate([[0], np.cumsum(np.bincount(numbers, minlength=count))])


def join(tables: Sequence[Blocks]) -> Blocks:
    """All blocks in rising order of their boxes; equal boxes are one, held by all their ranks."""
    offsets = np.concatenate([table.offsets for table in tables])
    shapes = np.concatenate([table.shapes for table in tables])
    counts = np.concatenate([np.diff(table.starts) for table in tables])
    ranks = np.concatenate([table.ranks for table in tables])
    boxes = np.concatenate([offsets, shapes], axis=1)
    order = np.lexsort(boxes.T[::-1]) if boxes.shape[1] else np.arange(len(boxes))
    boxes = boxes[order]
    fresh = np.ones(len(boxes), bool)
    fresh[1:] = (boxes[1:] != boxes[:-1]).any(axis=1)
    number = np.empty(len(boxes), np.int64)
    number[order] = np.cumsum(fresh) - 1
    holders = np.repeat(number, counts)
    order = np.lexsort((ranks, holders))
    holders, ranks = holders[order], ranks[order]
    once = np.ones(len(ranks), bool)
    once[1:] = (holders[1:] != holders[:-1]) | (ranks[1:] != ranks[:-1])
    boxes = boxes[fresh]
    dims = offsets.shape[1]
    starts = starts_of(holders[once], len(boxes))
    return Blocks(boxes[:, :dims], boxes[:, dims:], starts, ranks[once])
