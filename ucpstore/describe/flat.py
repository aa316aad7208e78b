"""Flat values: which boxes of which arrays lie where in a rank's part of a row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ucpstore.describe.ranks import Ranks
from ucpstore.describe.tensors import Held, View, dtype_name, plain
from ucpstore.errors import StateError
from ucpstore.flat import Flat
from ucpstore.geometry import Flat as FlatCut
from ucpstore.geometry import Index, Partition, flat_views


@dataclass(frozen=True, slots=True, eq=False)
class _Member:
    """One tensor of a row: its name below the flat's place, its block here, where it begins."""

    name: str
    shape: Index
    offset: int

    @property
    def stop(self) -> int:
        return self.offset + math.prod(self.shape)


def hold_flat(flat: Flat, ranks: Ranks, where: str) -> dict[str, Held]:
    """What this rank holds of each tensor of a row, by the tensor's key in the tree.

    Raises StateError, naming `where`, the tensor and the numbers, where they do not fit.
    """
    if isinstance(flat.tensor, DTensor):
        raise StateError(f"{where}: the tensor of a Flat is a DTensor; give its local tensor")
    local = plain(flat.tensor, where)
    if local.dim() != 1 or not local.is_contiguous():
        raise StateError(
            f"{where}: the tensor of a Flat must be contiguous and have 1 dimension, but it has "
            f"shape {tuple(local.shape)} and strides {local.stride()}; give the rank's own range "
            "of the flattened tensors"
        )
    found: dict[str, Held] = {}
    for member in _members(flat, where):
        full_name = f"{flat.of}.{member.name}" if flat.of else member.name
        row = FlatCut(member.offset, max(local.numel(), 1))
        shape, partition = _lowered(flat, ranks, full_name, member, row, where)
        axis = partition.flat
        assert axis is not None
        parts = partition.axes[axis[0]]
        if member.stop > parts * local.numel():
            raise StateError(
                f"{where}: lengths do not add up: {parts} parts of {local.numel()} elements hold "
                f"{parts * local.numel()}, but {member.name} of shape {member.shape} on this rank "
                f"ends at {member.stop}; is a tensor or a part missing, or the axis wrong?"
            )
        views = tuple(_views(local, partition, shape, ranks.rank, member.offset))
        key = _key(flat, ranks, full_name, where)
        if key in found:
            raise StateError(f"{where}: rules give two tensors of the row the name {key}")
        found[key] = Held(local, shape, dtype_name(local.dtype, where), partition, views)
    return found


def _members(flat: Flat, where: str) -> Iterator[_Member]:
    if flat.offsets is not None and flat.offsets.keys() != flat.shapes.keys():
        differing = sorted(flat.offsets.keys() ^ flat.shapes.keys())
        raise StateError(
            f"{where}: the offsets of a Flat must name the same tensors as its shapes, but "
            f"{', '.join(differing[:5])} is in one only"
        )
    position = 0
    for name, shape in flat.shapes.items():
        offset = position if flat.offsets is None else flat.offsets[name]
        member = _Member(name, tuple(map(int, shape)), offset)
        if min(member.shape, default=0) < 0 or offset < position:
            raise StateError(
                f"{where}: {name} of shape {member.shape} begins at {offset}, but what lies before "
                f"it ends at {position}; tensors of a row must not overlap, in the order given"
            )
        position = member.stop
        yield member


def _lowered(
    flat: Flat, ranks: Ranks, full_name: str, member: _Member, row: FlatCut, where: str
) -> tuple[Index, Partition]:
    """The shape of the array and how it lies over the ranks."""
    if isinstance(flat.over, DeviceMesh):
        mesh = ranks.mesh(flat.over, where)
        if len(mesh.axes) != 1:
            raise StateError(
                f"{where}: a Flat over a DeviceMesh needs one of 1 dimension, e.g. mesh['dp'], but "
                f"it has {len(mesh.axes)}"
            )
        if ranks.rank not in mesh.ranks:
            raise StateError(f"{where}: this rank is not in the DeviceMesh of the Flat")
        return member.shape, Partition(mesh.axes, mesh.ranks, (row,))
    if ranks.spec is not None:
        axes = tuple(ranks.spec.axes.sizes) if flat.over is None else flat.over
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        lowered = ranks.spec.lower(full_name, member.shape, ranks.rank, (names, row))
        return lowered.shape, lowered.partition
    if flat.over is not None:
        raise StateError(
            f"{where}: the Flat is cut over {flat.over!r}, but there is no specification that says "
            "which ranks that axis has; pass spec=, a DeviceMesh, or None for all ranks"
        )
    return member.shape, Partition((ranks.count,), tuple(range(ranks.count)), (row,))


def _key(flat: Flat, ranks: Ranks, full_name: str, where: str) -> str:
    stored = ranks.stored(full_name)
    start = f"{flat.of}." if flat.of else ""
    if not stored.startswith(start):
        raise StateError(
            f"{where}: a rule gives {full_name} the name {stored!r}, which is not in {flat.of!r}"
        )
    return stored[len(start) :]


def _views(
    local: torch.Tensor, partition: Partition, shape: Index, rank: int, offset: int
) -> Iterator[View]:
    (start, _), views = flat_views(partition, shape, rank)
    for view in views:
        # A range begins in the rank's own part of the row.
        first = (offset + start) % local.numel() + view.start
        size = math.prod(view.shape)
        if view.pieces:
            yield View(local[first : first + size].view(view.shape), view.pieces)
