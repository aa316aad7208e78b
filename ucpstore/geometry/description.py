"""What ranks tell each other about their arrays, and the arrays of the whole job merged from it.

A rank describes each of its arrays as an `ArraySpec`. Ranks with equal descriptions form a class;
`merge` joins the descriptions of all classes into `GlobalArray`s and proves that every element of
every array is held, by blocks that do not overlap. Arrays that are split alike share one `Layout`
object, so that a planner can do its work once for each.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any

from ucpstore.errors import StateError
from ucpstore.geometry.blocks import Blocks, join
from ucpstore.geometry.box import Index
from ucpstore.geometry.coverage import prove_coverage
from ucpstore.geometry.held import held_blocks
from ucpstore.geometry.partition import Flat, Partition, block_starts, pieces_of
from ucpstore.geometry.splits import Split


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array as one rank describes it.

    `path` is the array's path in the step, segments escaped, joined by `/`. `dtype` is its Zarr v3
    registry name. `partition` is None for a plain tensor: held whole by every rank describing it.
    `codec` is the array's compressor as JSON text. `alone` says, where a specification does, of
    which coordinates the ranks alone hold it, such as `pp=0`; `tied` that the rank stores another
    tensor of its own as this one. With `mean` the values of a block's holders are averaged.
    """

    path: str
    shape: Index
    dtype: str
    dimension_names: tuple[str, ...]
    partition: Partition | None
    codec: str | None = None
    alone: str = ""
    tied: bool = False
    mean: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """How one array is cut over the ranks: disjoint blocks that cover it. Compared by identity.

    Where ranks hold ranges of flattened blocks, `lines` has for each dimension where those blocks
    start, in rising order; else it is None, and the blocks here are the ones to follow.
    """

    shape: Index
    blocks: Blocks
    lines: tuple[Index, ...] | None = None


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
    mean: bool = False


@dataclass(frozen=True, slots=True)
class RankClass:
    """Ranks, in rising order, whose descriptions are equal, and that description."""

    ranks: tuple[int, ...]
    specs: tuple[ArraySpec, ...]


_TOLD = ("shape", "dtype", "dimension_names", "codec", "mean")
_told = attrgetter(*_TOLD)
_SAME_PLAIN = (
    "wrap it in ucpstore.PerRank if each rank has its own, or make it a DTensor if it is sharded"
)
_SAME_GLOBAL = (
    "give every rank the same global tensor (DTensor.from_local needs shape= and stride= where "
    "parts are uneven, a rule of a specification size= or sizes=)"
)


def merge(classes: Sequence[RankClass]) -> tuple[GlobalArray, ...]:
    """All arrays of the job, sorted by path.

    Raises StateError, naming the path and ranks, where ranks disagree about shape or dtype, where
    blocks overlap without being equal, where elements are held by nobody, where a rank holds a
    part by the description of others and does not describe the array itself, where two say that
    they alone hold it, or where all say that it is a tensor of others.
    """
    held: dict[str, list[tuple[RankClass, ArraySpec]]] = {}
    for member in classes:
        for spec in member.specs:
            held.setdefault(spec.path, []).append((member, spec))
    layouts: dict[object, Layout] = {}
    merged = []
    for path in sorted(held):
        holders = held[path]
        _, first = holders[0]
        _check_same(path, holders)
        _check_alone(path, holders)
        by_partition = _by_partition(holders)
        key = (first.shape, frozenset(by_partition))
        layout = layouts.get(key)
        if layout is None:
            layout = layouts[key] = _layout(path, first.shape, by_partition)
        for partition, having in by_partition.items():
            if not having.issuperset(partition.ranks):
                _check_present(path, first.shape, partition, having)
        # Plain tensors are known to be nothing more.
        joined = len(by_partition) > 1 and any(spec.partition for _, spec in holders)
        merged.append(
            GlobalArray(
                path,
                first.shape,
                first.dtype,
                first.dimension_names,
                layout,
                joined,
                first.codec,
                first.mean,
            )
        )
    return tuple(merged)


def _check_same(path: str, holders: Sequence[tuple[RankClass, ArraySpec]]) -> None:
    """Refuse an array of which ranks say different things."""
    first_class, first = holders[0]
    for other_class, other in holders[1:]:
        if _told(first) == _told(other):
            continue
        name = next(n for n in _TOLD if getattr(first, n) != getattr(other, n))
        plain = first.partition is None and other.partition is None
        raise StateError(
            f"{path}: ranks disagree about its {name}: rank {first_class.ranks[0]} has "
            f"{getattr(first, name)}, rank {other_class.ranks[0]} has "
            f"{getattr(other, name)}; {_SAME_PLAIN if plain else _SAME_GLOBAL}"
        )


def _check_alone(path: str, holders: Sequence[tuple[RankClass, ArraySpec]]) -> None:
    """Refuse an array that two coordinates claim, and one that all take for another's."""
    owners = {spec.alone: member.ranks[0] for member, spec in holders if not spec.tied}
    if not owners:
        ranks = sorted(member.ranks[0] for member, _ in holders)
        raise StateError(
            f"{path}: a rule ties a tensor of rank {ranks[0]} to it, but no rank has a tensor of "
            "this name; correct the name that tied(...) gives"
        )
    claims = sorted((rank, alone) for alone, rank in owners.items() if alone)
    if len(claims) > 1:
        (one, here), (other, there) = claims[:2]
        raise StateError(
            f"{path}: rank {one} holds it alone with {here}, and rank {other} with {there}; two "
            "tensors need two names, renamed(...), and one that several ranks share is tied(...) "
            "or replicated"
        )


def _by_partition(
    holders: Sequence[tuple[RankClass, ArraySpec]],
) -> dict[Partition, set[int]]:
    """The ranks that describe an array by each partition; plain tensors are all in one."""
    found: dict[Partition, set[int]] = {}
    plain: set[int] = set()
    for member, spec in holders:
        if spec.partition is None:
            plain.update(member.ranks)
        else:
            found.setdefault(spec.partition, set()).update(member.ranks)
    if plain:
        found.setdefault(Partition.whole(sorted(plain)), set()).update(plain)
    return found


def _check_present(path: str, shape: Index, partition: Partition, having: Set[int]) -> None:
    """Refuse a rank that has a part of the array by its partition, but not in its state."""
    absent = {*held_blocks(partition, shape).ranks.tolist()} - having
    if absent:
        rank = min(absent)
        box = pieces_of(partition, shape, rank)[0].box
        raise StateError(
            f"{path}: rank {rank} holds {box} of shape {shape} by the mesh and "
            f"placements that rank {min(having)} gives, but its own state has no such "
            "tensor; put the tensor into the state on every rank of its mesh (in a "
            "specification unique(axis) says that others do not have it)"
        )


def _layout(path: str, shape: Index, partitions: Collection[Partition]) -> Layout:
    blocks = join([held_blocks(partition, shape) for partition in partitions])
    prove_coverage(path, shape, blocks)
    if all(partition.flat is None for partition in partitions):
        return Layout(shape, blocks)
    starts = [block_starts(partition, shape) for partition in partitions]
    lines = (sorted(set().union(*each)) for each in zip(*starts, strict=True))
    return Layout(shape, blocks, tuple(map(tuple, lines)))


def specs_to_bytes(specs: Sequence[ArraySpec]) -> bytes:
    """A compact canonical form, equal for equal descriptions, to hash and to send."""
    meshes: dict[tuple[Index, Index], int] = {}
    partitions: dict[Partition | None, int] = {}
    rows = []
    for spec in specs:
        number = partitions.setdefault(spec.partition, len(partitions))
        row = [spec.path, spec.shape, spec.dtype, spec.dimension_names, number, spec.codec]
        said = [spec.alone, spec.tied, spec.mean]
        rows.append([*row, *said] if any(said) else row)
    table = [
        None
        if each is None
        else [
            meshes.setdefault((each.axes, each.ranks), len(meshes)),
            [_split_to_json(split) for split in each.splits],
            each.padded,
        ]
        for each in partitions
    ]
    return json.dumps([list(meshes), table, rows], separators=(",", ":")).encode()


def specs_from_bytes(data: bytes) -> tuple[ArraySpec, ...]:
    """The inverse of `specs_to_bytes`."""
    meshes, table, rows = json.loads(data)
    shared = [_mesh(tuple(axes), tuple(ranks)) for axes, ranks in meshes]
    partitions: list[Partition | None] = []
    for entry in table:
        if entry is None:
            partitions.append(None)
            continue
        mesh, splits, padded = entry
        axes, ranks = shared[mesh]
        partitions.append(
            Partition(axes, ranks, tuple(map(_split_from_json, splits)), tuple(padded))
        )
    return tuple(
        ArraySpec(path, tuple(shape), dtype, tuple(names), partitions[number], codec, *rest)
        for path, shape, dtype, names, number, codec, *rest in rows
    )


@lru_cache(maxsize=256)
def _mesh(axes: Index, ranks: Index) -> tuple[Index, Index]:
    """One and the same for all descriptions, so that equal meshes are quickly seen to be equal."""
    return axes, ranks


def _split_to_json(split: Split | Flat | None) -> object:
    """The fields in order: the length tells a `Flat` from a `Split`."""
    if split is None:
        return None
    if isinstance(split, Flat):
        return [split.offset, split.part]
    return [split.dim, split.factor, split.sections, split.sizes]


def _split_from_json(entry: list[Any] | None) -> Split | Flat | None:
    if entry is None:
        return None
    if len(entry) == 2:
        return Flat(*entry)
    dim, factor, sections, sizes = entry
    return Split(dim, factor, tuple(sections), tuple(sizes))
