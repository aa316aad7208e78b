"""Per-rank values: which document of which axis a rank writes or reads, and what is in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ucpstore.describe.ranks import Ranks
from ucpstore.describe.values.objects import is_stateful
from ucpstore.errors import StateError, UnsupportedError
from ucpstore.perrank import PerRank


@dataclass(frozen=True, slots=True)
class PerRankDocument:
    """What this rank stores of one per-rank value: `data`, as number `index` of `count`."""

    path: str
    axis: str
    index: int
    count: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Coordinate:
    """This rank's place on a named axis."""

    axis: str
    index: int
    count: int


def as_per_rank(value: object) -> PerRank[object] | None:
    """The value if it is per-rank by itself: a PerRank or a torch.Generator."""
    if isinstance(value, PerRank):
        return value
    return PerRank(value) if isinstance(value, torch.Generator) else None


def coordinate(value: PerRank[object], ranks: Ranks, where: str) -> Coordinate:
    """Which of how many documents is this rank's; StateError where the axis does not tell."""
    axis = value.axis
    if value.reshape is not None and not callable(value.reshape):
        raise StateError(
            f"{where}: the reshape of a PerRank must be a function of (values, index, count), but "
            f"it is {value.reshape!r}"
        )
    if axis is None:
        return Coordinate("rank", ranks.rank, ranks.count)
    if isinstance(axis, str):
        return _on_axis(axis, ranks, where)
    if isinstance(axis, DeviceMesh):
        if axis.ndim != 1:
            raise StateError(
                f"{where}: the axis of a PerRank must be a mesh of one dimension, but it has "
                f"{axis.ndim} ({axis.mesh_dim_names}); take one, e.g. mesh['dp']"
            )
        names = axis.mesh_dim_names
        if axis.get_coordinate() is None:
            raise StateError(
                f"{where}: this rank is not in the mesh that is the axis of its PerRank; "
                "leave the value out on ranks outside of the mesh"
            )
        return Coordinate(names[0] if names else "mesh", int(axis.get_local_rank()), axis.size())
    if isinstance(axis, tuple) and len(axis) == 3:
        name, index, count = axis
        if (
            isinstance(name, str)
            and type(index) is int
            and type(count) is int
            and (0 <= index < count)
        ):
            return Coordinate(name, index, count)
    raise StateError(
        f"{where}: the axis of a PerRank must be None, a DeviceMesh of one dimension, the name of "
        "an axis of the specification, or a tuple (name, index, count) with 0 <= index < count, "
        f"but it is {axis!r}"
    )


def _on_axis(axis: str, ranks: Ranks, where: str) -> Coordinate:
    if ranks.spec is None:
        raise StateError(
            f"{where}: the axis of a PerRank is {axis!r}, but there is no specification that says "
            "which ranks that axis has; pass spec=, a DeviceMesh, or (name, index, count)"
        )
    coordinates = ranks.spec.axes.coordinates(ranks.rank)
    return Coordinate(axis, coordinates.get(axis, 0), ranks.spec.axes.size((axis,)))


def contents(value: object, where: str) -> object:
    """The plain values to store: objects and generators give their state, containers are copied."""
    if isinstance(value, (nn.Module, torch.optim.Optimizer, DTensor)):
        raise UnsupportedError(
            f"{where}: a {type(value).__name__} cannot be part of a per-rank value; "
            "keep it in the state outside of PerRank and of per_rank patterns"
        )
    if isinstance(value, PerRank):
        raise UnsupportedError(f"{where}: PerRank inside of a per-rank value; use one of them")
    if isinstance(value, torch.Generator):
        return value.get_state()
    if is_stateful(value):
        return contents(value.state_dict(), where)
    if type(value) is dict:
        return {key: contents(item, f"{where}.{key}") for key, item in value.items()}
    if type(value) in (list, tuple):
        assert isinstance(value, (list, tuple))
        items = [contents(item, f"{where}.{at}") for at, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    return value


def restore(value: object, stored: object) -> object:
    """Put stored contents back into `value`, in place where it can be; what to keep in its slot."""
    if isinstance(value, PerRank):
        value.value = restore(value.value, stored)
        return value
    if isinstance(value, torch.Generator):
        if not isinstance(stored, torch.Tensor):
            raise TypeError(
                "a torch.Generator takes its state, a tensor of uint8, but it was given a "
                f"{type(stored).__name__}"
            )
        value.set_state(stored)
        return value
    if is_stateful(value):
        value.load_state_dict(stored)
        return value
    if type(value) is dict and isinstance(stored, Mapping):
        kept = {
            key: restore(value[key], item) if key in value else item for key, item in stored.items()
        }
        value.clear()
        value.update(kept)
        return value
    if type(value) is list and isinstance(stored, list):
        same = len(value) == len(stored)
        value[:] = (
            [restore(old, item) for old, item in zip(value, stored, strict=True)]
            if same
            else stored
        )
        return value
    return stored
