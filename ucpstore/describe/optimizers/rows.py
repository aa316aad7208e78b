"""Optimizers of rows and copies: what lies where in their parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from ucpstore.describe.optimizers.inner import inner_optimizer
from ucpstore.errors import StateError
from ucpstore.flat import Flat, FlatOptimizer


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A parameter of an optimizer in which, from element `at` on, the tensor of `flat` lies.

    `group` are the global ranks over which the row is cut in `parts`, in order, one for each where
    None; without a group the flat tells it. `aliased` says that the module's parameter of that name
    is a part of the row's memory, as in `owned.py`.
    """

    parameter: torch.Tensor
    flat: Flat
    at: int = 0
    aliased: bool = False
    group: tuple[int, ...] = ()
    parts: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """A parameter of an optimizer that is a copy, of another dtype, of a module's parameter."""

    parameter: torch.Tensor
    weight: nn.Parameter


@dataclass(frozen=True, slots=True, eq=False)
class RowOptimizer:
    """An optimizer of rows and copies, by group; `loaded` is called after a load."""

    optimizer: torch.optim.Optimizer
    groups: tuple[tuple[Row | Copy, ...], ...]
    loaded: Callable[[], None] | None = None


def rows_of(value: FlatOptimizer, where: str) -> RowOptimizer:
    """Each flat with the parameter in whose memory it lies."""
    optimizer = inner_optimizer(value.optimizer, where)
    if optimizer is None:
        raise StateError(
            f"{where}: the optimizer of a FlatOptimizer must be a torch.optim.Optimizer, but it is "
            f"a {type(value.optimizer).__name__}"
        )
    found: dict[torch.Tensor, list[Row]] = {
        parameter: [] for group in optimizer.param_groups for parameter in group["params"]
    }
    for flat in value.flats:
        if not isinstance(flat, Flat) or not flat.is_row:
            raise StateError(
                f"{where}: a FlatOptimizer needs a ucpstore.Flat, or several, for each parameter "
                f"of the optimizer, with names: Flat(tensor, {{name: shape}}); one is {flat!r}"
            )
        for parameter, rows in found.items():
            at = _start_in(parameter, flat.tensor)
            if at is not None:
                rows.append(Row(parameter, flat, at))
                break
        else:
            raise StateError(
                f"{where}: {flat!r} with {', '.join([*flat.shapes][:3])} lies in no parameter of "
                "the optimizer; give a Flat of the parameter itself, or of a part of it"
            )
    for number, (parameter, rows) in enumerate(found.items()):
        if not rows:
            raise StateError(
                f"{where}: parameter {number} of the optimizer, of shape {tuple(parameter.shape)}, "
                "has no Flat, so it is not known what lies in it"
            )
        rows.sort(key=lambda row: row.at)
        for row, behind in pairwise(rows):
            if row.at + row.flat.tensor.numel() > behind.at:
                raise StateError(
                    f"{where}: two Flats overlap in parameter {number} of the optimizer, that with "
                    f"{next(iter(row.flat.shapes))} and that with {next(iter(behind.flat.shapes))}"
                )
    groups = [
        tuple(row for each in group["params"] for row in found[each])
        for group in optimizer.param_groups
    ]
    return RowOptimizer(optimizer, tuple(groups))


def _start_in(parameter: torch.Tensor, tensor: torch.Tensor) -> int | None:
    """At which element of a parameter a tensor starts that lies in it."""
    if tensor is parameter:
        return 0
    if parameter.untyped_storage()._cdata != tensor.untyped_storage()._cdata:
        return None
    at = int(tensor.storage_offset()) - int(parameter.storage_offset())
    return at if at >= 0 and at + tensor.numel() <= parameter.numel() else None
