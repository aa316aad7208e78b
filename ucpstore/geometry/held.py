"""What all ranks of a partition hold of an array, in one table.

`pieces_of` in `partition.py` says the same of one rank, with the places in its memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from ucpstore.geometry.blocks import Blocks, Numbers
from ucpstore.geometry.box import Index
from ucpstore.geometry.partition import (
    Flat,
    Partition,
    Ranges,
    extent_of,
    holders_of,
    split_blocks,
)


def held_blocks(partition: Partition, shape: Index) -> Blocks:
    """The boxes that the ranks hold, none empty, each once, with their holders, in no order."""
    dims = len(shape)
    blocks = split_blocks(partition, shape)
    extents = np.array([extent_of(ranges) for ranges in blocks], np.int64)
    extents = extents.reshape(len(blocks), dims)
    flat = partition.flat
    if flat is None:
        source, offsets, shapes = np.arange(len(blocks)), np.zeros_like(extents), extents
        parts = 1
    else:
        axis, row = flat
        parts = partition.axes[axis]
        source, offsets, shapes = _flat_boxes(extents, row, parts)
    source, offsets, shapes = _in_array(blocks, shape, source, source // parts, offsets, shapes)
    holders = np.sort(holders_of(partition), axis=1)
    if not holders.shape[1]:
        source, offsets, shapes = source[:0], offsets[:0], shapes[:0]
    ranks = holders[source]
    return Blocks(offsets, shapes, np.arange(len(source) + 1) * holders.shape[1], ranks.reshape(-1))


def run_boxes_of(extents: Numbers, start: Numbers, stop: Numbers) -> tuple[Numbers, ...]:
    """`run_boxes` of many arrays: which array, offset and shape of each box.

    `extents` is (arrays, dims); the runs are `start` to `stop`. The results are (boxes,),
    (boxes, dims) and (boxes, dims).
    """
    (which,) = np.nonzero(start < stop)
    dims = extents.shape[1]
    if not len(which) or not dims:
        none = np.zeros((len(which), dims), np.int64)
        return which, none, none
    extents, start, stop = extents[which], start[which], stop[which]
    inner = extents[:, 1:].prod(axis=1)
    first, head = np.divmod(start, inner)
    last, tail = np.divmod(stop, inner)
    zero = np.zeros_like(head)
    middle = first + (head > 0)
    inside = extents[:, 1:]
    heads = run_boxes_of(inside, head, np.where(head == 0, 0, np.where(first == last, tail, inner)))
    tails = run_boxes_of(inside, zero, np.where(middle <= last, tail, 0))
    (whole,) = np.nonzero(middle < last)
    middles = (whole, np.zeros_like(inside[whole]), inside[whole])
    found = [
        (heads, first[heads[0]], np.ones_like(heads[0])),
        (middles, middle[whole], (last - middle)[whole]),
        (tails, last[tails[0]], np.ones_like(tails[0])),
    ]
    return (
        which[np.concatenate([rows for (rows, _, _), _, _ in found])],
        np.concatenate([np.column_stack([row, offset]) for (_, offset, _), row, _ in found]),
        np.concatenate([np.column_stack([rows, shape]) for (_, _, shape), _, rows in found]),
    )


def _flat_boxes(extents: Numbers, row: Flat, parts: int) -> tuple[Numbers, ...]:
    """Boxes of blocks that each part of the row holds: block times `parts` plus part, and where."""
    sizes = extents.prod(axis=1)[:, None]
    edges = np.clip(np.arange(parts + 1) * row.part - row.offset, 0, sizes)
    return run_boxes_of(
        np.repeat(extents, parts, axis=0), edges[:, :-1].reshape(-1), edges[:, 1:].reshape(-1)
    )


def _in_array(
    blocks: Sequence[Ranges],
    shape: Index,
    source: Numbers,
    block: Numbers,
    offsets: Numbers,
    shapes: Numbers,
) -> tuple[Numbers, ...]:
    """What boxes of blocks hold of the array, without padding; the results are as the arguments.

    A dimension of a block has several ranges of the array where sections are fused or splits are
    interleaved: each combination of them gives a box.
    """
    spans = [_spans([ranges[dim] for ranges in blocks], extent) for dim, extent in enumerate(shape)]
    found = []
    for chosen in itertools.product(*(range(starts.shape[1]) for starts, _, _ in spans)):
        rows = np.arange(len(source))
        columns: list[tuple[Numbers, Numbers]] = []
        for dim, number in enumerate(chosen):
            there, here, length = (table[block, number] for table in spans[dim])
            first = np.maximum(offsets[:, dim], here)
            last = np.minimum(offsets[:, dim] + shapes[:, dim], here + length)
            rows = rows[(first < last)[rows]]
            columns.append((there + first - here, last - first))
        starts = [start[rows] for start, _ in columns]
        lengths = [length[rows] for _, length in columns]
        found.append((rows, starts, lengths))
    rows = np.concatenate([each[0] for each in found])
    return (
        source[rows],
        *(
            np.stack([np.concatenate(column) for column in zip(*parts, strict=True)], axis=1)
            if shape
            else np.zeros((len(rows), 0), np.int64)
            for parts in ([each[1] for each in found], [each[2] for each in found])
        ),
    )


def _spans(kept: Sequence[Sequence[tuple[int, int]]], extent: int) -> tuple[Numbers, ...]:
    """Tables (blocks, ranges) of one dimension: where ranges start in the array and in their block,
    and their lengths, 0 where a block has fewer ranges and for what is padding.
    """
    most = max(1, *map(len, kept))
    table = np.array(
        [[*ranges, *[(0, 0)] * (most - len(ranges))] for ranges in kept], np.int64
    ).reshape(len(kept), most, 2)
    starts, stops = table[:, :, 0], table[:, :, 1]
    lengths = stops - starts
    return starts, np.cumsum(lengths, axis=1) - lengths, np.minimum(stops, extent) - starts
