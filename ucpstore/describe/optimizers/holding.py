"""Any optimizer of a state: whether a value is one, and what it holds by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from ucpstore.describe.modules.named import Named
from ucpstore.describe.optimizers.inner import inner_optimizer
from ucpstore.describe.optimizers.names import Name, names_of
from ucpstore.describe.optimizers.owned import Holding, Owned
from ucpstore.describe.optimizers.row_names import holding_of_rows
from ucpstore.describe.optimizers.rows import RowOptimizer, rows_of
from ucpstore.describe.ranks import Ranks
from ucpstore.describe.tensors.stacks import layer_of
from ucpstore.errors import StateError
from ucpstore.flat import FlatOptimizer


def is_optimizer(value: object, where: str) -> bool:
    """Whether a value of the state is stored as an optimizer."""
    rows = isinstance(value, (FlatOptimizer, RowOptimizer))
    return rows or inner_optimizer(value, where) is not None


def holding_of(value: object, modules: Sequence[Named], ranks: Ranks, where: str) -> Holding:
    """What an optimizer of the state holds by name.

    Raises StateError, naming `where`, for parameters that have no name or several.
    """
    if isinstance(value, FlatOptimizer):
        return holding_of_rows(rows_of(value, where), modules, ranks, where)
    if isinstance(value, RowOptimizer):
        return holding_of_rows(value, modules, ranks, where)
    optimizer = inner_optimizer(value, where)
    assert optimizer is not None, "no optimizer"
    names = names_of(optimizer, modules, where)
    groups = tuple(tuple(_owned(g["params"], names, ranks)) for g in optimizer.param_groups)
    _check_stacks(groups, where)
    return Holding(optimizer, groups)


def _owned(
    parameters: Sequence[torch.Tensor], names: Mapping[torch.Tensor, Name], ranks: Ranks
) -> Iterator[Owned]:
    """What one group holds: each parameter, those that rules stack together."""
    found: dict[str, Owned] = {}
    order: dict[str, list[tuple[int, str, torch.Tensor]]] = {}
    for number, each in enumerate(parameters):
        name, full_name = names[each], _full_name(names[each], each)
        layer = layer_of(full_name, ranks)
        key = str(number) if layer is None else f"stack {name}"
        found.setdefault(key, Owned(name, full_name, each, each))
        if layer is not None:
            order.setdefault(key, []).append((layer[1], full_name, each))
    for key, owned in found.items():
        if key not in order:
            yield owned
            continue
        layers = tuple((n, p) for _, n, p in sorted(order[key], key=lambda layer: layer[0]))
        full_name, first = layers[0]
        yield Owned(owned.name, full_name, first, first, layers=layers)


def _check_stacks(groups: Sequence[Sequence[Owned]], where: str) -> None:
    seen: dict[str, tuple[int, Owned]] = {}
    for number, group in enumerate(groups):
        for owned in group:
            if not owned.layers:
                continue
            name = str(owned.name)
            at, other = seen.setdefault(name, (number, owned))
            if at != number:
                raise StateError(
                    f"{where}: {other.full_name} and {owned.full_name} are layers of the stack "
                    f"{name}, but lie in the groups {at} and {number}; put all layers of a stack "
                    "into one group"
                )
            trained = {parameter.requires_grad for _, parameter in owned.layers}
            if len(trained) > 1:
                raise StateError(
                    f"{where}: some layers of the stack {name} are frozen and some are trained, "
                    f"{owned.full_name} among them; freeze all of them or none"
                )


def _full_name(name: Name, parameter: torch.Tensor) -> str:
    assert name.module is not None
    return name.module.full_name(parameter)
