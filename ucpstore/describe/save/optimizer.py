"""Optimizers on the save side: states by parameter name, hyper-parameters by group.

Only `param_groups` and `state` are read. Nothing is stepped, created, moved or cast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from ucpstore.describe.kinds import told
from ucpstore.describe.optimizers.keys import FROZEN, IDENTITY, MASTER, is_copy
from ucpstore.describe.optimizers.owned import Holding, Owned
from ucpstore.describe.place import Owner, Place
from ucpstore.describe.save.protocol import Walk
from ucpstore.describe.tensors.stacks import hold_stack
from ucpstore.errors import StateError, UnsupportedError
from ucpstore.tree.nodes import Node, same
from ucpstore.tree.optimizer import Group, OptimizerNode, to_node


def optimizer_node(holding: Holding, place: Place, walk: Walk) -> Node:
    """The node of an optimizer; its tensors go to `<path>/<state name>/<parameter name>`."""
    optimizer = holding.optimizer
    states: dict[str, Mapping[str, Node]] = {}
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        for parameter, owned in holding.by_parameter(index).items():
            for each, stored in _states_of(optimizer, parameter, owned, place, walk):
                if not each.trained:
                    stored[FROZEN] = False
                if stored:
                    states[str(each.name)] = stored
        at = place.child("param_groups", ()).child(index, ())
        values = {
            key: walk.value(value, at.child(key, ()))
            for key, value in group.items()
            if key not in IDENTITY
        }
        members = tuple(str(owned.name) for owned in holding.groups[index])
        groups.append(Group(index, members, values))
    extra = _extra(holding, place, walk)
    return to_node(OptimizerNode(place.path, tuple(groups), states, extra))


def _states_of(
    optimizer: torch.optim.Optimizer,
    parameter: torch.Tensor,
    owned: list[Owned],
    place: Place,
    walk: Walk,
) -> list[tuple[Owned, dict[str, Node]]]:
    """The states of each tensor that one parameter of the optimizer holds."""
    if owned[0].layers:
        return [(owned[0], _stacked_states(optimizer, owned[0], place, walk))]
    found: list[tuple[Owned, dict[str, Node]]] = [(each, {}) for each in owned]
    for key, value in optimizer.state.get(parameter, {}).items():
        _check_key(key, owned[0].name, place)
        for each, stored in found:
            inside = place.child(key, ()).child(str(each.name), ())
            if each.hold is None:
                is_state = not is_copy(optimizer, key)
                own = Owner(parameter, str(each.name), each.full_name, is_state, key)
                stored[key] = walk.value(value, inside, own)
            elif isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                stored[key] = walk.arrays.part(
                    each.hold(value, inside.shown), inside, str(each.name)
                )
            else:
                _check_common(key, value, place)
                stored[key] = walk.value(value, inside)
    for each, stored in found:
        if each.hold is not None and (each.weight is None or each.weight.dtype != parameter.dtype):
            inside = place.child(MASTER, ()).child(str(each.name), ())
            stored[MASTER] = walk.arrays.part(
                each.hold(parameter, inside.shown), inside, str(each.name)
            )
    return found


def _stacked_states(
    optimizer: torch.optim.Optimizer, owned: Owned, place: Place, walk: Walk
) -> dict[str, Node]:
    """The states of parameters that are stored as one array, each state as one array too."""
    states = [optimizer.state.get(parameter, {}) for _, parameter in owned.layers]
    first, names = owned.layers[0][0], [name for name, _ in owned.layers]
    for own, name in zip(states, names, strict=True):
        if set(own) != set(states[0]):
            raise StateError(
                f"{place.shown}: layers of the stack {owned.name} must have the same states, but "
                f"{first} has {_listed(states[0])} and {name} has {_listed(own)}; a layer that got "
                "no gradient has none: give it one of zeros, or take one step with all of them"
            )
    stored: dict[str, Node] = {}
    for key in states[0]:
        _check_key(key, first, place)
        inside = place.child(key, ()).child(str(owned.name), ())
        values = [own[key] for own in states]
        if key != "step" and all(
            isinstance(value, torch.Tensor) and value.shape == parameter.shape
            for value, (_, parameter) in zip(values, owned.layers, strict=True)
        ):
            held = hold_stack(values, names, walk.ranks, inside.shown)
            scale = held.scale if is_copy(optimizer, key) else 1
            held = replace(held, alone="", scale=scale)
            stored[key] = walk.arrays.part(held, inside, str(owned.name))
            continue
        if any(isinstance(value, torch.Tensor) and value.dim() for value in values):
            raise StateError(
                f"{inside.shown}: the state {key!r} of layers of a stack has the shape "
                f"{tuple(values[0].shape)}; such states must have the shape of their parameters, "
                f"{tuple(owned.parameter.shape)}, or be 0-d; store the layers by themselves"
            )
        nodes = [walk.value(value, inside) for value in values]
        for node, name in zip(nodes, names, strict=True):
            if not same(node, nodes[0]):
                raise StateError(
                    f"{inside.shown}: a stack has one {key!r}, but {first} has {told(nodes[0])} "
                    f"and {name} has {told(node)}; store layers that differ by themselves"
                )
        stored[key] = nodes[0]
    return stored


def _listed(states: Mapping[str, object]) -> str:
    return ", ".join(map(str, states)) or "none"


def _check_key(key: object, name: object, place: Place) -> None:
    if not isinstance(key, str):
        raise UnsupportedError(
            f"{place.shown}: the optimizer keeps a state of {name} under the key {key!r}; names of "
            "states must be strings"
        )


def _check_common(key: str, value: object, place: Place) -> None:
    """A state of a row that is not one value for each of its elements holds for all its names."""
    if key == MASTER or (isinstance(value, torch.Tensor) and value.dim()):
        shape = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else "no shape"
        raise StateError(
            f"{place.shown}: the state {key!r} of a parameter that is a row of several tensors has "
            f"{shape}, which cannot be told apart by tensor; states must have the shape of the row "
            f"or be 0-d, and none may be called {MASTER!r}"
        )


def _extra(holding: Holding, place: Place, walk: Walk) -> dict[str, Node]:
    extra: dict[str, Node] = {}
    known = {owned.parameter for owned in holding}
    known |= {parameter for owned in holding for _, parameter in owned.layers}
    # Adagrad makes states at once, of what copies then take the place of.
    known |= {owned.weight for owned in holding if owned.weight is not None}
    for key, value in holding.optimizer.state.items():
        if isinstance(key, str):
            extra[key] = walk.value(value, place.child("extra", ()).child(key, ()))
        elif key not in known:
            shape = tuple(key.shape) if isinstance(key, torch.Tensor) else key
            raise StateError(
                f"{place.shown}: the optimizer has state for a parameter of shape {shape} that is "
                "in none of its groups; remove it from optimizer.state, or add the parameter to a "
                "group"
            )
    return extra
