"""What ranks tell each other about their arrays, and the arrays of the whole job merged from it.

A rank describes each of its arrays as an `ArraySpec`. Ranks with equal descriptions form a class;
`merge` joins the descriptions of all classes into `GlobalArray`s and proves that every element of
every array is held, by blocks that do not overlap. Arrays that are split alike share one `Layout`
object, so that a planner can do its work once for each.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from ucpstore.errors import StateError
from ucpstore.geometry.box import Box, Index
from ucpstore.geometry.partition import Partition, Split, fragments


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array as one rank describes it.

    `path` is the array's path in the step, segments escaped, joined by `/`. `dtype` is its Zarr v3
    registry name. `partition` is None for a plain tensor: held whole by every rank describing it.
    `codec` is the array's compressor as JSON text.
    """

    path: str
    shape: Index
    dtype: str
    dimension_names: tuple[str, ...]
    partition: Partition | None
    codec: str | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """One box of a global array and the ranks that hold it, in rising order."""

    box: Box
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """How one array is cut over the ranks: disjoint blocks that cover it. Compared by identity."""

    shape: Index
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class GlobalArray:
    """One array of the job, with the blocks that ranks hold of it.

    `joined` says that it was described as lying on several meshes: that they hold replicas of one
    tensor is told by nothing but its name.
    """

    path: str
    shape: Index
    dtype: str
    dimension_names: tuple[str, ...]
    layout: Layout
    joined: bool = False
    codec: str | None = None


@dataclass(frozen=True, slots=True)
class RankClass:
    """Ranks, in rising order, whose descriptions are equal, and that description."""

    ranks: tuple[int, ...]
    specs: tuple[ArraySpec, ...]


_SAME_PLAIN = (
    "wrap it in ucpstore.PerRank if each rank has its own, or make it a DTensor if it is sharded"
)
_SAME_GLOBAL = (
    "give every rank the same global tensor (DTensor.from_local needs shape= and stride= where "
    "parts are uneven)"
)


def merge(classes: Sequence[RankClass]) -> tuple[GlobalArray, ...]:
    """All arrays of the job, sorted by path.

    Raises StateError, naming the path and ranks, where ranks disagree about shape or dtype, where
    blocks overlap without being equal, where elements are held by nobody, or where a rank holds a
    part by the description of others and does not describe the array itself.
    """
    held: dict[str, list[tuple[RankClass, ArraySpec]]] = {}
    for member in classes:
        for spec in member.specs:
            held.setdefault(spec.path, []).append((member, spec))
    layouts: dict[object, Layout] = {}
    complete: set[object] = set()
    merged = []
    for path in sorted(held):
        holders = held[path]
        first_class, first = holders[0]
        for other_class, other in holders[1:]:
            for name in ("shape", "dtype", "dimension_names", "codec"):
                if getattr(first, name) != getattr(other, name):
                    plain = first.partition is None and other.partition is None
                    advice = _SAME_PLAIN if plain else _SAME_GLOBAL
                    raise StateError(
                        f"{path}: ranks disagree about its {name}: rank {first_class.ranks[0]} has "
                        f"{getattr(first, name)}, rank {other_class.ranks[0]} has "
                        f"{getattr(other, name)}; {advice}"
                    )
        partitions = frozenset(
            spec.partition or Partition.whole(member.ranks) for member, spec in holders
        )
        key = (first.shape, partitions)
        layout = layouts.get(key)
        if layout is None:
            layout = layouts[key] = _layout(path, first.shape, sorted(partitions, key=repr))
        described = tuple((member.ranks, spec.partition) for member, spec in holders)
        if (first.shape, described) not in complete:
            _check_present(path, first.shape, described)
            complete.add((first.shape, described))
        # Plain tensors are known to be nothing more.
        joined = len(partitions) > 1 and any(spec.partition for _, spec in holders)
        merged.append(
            GlobalArray(
                path,
                first.shape,
                first.dtype,
                first.dimension_names,
                layout,
                joined,
                first.codec,
            )
        )
    return tuple(merged)


def _check_present(
    path: str, shape: Index, described: Sequence[tuple[tuple[int, ...], Partition | None]]
) -> None:
    """Refuse a rank that has a part of the array by its partition, but not in its state."""
    present: dict[Partition, set[int]] = {}
    for ranks, partition in described:
        if partition is not None:
            present.setdefault(partition, set()).update(ranks)
    for partition, having in present.items():
        for rank, pieces in fragments(partition, shape).items():
            if pieces and rank not in having:
                raise StateError(
                    f"{path}: rank {rank} holds {pieces[0].box} of shape {shape} by the mesh and "
                    f"placements that rank {min(having)} gives, but its own state has no such "
                    "tensor; put the tensor into the state on every rank of its mesh"
                )


def _layout(path: str, shape: Index, partitions: Sequence[Partition]) -> Layout:
    holders: dict[Box, set[int]] = {}
    for partition in partitions:
        for rank, pieces in fragments(partition, shape).items():
            for piece in pieces:
                holders.setdefault(piece.box, set()).add(rank)
    blocks = tuple(Block(box, tuple(sorted(holders[box]))) for box in sorted(holders))
    _prove_coverage(path, shape, blocks)
    return Layout(shape, blocks)


def _prove_coverage(path: str, shape: Index, blocks: Sequence[Block]) -> None:
    whole = Box.whole(shape)
    # Sweeping along the dimension with the most lines keeps few blocks open at a time.
    lines = [len({block.box.offset[dim] for block in blocks}) for dim in range(len(shape))]
    along = lines.index(max(lines)) if lines else 0
    open_blocks: list[Block] = []
    for block in sorted(blocks, key=lambda block: block.box.offset[along : along + 1]):
        if not whole.contains(block.box):
            raise StateError(
                f"{path}: ranks {block.ranks} hold {block.box}, outside of shape {shape}"
            )
        if not shape:
            continue
        start = block.box.offset[along]
        open_blocks = [other for other in open_blocks if other.box.stop[along] > start]
        for other in open_blocks:
            common = block.box.intersect(other.box)
            if common is not None:
                raise StateError(
                    f"{path}: ranks {other.ranks} and ranks {block.ranks} hold overlapping parts "
                    f"that are not the same, {other.box} and {block.box}; every element must be "
                    "held once, up to replicas of the same part"
                )
        open_blocks.append(block)
    found = sum(block.box.size for block in blocks)
    if found != whole.size:
        raise StateError(
            f"{path}: the ranks hold {found} of the {whole.size} elements of shape {shape}; "
            "the missing parts must be held by a rank of the process group"
        )


def specs_to_bytes(specs: Sequence[ArraySpec]) -> bytes:
    """A compact canonical form, equal for equal descriptions, to hash and to send."""
    partitions: dict[Partition | None, int] = {}
    rows = []
    for spec in specs:
        number = partitions.setdefault(spec.partition, len(partitions))
        rows.append([spec.path, spec.shape, spec.dtype, spec.dimension_names, number, spec.codec])
    table = [
        None
        if partition is None
        else [
            partition.axes,
            partition.ranks,
            [None if split is None else [split.dim, split.factor] for split in partition.splits],
        ]
        for partition in partitions
    ]
    return json.dumps([table, rows], separators=(",", ":")).encode()


def specs_from_bytes(data: bytes) -> tuple[ArraySpec, ...]:
    """The inverse of `specs_to_bytes`."""
    table, rows = json.loads(data)
    partitions = [
        None
        if entry is None
        else Partition(
            tuple(entry[0]),
            tuple(entry[1]),
            tuple(None if split is None else Split(*split) for split in entry[2]),
        )
        for entry in table
    ]
    return tuple(
        ArraySpec(path, tuple(shape), dtype, tuple(names), partitions[number], codec)
        for path, shape, dtype, names, number, codec in rows
    )
