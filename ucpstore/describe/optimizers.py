"""Optimizers on the save side: states by parameter name, hyper-parameters by group.

Only `param_groups` and `state` are read. Nothing is stepped, created, moved or cast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from ucpstore.describe.naming import Name, Named, names_of
from ucpstore.describe.place import Owner, Place
from ucpstore.errors import StateError, UnsupportedError
from ucpstore.tree.nodes import Node
from ucpstore.tree.optimizer import Group, OptimizerNode, to_node

FROZEN = "requires_grad"
"""State that is stored, as false, for a parameter that is frozen. It is no state of the optimizer:
load tells a parameter that was frozen from one that never had a gradient by it."""

IDENTITY = ("params", "param_names")
"""Keys of a group that say which parameters it has; never stored."""


class Walk(Protocol):
    """The save walk, as far as an optimizer needs it."""

    def value(self, value: object, place: Place, owner: Owner | None = None) -> Node:
        """The node of any value; tensors of the shape of the owner have its dimension names."""


def optimizer_node(
    optimizer: torch.optim.Optimizer, modules: Sequence[Named], place: Place, walk: Walk
) -> Node:
    """The node of an optimizer; its tensors go to `<path>/<state name>/<parameter name>`."""
    names = names_of(optimizer, modules, place.shown)
    states: dict[str, Mapping[str, Node]] = {}
    for parameter, name in names.items():
        stored = _states(optimizer.state.get(parameter, {}), parameter, name, place, walk)
        if not parameter.requires_grad:
            stored[FROZEN] = False
        if stored:
            states[str(name)] = stored
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        at = place.child("param_groups", ()).child(index, ())
        values = {
            key: walk.value(value, at.child(key, ()))
            for key, value in group.items()
            if key not in IDENTITY
        }
        members = tuple(str(names[parameter]) for parameter in group["params"])
        groups.append(Group(index, members, values))
    extra = _extra(optimizer, names, place, walk)
    return to_node(OptimizerNode(place.path, tuple(groups), states, extra))


def _states(
    state: Mapping[str, object], parameter: torch.Tensor, name: Name, place: Place, walk: Walk
) -> dict[str, Node]:
    owner = Owner(parameter, str(name), name.module.full_name(parameter))
    stored = {}
    for key, value in state.items():
        if not isinstance(key, str):
            raise UnsupportedError(
                f"{place.shown}: the optimizer keeps a state of {name} under the key {key!r}; "
                "names of states must be strings"
            )
        stored[key] = walk.value(value, place.child(key, ()).child(str(name), ()), owner)
    return stored


def _extra(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, Name], place: Place, walk: Walk
) -> dict[str, Node]:
    extra: dict[str, Node] = {}
    for key, value in optimizer.state.items():
        if isinstance(key, str):
            extra[key] = walk.value(value, place.child("extra", ()).child(key, ()))
        elif key not in names:
            shape = tuple(key.shape) if isinstance(key, torch.Tensor) else key
            raise StateError(
                f"{place.shown}: the optimizer has state for a parameter of shape {shape} that is "
                "in none of its groups; remove it from optimizer.state, or add the parameter to a "
                "group"
            )
    return extra
