"""What ranks hold of an array, by torch's own operators on an arange; and random partitions."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import strategies as st

from ucpstore.geometry import Flat, Partition, Split

Shape = tuple[int, ...]
PADDING = -1


def chunks(places: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """torch.chunk, with empty tensors for the parts that it leaves out."""
    found = list(torch.chunk(places, parts)) if len(places) else []
    return found + [places[:0]] * (parts - len(found))


def oracle_blocks(partition: Partition, shape: Shape) -> dict[int, torch.Tensor]:
    """The block of every rank: numbers of elements of the array, -1 where it is padding."""
    padded = partition.padded or shape
    whole = torch.full(padded, PADDING)
    whole[tuple(map(slice, shape))] = torch.arange(math.prod(shape)).reshape(shape)
    held = [[torch.arange(extent) for extent in padded]]
    for size, split in zip(partition.axes, partition.splits, strict=True):
        held = [part for places in held for part in _parts(places, size, split)]
    found = {}
    for rank, places in zip(partition.ranks, held, strict=True):
        block = whole
        for dim, kept in enumerate(places):
            block = block.index_select(dim, kept)
        found[rank] = block
    return found


def _parts(
    places: list[torch.Tensor], size: int, split: Split | Flat | None
) -> list[list[torch.Tensor]]:
    """What each coordinate of an axis keeps of the places along all dimensions."""
    if not isinstance(split, Split):
        return [places] * size
    along = places[split.dim]
    if split.sizes:
        kept = list(torch.split(along, split.sizes))
    else:
        if split.sections:
            ends = list(itertools.accumulate(split.sections))
            sections = [
                along[(along >= first) & (along < last)]
                for first, last in zip([0, *ends], ends, strict=False)
            ]
        else:
            sections = chunks(along, split.factor)
        kept = [
            torch.cat(parts) for parts in zip(*(chunks(s, size) for s in sections), strict=True)
        ]
    return [[*places[: split.dim], part, *places[split.dim + 1 :]] for part in kept]


def oracle_ranges(partition: Partition, shape: Shape) -> dict[int, tuple[int, torch.Tensor]]:
    """Where every rank's flat range starts in its block, and its elements, padding as -1."""
    ((axis, flat),) = [(a, s) for a, s in enumerate(partition.splits) if isinstance(s, Flat)]
    mesh = torch.arange(math.prod(partition.axes)).reshape(partition.axes)
    coordinates = {
        rank: int((mesh == position).nonzero()[0, axis])
        for position, rank in enumerate(partition.ranks)
    }
    found = {}
    for rank, block in oracle_blocks(partition, shape).items():
        values = block.reshape(-1)
        foreign = -2
        length = max(partition.axes[axis] * flat.part, flat.offset + len(values))
        row = torch.full((length,), foreign)
        row[flat.offset : flat.offset + len(values)] = values
        first = coordinates[rank] * flat.part
        part = row[first : first + flat.part]
        before = int((row[:first] != foreign).sum())
        found[rank] = before, part[part != foreign]
    return found


@st.composite
def cuts(draw: st.DrawFn, extent: int, parts: int) -> Shape:
    """`parts` extents, some of them 0, that add up to `extent`."""
    ends = sorted(draw(st.lists(st.integers(0, extent), min_size=parts - 1, max_size=parts - 1)))
    return tuple(b - a for a, b in itertools.pairwise([0, *ends, extent]))


@st.composite
def partitions(
    draw: st.DrawFn,
    flat: bool = False,
    shapes: st.SearchStrategy[Shape] | None = None,
    mesh: int = 3,
) -> tuple[Partition, Shape]:
    """Any mesh, order of ranks, splits and padding; with a flat axis anywhere, if asked for.

    `mesh` is how many axes there are at most beside the flat one.
    """
    if shapes is None:
        shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
    shape = draw(shapes)
    padded = tuple(extent + draw(st.sampled_from([0, 0, 1, 3])) for extent in shape)
    axes: list[int] = []
    splits: list[Split | Flat | None] = []
    for _ in range(draw(st.integers(0, mesh))):
        size = draw(st.integers(1, 4))
        axes.append(size)
        if not shape or draw(st.integers(0, 3)) == 0:
            splits.append(None)
            continue
        dim = draw(st.integers(0, len(shape) - 1))
        fresh = not any(isinstance(split, Split) and split.dim == dim for split in splits)
        kind = draw(st.sampled_from(["plain", "factor", "sections", *["sizes"] * fresh]))
        if kind == "sections":
            count = draw(st.integers(1, 3))
            splits.append(Split(dim, sections=draw(cuts(padded[dim], count))))
        elif kind == "sizes":
            splits.append(Split(dim, sizes=draw(cuts(padded[dim], size))))
        else:
            splits.append(Split(dim, draw(st.integers(2, 4)) if kind == "factor" else 1))
    if flat:
        size = draw(st.integers(1, 6))
        at = draw(st.integers(0, len(axes)))
        axes.insert(at, size)
        splits.insert(at, None)
        offset = draw(st.sampled_from([0, draw(st.integers(0, 40))]))
        length = offset + _largest(tuple(axes), tuple(splits), padded)
        slack = draw(st.sampled_from([0, draw(st.integers(0, 40))]))
        splits[at] = Flat(offset, max(1, -(-(length + slack) // size)))
    ranks = draw(st.permutations(range(math.prod(axes))))
    return Partition(tuple(axes), tuple(ranks), tuple(splits), draw_padded(padded, shape)), shape


def draw_padded(padded: Shape, shape: Shape) -> Shape:
    """As users of partitions give it: nothing where there is no padding."""
    return padded if padded != shape else ()


def _largest(axes: Shape, splits: tuple[Split | Flat | None, ...], padded: Shape) -> int:
    blocks = oracle_blocks(Partition(axes, tuple(range(math.prod(axes))), splits), padded)
    return max(block.numel() for block in blocks.values())
