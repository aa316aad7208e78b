"""The proof that ranks hold each element of an array, and hold it once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ucpstore.errors import StateError
from ucpstore.geometry.blocks import Block, Blocks
from ucpstore.geometry.box import Box, Index


def prove_coverage(path: str, shape: Index, table: Blocks) -> None:
    """Raise StateError where blocks overlap, leave a gap, or lie outside of the array."""
    if tiles(shape, table):
        return
    blocks = list(table)
    boxes = [block.box for block in blocks]
    whole = Box.whole(shape)
    for block in blocks:
        if not whole.contains(block.box):
            raise StateError(
                f"{path}: {block.box}, held by {_named(block.ranks)}, lies outside of the array's "
                f"shape {shape}"
            )
    overlap = _overlap(blocks)
    if overlap is not None:
        one, other = overlap
        raise StateError(
            f"{path}: {_named(one.ranks)} and {_named(other.ranks)} hold overlapping parts "
            f"that are not the same, {one.box} and {other.box}; every element must be held once, "
            "up to replicas of the same part"
        )
    missing = _missing(whole, boxes)
    if missing is not None:
        found = sum(box.size for box in boxes)
        raise StateError(
            f"{path}: nobody holds {missing}; the ranks hold {found} of the {whole.size} elements "
            f"of shape {shape}, and the missing parts must be held by a rank of the process group"
        )


def tiles(shape: Index, blocks: Blocks) -> bool:
    """Whether the blocks cover an array and do not overlap; False too where numbers are too large.

    How often elements are covered is the running sum, along all dimensions, of a weight at each
    corner of each box: +1 or -1 by the number of upper ends that make the corner. So all elements
    are covered once exactly if the weights, point by point, are those of the whole array.
    """
    dims = len(shape)
    steps = [math.prod([extent + 1 for extent in shape[dim + 1 :]]) for dim in range(dims)]
    if math.prod([extent + 1 for extent in shape]) >= 1 << 62:
        return False
    count = len(blocks) + 1
    whole = np.array([shape], np.int64).reshape(1, dims)
    lower = np.concatenate([blocks.offsets, np.zeros_like(whole)])
    upper = lower + np.concatenate([blocks.shapes, whole])
    if (lower < 0).any() or (upper > np.array(shape, np.int64)).any():
        return False
    corners = np.zeros((1, count), np.int64)
    weights = np.ones((1, count), np.int64)
    weights[0, -1] = -1  # the whole array, to be taken away
    for dim, step in enumerate(steps):
        corners = np.concatenate([corners + lower[:, dim] * step, corners + upper[:, dim] * step])
        weights = np.concatenate([weights, -weights])
    points, which = np.unique(corners.ravel(), return_inverse=True)
    return not np.bincount(which, weights.ravel(), len(points)).any()


def _overlap(blocks: Sequence[Block]) -> tuple[Block, Block] | None:
    """Two blocks that have elements in common, if any do."""
    if not blocks or not blocks[0].box.shape:
        return (blocks[0], blocks[1]) if len(blocks) > 1 else None
    # Sweeping along the dimension with the most lines keeps few blocks open at a time.
    dims = range(len(blocks[0].box.shape))
    along = max(dims, key=lambda dim: len({block.box.offset[dim] for block in blocks}))
    open_blocks: list[Block] = []
    for block in sorted(blocks, key=lambda block: block.box.offset[along]):
        start = block.box.offset[along]
        open_blocks = [other for other in open_blocks if other.box.stop[along] > start]
        for other in open_blocks:
            if block.box.intersect(other.box) is not None:
                return other, block
        open_blocks.append(block)
    return None


def _missing(region: Box, boxes: Sequence[Box]) -> Box | None:
    """A part of `region` that none of the disjoint boxes covers, if there is one."""
    while True:
        inside = [common for box in boxes if (common := box.intersect(region)) is not None]
        if not inside:
            return region if region.size else None
        if sum(box.size for box in inside) == region.size:
            return None
        for half in _halves(region, inside[len(inside) // 2]):
            covered = sum(common.size for box in inside if (common := box.intersect(half)))
            if covered < half.size:
                region, boxes = half, inside
                break


def _halves(region: Box, inside: Box) -> tuple[Box, Box]:
    """`region` cut in two along one side of a smaller box in it."""
    for dim in range(len(region.shape)):
        for line in (inside.offset[dim], inside.stop[dim]):
            if region.offset[dim] < line < region.stop[dim]:
                length = line - region.offset[dim]
                before, behind = slice(dim), slice(dim + 1, None)
                rest = region.shape[dim] - length
                return (
                    Box(region.offset, (*region.shape[before], length, *region.shape[behind])),
                    Box(
                        (*region.offset[before], line, *region.offset[behind]),
                        (*region.shape[before], rest, *region.shape[behind]),
                    ),
                )
    raise AssertionError(f"{inside} fills {region}")


def _named(ranks: Sequence[int]) -> str:
    """Ranks in words, the first few of many."""
    shown = ", ".join(map(str, ranks[:8]))
    more = f", ... ({len(ranks)} in all)" if len(ranks) > 8 else ""
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}{more}"
