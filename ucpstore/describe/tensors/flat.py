"""Flat values: which boxes of which arrays lie where in a rank's part of a row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ucpstore.describe.ranks import Mesh, Ranks
from ucpstore.describe.tensors.held import Held, cut_by, views_of
from ucpstore.describe.tensors.numbers import check_numbers
from ucpstore.describe.tensors.plain import dtype_name, plain
from ucpstore.errors import StateError, UnsupportedError
from ucpstore.flat import Flat
from ucpstore.geometry import Flat as FlatCut
from ucpstore.geometry import Index, Partition, blocks_of, local_shape
from ucpstore.spec import Lowered


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One tensor of a row: its name below the flat's place, its block here, where it begins."""

    name: str
    shape: Index
    offset: int

    @property
    def stop(self) -> int:
        return self.offset + math.prod(self.shape)


def hold_flat(flat: Flat, ranks: Ranks, where: str, mesh: Mesh | None = None) -> dict[str, Held]:
    """What this rank holds of each tensor of a row, by the tensor's key in the tree.

    The first axis of `mesh`, where given, cuts the row instead of what the flat says. The key of
    a part of one tensor is "". Raises StateError, naming `where`, the tensor and the numbers,
    where they do not fit.
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
    before = ""  # what makes the tensors behind it begin elsewhere in the rows of other blocks
    for member in members_of(flat, where):
        full_name = full_name_of(flat, member, where)
        row = FlatCut(member.offset, max(local.numel(), 1))
        if mesh is not None:
            lowered = _unruled(full_name, member, cut_by(mesh, row))
        else:
            lowered = _lowered(flat, ranks, full_name, member, row, where)
        partition = lowered.partition
        axis = partition.flat
        assert axis is not None
        parts = partition.axes[axis[0]]
        if member.stop > parts * local.numel():
            raise StateError(
                f"{where}: lengths do not add up: {parts} parts of {local.numel()} elements hold "
                f"{parts * local.numel()}, but {full_name} of shape {member.shape} on this rank "
                f"ends at {member.stop}; is a tensor or a part missing, or the axis wrong?"
            )
        _check_values(flat, lowered, local, full_name)
        if parts == 1:
            partition = _uncut(partition, lowered.shape)
        elif before:
            raise UnsupportedError(
                f"{where}: {full_name} begins at {member.offset} of the row on this rank, but "
                f"elsewhere in rows of other blocks, for it lies behind {before}. {_EVEN}"
            )
        sizes = _uneven(lowered, member) if parts > 1 else []
        if sizes and sizes[-1] > parts * local.numel():
            raise UnsupportedError(
                f"{where}: the row has {parts} parts of {local.numel()} elements on this rank, but "
                f"there is a larger block of {_blocks(full_name, lowered, sizes)}. {_EVEN}"
            )
        if sizes and flat.offsets is None:
            before = _blocks(full_name, lowered, sizes)
        views = views_of(local, partition, lowered.shape, ranks.rank, member.offset)
        key = _key(flat, ranks, full_name, where)
        if key in found:
            raise StateError(f"{where}: rules give two tensors of the row the name {key}")
        dtype = dtype_name(local.dtype, where)
        scale = 1 if flat.is_state else lowered.scale
        found[key] = Held(local, lowered.shape, dtype, partition, views, scale)
    return found


def _uncut(partition: Partition, shape: Index) -> Partition:
    """A row of one part has blocks whole, wherever they begin in it and however long it is."""
    row = FlatCut(0, max(math.prod(partition.padded or shape), 1))
    splits = tuple(row if isinstance(each, FlatCut) else each for each in partition.splits)
    return replace(partition, splits=splits)


_EVEN = (
    "Uneven blocks are supported where all rows have parts of one length and tensors that begin at "
    "the same elements: put that tensor last, leave equal gaps and pass offsets, or give it a row "
    "of its own, padded to the largest block"
)


def _uneven(lowered: Lowered, member: Member) -> list[int]:
    """The sizes of the blocks of a tensor where they are not all equal, in order."""
    blocks = blocks_of(lowered.partition)
    count = math.prod(n for n, cut in zip(blocks.axes, blocks.splits, strict=True) if cut)
    if count * math.prod(member.shape) == math.prod(blocks.padded or lowered.shape):
        return []
    return sorted({math.prod(local_shape(blocks, lowered.shape, rank)) for rank in blocks.ranks})


def _blocks(full_name: str, lowered: Lowered, sizes: list[int]) -> str:
    told = ", ".join(map(str, sizes))
    return f"{full_name}, which rule {lowered.rule} cuts in blocks of {told} elements"


def full_name_of(flat: Flat, member: Member, where: str) -> str:
    """By which a specification knows a tensor of a row."""
    if not flat.is_row:
        return flat.of or where
    of = "model" if flat.of is None else flat.of
    return f"{of}.{member.name}" if of else member.name


def _check_values(flat: Flat, lowered: Lowered, local: torch.Tensor, where: str) -> None:
    check_numbers(lowered, local, where)
    if lowered.mean:
        raise UnsupportedError(
            f"{where}: rule {lowered.rule} averages it, but parts of rows are not averaged; give "
            "the tensors themselves, or average before saving"
        )
    if lowered.scale != 1 and flat.is_state is None:
        raise StateError(
            f"{where}: rule {lowered.rule} scales parameters and their masters, not states of an "
            "optimizer; pass Flat(..., is_state=True) or is_state=False to say which these are"
        )


def members_of(flat: Flat, where: str) -> Iterator[Member]:
    """The tensors of a row in its order; StateError where they overlap."""
    if flat.offsets is not None and flat.offsets.keys() != flat.shapes.keys():
        differing = sorted(flat.offsets.keys() ^ flat.shapes.keys())
        raise StateError(
            f"{where}: the offsets of a Flat must name the same tensors as its shapes, but "
            f"{', '.join(differing[:5])} is in one only"
        )
    position = 0
    for name, shape in flat.shapes.items():
        offset = position if flat.offsets is None else flat.offsets[name]
        member = Member(name, tuple(map(int, shape)), offset)
        if min(member.shape, default=0) < 0 or offset < position:
            raise StateError(
                f"{where}: {name} of shape {member.shape} begins at {offset}, but what lies before "
                f"it ends at {position}; tensors of a row must not overlap, in the order given"
            )
        position = member.stop
        yield member


def _lowered(
    flat: Flat, ranks: Ranks, full_name: str, member: Member, row: FlatCut, where: str
) -> Lowered:
    """The array of one tensor and how it lies over the ranks."""
    if isinstance(flat.over, DeviceMesh):
        if ranks.spec is not None:
            raise StateError(
                f"{where}: the Flat is cut over a DeviceMesh, but its tensors go by the rules of "
                "the specification; name the axes of the specification, Flat(..., over='dp')"
            )
        mesh = ranks.mesh(flat.over, where)
        if len(mesh.axes) != 1:
            raise StateError(
                f"{where}: a Flat over a DeviceMesh needs one of 1 dimension, e.g. mesh['dp'], but "
                f"it has {len(mesh.axes)}"
            )
        if ranks.rank not in mesh.ranks:
            raise StateError(f"{where}: this rank is not in the DeviceMesh of the Flat")
        return _unruled(full_name, member, Partition(mesh.axes, mesh.ranks, (row,)))
    if ranks.spec is not None:
        axes = tuple(ranks.spec.axes.sizes) if flat.over is None else flat.over
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        return ranks.spec.lower(full_name, member.shape, ranks.rank, (names, row))
    if flat.over is not None:
        raise StateError(
            f"{where}: the Flat is cut over {flat.over!r}, but there is no specification that says "
            "which ranks that axis has; pass spec=, a DeviceMesh, or None for all ranks"
        )
    everyone = tuple(range(ranks.count))
    return _unruled(full_name, member, Partition((ranks.count,), everyone, (row,)))


def _unruled(full_name: str, member: Member, partition: Partition) -> Lowered:
    return Lowered(full_name, full_name, member.shape, partition, 1, "(none)")


def _key(flat: Flat, ranks: Ranks, full_name: str, where: str) -> str:
    stored = ranks.stored(full_name)
    if not flat.is_row:
        if stored != full_name:
            raise StateError(
                f"{where}: a rule gives {full_name} the name {stored!r}, but a Flat of one tensor "
                "has the name of its place; give a row of one, Flat(tensor, {name: shape})"
            )
        return ""
    of = "model" if flat.of is None else flat.of
    start = f"{of}." if of else ""
    if not stored.startswith(start):
        raise StateError(
            f"{where}: a rule gives {full_name} the name {stored!r}, which is not in {of!r}"
        )
    return stored[len(start) :]
