"""Splits: how one mesh axis cuts one dimension, replayed on index ranges."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ucpstore.geometry.box import Index

Range = tuple[int, int]
"""Start and exclusive end, in elements."""


@dataclass(frozen=True, slots=True)
class Split:
    """One mesh axis splits dimension `dim`, by the rule of `torch.chunk`.

    That is, n elements over p parts give parts of ceil(n / p), the last ones shorter or empty. At
    most one of the others changes this. `sizes` are the parts' extents where they follow no rule.
    `sections` are extents along the whole dimension, in order, that are split each on its own: each
    rank holds its part of every one. `factor` above 1 interleaves: what the axes before left is
    first cut into `factor` parts and each of them is split over the axis (torch's `_StridedShard`),
    as FSDP over tensor parallelism does.
    """

    dim: int
    factor: int = 1
    sections: Index = ()
    sizes: Index = ()


def chunk_ranges(ranges: Sequence[Range], parts: int) -> list[list[Range]]:
    """Split the concatenation of `ranges` into `parts` lists by the rule of `torch.chunk`."""
    total = sum(stop - start for start, stop in ranges)
    return _in_sizes(ranges, [-(-total // parts)] * parts)


def split_ranges(ranges: Sequence[Range], split: Split, parts: int) -> list[list[Range]]:
    """The ranges that each of `parts` coordinates of one mesh axis keeps."""
    if split.sizes:
        if len(split.sizes) != parts:
            raise ValueError(f"{len(split.sizes)} sizes {split.sizes} for an axis of {parts} ranks")
        return _in_sizes(ranges, split.sizes)
    if split.sections:
        sections = _sections(ranges, split.sections)
    elif split.factor > 1:
        sections = chunk_ranges(ranges, split.factor)
    else:
        return chunk_ranges(ranges, parts)
    result: list[list[Range]] = [[] for _ in range(parts)]
    for section in sections:
        for part, kept in enumerate(chunk_ranges(section, parts)):
            result[part].extend(kept)
    return [_joined(kept) for kept in result]


def _in_sizes(ranges: Sequence[Range], sizes: Sequence[int]) -> list[list[Range]]:
    """Lists of ranges with `sizes` elements, in order, as far as there are elements."""
    result: list[list[Range]] = []
    left = iter(ranges)
    start = stop = 0
    for size in sizes:
        kept: list[Range] = []
        while size:
            if start == stop:
                start, stop = next(left, (0, 0))
                if start == stop:
                    break
            end = min(stop, start + size)
            kept.append((start, end))
            size -= end - start
            start = end
        result.append(kept)
    return result


def _sections(ranges: Sequence[Range], extents: Sequence[int]) -> list[list[Range]]:
    """What `ranges` have of each section; sections count along the whole dimension."""
    stops = list(itertools.accumulate(extents))
    return [
        [(max(first, o), min(last, e)) for o, e in ranges if max(first, o) < min(last, e)]
        for first, last in zip([0, *stops], stops, strict=False)
    ]


def _joined(ranges: Sequence[Range]) -> list[Range]:
    joined: list[Range] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined
