"""What one rank holds of an array: which memory, and which boxes of the array lie in it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from ucpstore.describe.ranks import Mesh
from ucpstore.geometry import Box, Index, Partition, Piece, flat_views
from ucpstore.geometry import Flat as FlatCut


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """Memory of this rank and what of an array lies in it.

    `tensor` is plain and detached, of any device and strides, and shares memory with the state.
    `pieces` pair boxes of the array with boxes of `tensor`.
    """

    tensor: torch.Tensor
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """One tensor of the state and what this rank holds of it.

    `local` is a plain torch.Tensor, detached, of any device and strides, that shares memory with
    the tensor of the state. `views` show it, or parts of it, as boxes of the global `shape`.
    `partition` is None for a plain tensor, which every rank that has it holds whole. `scale` is by
    what values are multiplied on their way into the store; with `mean` those of all holders are
    averaged there.
    """

    local: torch.Tensor
    shape: Index
    dtype: str
    partition: Partition | None
    views: tuple[View, ...]
    scale: int = 1
    alone: str = ""
    tied: bool = False
    mean: bool = False


@lru_cache(maxsize=256)
def whole(shape: Index) -> tuple[Piece, ...]:
    """The single piece of a tensor that is held entirely; none for a tensor without elements."""
    box = Box.whole(shape)
    return (Piece(box, box),) if box.size else ()


def cut_by(mesh: Mesh, row: FlatCut) -> Partition:
    """The partition of a tensor in a row that the first axis of a mesh cuts."""
    return Partition(mesh.axes, mesh.ranks, (row, *(None for _ in mesh.axes[1:])))


def views_of(
    local: torch.Tensor, partition: Partition, shape: Index, rank: int, offset: int
) -> tuple[View, ...]:
    """What lies of a tensor, which begins at `offset` of a row, in the rank's part of the row.

    Of a padded one also the views that are nothing but padding, without pieces.
    """
    (start, _), views = flat_views(partition, shape, rank)
    found = []
    for view in views:
        # A range begins in the rank's own part of the row.
        first = (offset + start) % local.numel() + view.start
        size = math.prod(view.shape)
        if view.pieces or (partition.padded and size):
            part = local[first : first + size].view(view.shape)
            found.append(View(part, view.pieces))
    return tuple(found)
