"""Choosing an array's grid from what every rank knows: shape, item size, partition, options.

An object has one writer, so the grid follows the lines along which the array is cut over the
ranks wherever that leaves objects of a useful size. Other tilings are dropped: objects then lie
across the lines and their pieces are exchanged before they are written.

Ranges of flattened blocks end at arbitrary elements, so there the objects follow the blocks, and
each is one run of its block: a range has at most two objects that it does not fill, one at either
end. Where the ranges happen to end at regular distances, objects follow these instead. One regular
grid cannot give this where fused sections of unequal extents, or uneven blocks, lie side by side
along another dimension than the first: objects divide the distances of all lines there, so that
several are side by side in one section, and a range has that many at either end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ucpstore.geometry import PLAIN_LIMIT_BYTES, Grid, Index, Layout
from ucpstore.options import Options


@dataclass(frozen=True, slots=True)
class _Tiling:
    """How one dimension is tiled: the lines between blocks, and the gcd of their offsets."""

    lines: int
    step: int


def choose_grid(layout: Layout, itemsize: int, options: Options) -> Grid:
    """The grid for arrays of `itemsize` bytes per element that are cut over the ranks alike."""
    shape = layout.shape
    if math.prod(shape) * itemsize <= PLAIN_LIMIT_BYTES:
        whole = tuple(max(extent, 1) for extent in shape)
        return Grid(shape, whole, whole, sharded=False)
    tilings = _tilings(layout)
    runs = layout.lines is not None
    if runs:
        ranges = _range_tilings(layout)
        if _try(shape, ranges, itemsize, options, runs=False).drop is None:
            tilings, runs = ranges, False
    trial = _try(shape, tilings, itemsize, options, runs)
    while trial.drop is not None:
        tilings[trial.drop] = None
        trial = _try(shape, tilings, itemsize, options, runs)
    chunk = [c or 1 for c in trial.chunk]  # no entry is None once nothing has to be dropped
    if runs:
        extents = _run_objects(shape, chunk, tilings, trial.most)
    else:
        extents = _grown_objects(shape, chunk, tilings, itemsize, options)
    return Grid(shape, tuple(chunk), extents, sharded=True)


@dataclass(frozen=True, slots=True)
class _Trial:
    """What following some tilings gives: most extents of an object, chunks, and which to drop."""

    most: Sequence[int]
    chunk: Sequence[int | None]
    drop: int | None


def _try(
    shape: Index, tilings: Sequence[_Tiling | None], itemsize: int, options: Options, runs: bool
) -> _Trial:
    region = _regions(shape, tilings)
    most = _run_extents(shape, tilings, region, itemsize, options) if runs else region
    whole: list[int] = []  # dimensions whose chunks span what lies between two lines
    while True:
        rest = [1 if dim in whole else extent for dim, extent in enumerate(most)]
        unit = itemsize * math.prod([region[dim] for dim in whole])
        wished = wished_extents(rest, unit, options.chunk_bytes)
        chunk = [_chunk_extent(*dim) for dim in zip(tilings, shape, wished, most, strict=True)]
        for dim in whole:
            chunk[dim] = region[dim]
        if not runs:
            break
        spanned = [
            dim
            for dim, extent in enumerate(chunk)
            if extent is None
            and most[dim] == region[dim]
            and math.prod(rest[:dim]) > 1
            and region[dim] * unit <= options.chunk_bytes
        ]
        if not spanned:
            break
        whole.append(spanned[-1])
    too_small = math.prod(region) * itemsize < options.least_bytes
    return _Trial(most, chunk, _dim_to_drop(tilings, chunk, too_small))


def _regions(shape: Index, tilings: Sequence[_Tiling | None]) -> list[int]:
    """The extents between lines, the whole extent where there are none."""
    return [each.step if each else extent for each, extent in zip(tilings, shape, strict=True)]


def kept_dims(layout: Layout, grid: Grid) -> tuple[int, ...]:
    """The dimensions that the partition cuts and whose lines all lie on lines of the objects."""
    return tuple(
        dim
        for dim, tiling in enumerate(_tilings(layout))
        if tiling is not None and grid.sharded and tiling.step % grid.object[dim] == 0
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


def _run_extents(
    shape: Index,
    tilings: Sequence[_Tiling | None],
    region: Sequence[int],
    itemsize: int,
    options: Options,
) -> list[int]:
    """The largest part of a block that one object can hold and that is one run of the block."""
    run = list(region)
    room = max(1, options.target_bytes // itemsize)
    for dim in reversed(range(len(run))):
        run[dim] = min(run[dim], room)
        room //= run[dim]
        tiling = tilings[dim]
        # blocks of several regions: what lies in front of this dimension is no part of the run
        uneven = tiling is not None and tiling.lines + 1 < -(-shape[dim] // tiling.step)
        large = math.prod(run[dim:]) * itemsize >= options.least_bytes
        if run[dim] < region[dim] or (uneven and large):
            room = 1
    return run


def _tilings(layout: Layout) -> list[_Tiling | None]:
    """The tilings that objects should follow: those by blocks."""
    if layout.lines is None:
        return _range_tilings(layout)
    return [_tiling(lines) for lines in layout.lines]


def _range_tilings(layout: Layout) -> list[_Tiling | None]:
    """All tilings, those by ranges of blocks too."""
    return [_tiling(along) for along in layout.blocks.offsets.T]


def _tiling(starts: npt.ArrayLike) -> _Tiling | None:
    lines = np.setdiff1d(starts, [0])
    return _Tiling(len(lines), int(np.gcd.reduce(lines))) if len(lines) else None


def _chunk_extent(tiling: _Tiling | None, extent: int, wished: float, most: int) -> int | None:
    """Extent of a chunk along one dimension, None where the tiling leaves no suitable one."""
    if tiling is None:
        return -(-extent // max(1, round(extent / wished), -(-extent // most)))
    suitable = [c for c in _divisors(tiling.step) if wished / 2 <= c <= min(wished * 2, most)]
    return min(suitable, key=lambda c: max(c / wished, wished / c), default=None)


def _dim_to_drop(
    tilings: Sequence[_Tiling | None], chunk: Sequence[int | None], too_small: bool
) -> int | None:
    """The dimension whose tiling is to be dropped: that with the most lines."""
    lines = {
        dim: tiling.lines
        for dim, tiling in enumerate(tilings)
        if tiling is not None and (too_small or chunk[dim] is None)
    }
    return max(lines, key=lambda dim: lines[dim], default=None)


def _grown_objects(
    shape: Index,
    chunk: Sequence[int],
    tilings: Sequence[_Tiling | None],
    itemsize: int,
    options: Options,
) -> Index:
    """Whole chunks up to the target size, from the last dimension to the first."""
    extents = list(chunk)
    for dim in reversed(range(len(shape))):
        room = max(1, options.target_bytes // (math.prod(extents) * itemsize))
        extents[dim] *= _chunks_along(tilings[dim], shape[dim], chunk[dim], room)
    return tuple(extents)


def _run_objects(
    shape: Index, chunk: Sequence[int], tilings: Sequence[_Tiling | None], most: Sequence[int]
) -> Index:
    """Whole chunks up to the extents `most`, so that an object is one run of a block."""
    extents = []
    for dim, region in enumerate(_regions(shape, tilings)):
        # where the run spans the region, so does the object, its last chunk cut at the array's edge
        room = region if most[dim] == region else most[dim] // chunk[dim]
        extents.append(chunk[dim] * _chunks_along(tilings[dim], shape[dim], chunk[dim], room))
    return tuple(extents)


def _chunks_along(tiling: _Tiling | None, extent: int, chunk: int, room: int) -> int:
    """The chunks of an object along one dimension, at most `room`.

    Along a kept tiling the object divides the distance of the lines; along other dimensions the
    objects are of about equal size.
    """
    if tiling is not None:
        return max(m for m in _divisors(tiling.step // chunk) if m <= room)
    chunks = -(-extent // chunk)
    objects = -(-chunks // min(chunks, room))
    return -(-chunks // objects)


def _divisors(number: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]
