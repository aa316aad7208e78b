"""Choosing an array's grid from what every rank knows: shape, item size, partition, options.

An object has one writer, so the grid follows the lines along which the array is cut over the
ranks wherever that leaves objects of a useful size. Other cuts are dropped: objects then lie
across the lines and their pieces are exchanged before they are written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ucpstore.geometry import PLAIN_LIMIT_BYTES, Grid, Index, Layout
from ucpstore.options import Options


@dataclass(frozen=True, slots=True)
class _Cut:
    """The lines of one dimension: how many there are and the gcd of their offsets."""

    lines: int
    step: int


def choose_grid(layout: Layout, itemsize: int, options: Options) -> Grid:
    """The grid for arrays of `itemsize` bytes per element that are cut over the ranks alike."""
    shape = layout.shape
    if math.prod(shape) * itemsize <= PLAIN_LIMIT_BYTES:
        whole = tuple(max(extent, 1) for extent in shape)
        return Grid(shape, whole, whole, sharded=False)
    cuts = _cuts(layout)
    while True:
        start = [cut.step if cut else extent for cut, extent in zip(cuts, shape, strict=True)]
        wished = wished_extents(start, itemsize, options.chunk_bytes)
        chunk = [_chunk_extent(*dim) for dim in zip(cuts, shape, wished, strict=True)]
        dropped = _cut_to_drop(cuts, chunk, math.prod(start) * itemsize < options.least_bytes)
        if dropped is None:
            break
        cuts[dropped] = None
    kept = [c or 1 for c in chunk]  # no entry is None once nothing has to be dropped
    return Grid(
        shape, tuple(kept), _object_extents(shape, kept, cuts, itemsize, options), sharded=True
    )


def kept_cuts(layout: Layout, grid: Grid) -> tuple[int, ...]:
    """The dimensions that the partition cuts and whose lines all lie on lines of the objects."""
    return tuple(
        dim
        for dim, cut in enumerate(_cuts(layout))
        if cut is not None and grid.sharded and cut.step % grid.object[dim] == 0
    )


def wished_extents(extents: Sequence[int], itemsize: int, chunk_bytes: int) -> tuple[float, ...]:
    """Extents of a chunk of about `chunk_bytes` in a region of `extents`, near-square.

    The longest dimension is halved until the chunk is within a factor of sqrt(2) of its size.
    Dimensions in front of the last two are cut to 1 while what lies behind them still fills a
    chunk: stacked experts and layers are read one by one.
    """
    wished = [float(extent) for extent in extents]
    behind = math.prod(extents) * itemsize
    for dim in range(len(extents) - 2):
        behind //= extents[dim]
        if behind * math.sqrt(2) < chunk_bytes:
            break
        wished[dim] = 1.0
    while max(wished) > 1 and math.prod(wished) * itemsize > chunk_bytes * math.sqrt(2):
        longest = wished.index(max(wished))
        wished[longest] /= 2
    return tuple(wished)


def _cuts(layout: Layout) -> list[_Cut | None]:
    cuts: list[_Cut | None] = []
    for dim in range(len(layout.shape)):
        lines = {block.box.offset[dim] for block in layout.blocks} - {0}
        cuts.append(_Cut(len(lines), math.gcd(*lines)) if lines else None)
    return cuts


def _chunk_extent(cut: _Cut | None, extent: int, wished: float) -> int | None:
    """Extent of a chunk along one dimension, None where the cut leaves no suitable one."""
    if cut is None:
        return -(-extent // max(1, round(extent / wished)))
    suitable = [c for c in _divisors(cut.step) if wished / 2 <= c <= wished * 2]
    return min(suitable, key=lambda c: max(c / wished, wished / c), default=None)


def _cut_to_drop(
    cuts: Sequence[_Cut | None], chunk: Sequence[int | None], too_small: bool
) -> int | None:
    lines = {
        dim: cut.lines
        for dim, cut in enumerate(cuts)
        if cut is not None and (too_small or chunk[dim] is None)
    }
    return max(lines, key=lambda dim: lines[dim], default=None)


def _object_extents(
    shape: Index,
    chunk: Sequence[int],
    cuts: Sequence[_Cut | None],
    itemsize: int,
    options: Options,
) -> Index:
    """Whole chunks up to the target size, from the last dimension to the first.

    Along a kept cut the object divides the distance of the lines; along other dimensions the
    objects are of about equal size.
    """
    extents = list(chunk)
    for dim in reversed(range(len(shape))):
        room = max(1, options.target_bytes // (math.prod(extents) * itemsize))
        cut = cuts[dim]
        if cut is not None:
            extents[dim] *= max(m for m in _divisors(cut.step // chunk[dim]) if m <= room)
        else:
            chunks = -(-shape[dim] // chunk[dim])
            objects = -(-chunks // min(chunks, room))
            extents[dim] *= -(-chunks // objects)
    return tuple(extents)


def _divisors(number: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]
