"""Which ranks hold what of every object: the work that arrays cut alike share.

A `Cut` is made once per layout and item size; arrays with the same one only differ in the owners
of their objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ucpstore.geometry import Block, Box, Grid, Index, Layout
from ucpstore.options import Options
from ucpstore.plan.grid import choose_grid

NOBODY = -1
"""In place of a rank where the owner of an object is not settled yet."""


@dataclass(frozen=True, slots=True)
class Part:
    """The region that one block has in one object, in global coordinates."""

    block: Block
    box: Box


@dataclass(frozen=True, slots=True, eq=False)
class CutObject:
    """One object: its stored bytes, its parts in order, and the ranks that may own it.

    The parts are disjoint and cover the object. `shared` says that no rank has all of it, or that
    the mean of several ranks' values is stored; `sole_senders` is then {rank: part numbers} where
    there is no choice who sends what.
    """

    index: Index
    stored_bytes: int
    parts: tuple[Part, ...]
    candidates: Index
    shared: bool
    sole_senders: dict[int, tuple[int, ...]] | None


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """The grid of a layout and its objects in row-major order.

    `settled` holds each object's only candidate, or `NOBODY` where there is a choice.
    """

    grid: Grid
    itemsize: int
    objects: tuple[CutObject, ...]
    settled: npt.NDArray[np.int32]
    open_objects: Index
    shared_objects: Index


def cut_layout(layout: Layout, itemsize: int, options: Options, *, mean: bool = False) -> Cut:
    """Choose the grid and find every object's parts and candidates.

    With `mean` every holder of a part sends it, for their mean is stored.
    """
    grid = choose_grid(layout, itemsize, options)
    boxes = {index: grid.object_box(index) for index in grid.object_indices()}
    parts: dict[Index, list[Part]] = {index: [] for index in boxes}
    for block in layout.blocks:
        touched = list(grid.objects_touching(block.box))
        for index in touched:
            common = block.box if len(touched) == 1 else block.box.intersect(boxes[index])
            if common is not None:
                parts[index].append(Part(block, common))
    objects = tuple(
        _cut_object(grid, index, itemsize, parts[index], box.size, mean=mean)
        for index, box in boxes.items()
    )
    settled = np.array(
        [o.candidates[0] if len(o.candidates) == 1 else NOBODY for o in objects], dtype=np.int32
    )
    return Cut(
        grid,
        itemsize,
        objects,
        settled,
        tuple(np.flatnonzero(settled == NOBODY).tolist()),
        tuple(number for number, item in enumerate(objects) if item.shared),
    )


def _cut_object(
    grid: Grid, index: Index, itemsize: int, parts: Sequence[Part], size: int, *, mean: bool
) -> CutObject:
    holders, whole = _holders(parts, size)
    mean = mean and any(len(part.block.ranks) > 1 for part in parts)
    shared = mean or not whole
    return CutObject(
        index,
        grid.object_bytes(index, itemsize),
        tuple(parts),
        holders if shared else whole,
        shared,
        (_holders_send(parts) if mean else _sole_senders(parts)) if shared else None,
    )


def _holders(parts: Sequence[Part], size: int) -> tuple[Index, Index]:
    """The ranks that hold something of the object, and those that hold all of it."""
    if len(parts) == 1:
        ranks = parts[0].block.ranks
        return ranks, ranks
    held: dict[int, int] = {}
    for part in parts:
        for rank in part.block.ranks:
            held[rank] = held.get(rank, 0) + part.box.size
    return (
        tuple(sorted(held)),
        tuple(rank for rank in sorted(held) if held[rank] == size),
    )


def _sole_senders(parts: Sequence[Part]) -> dict[int, tuple[int, ...]] | None:
    alone = all(len(part.block.ranks) == 1 for part in parts)
    return _holders_send(parts) if alone else None


def _holders_send(parts: Sequence[Part]) -> dict[int, tuple[int, ...]]:
    """Every rank sends all that it holds."""
    senders: dict[int, list[int]] = {}
    for number, part in enumerate(parts):
        for rank in part.block.ranks:
            senders.setdefault(rank, []).append(number)
    return {rank: tuple(numbers) for rank, numbers in senders.items()}
