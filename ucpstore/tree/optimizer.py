"""The optimizer node: hyper-parameters and states by parameter name, free of group positions.

In memory an `OptimizerNode` has its groups and, for every parameter name, its states. Stored, each
name is written once, and parameters whose states are equal share one entry:

    {"optimizer": {
        "path": "optim",
        "names": ["a", "b", "c"],
        "groups": [{"index": 0, "members": [[0, 3]], "values": [["lr", 0.1]]}],
        "states": [{"members": [[0, 2]], "values": [["step", {"scalar": ...}],
                                                   ["exp_avg", {"array": ""}]]}],
        "extra": []
    }}

`members` are runs `[first, count]` of positions in `names`. An array with the empty path lies
where states lie by rule, at `<path>/<state name>/<parameter name>` with the last two escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ucpstore.errors import FormatError, StateError
from ucpstore.format.documents import canonical, expect
from ucpstore.format.paths import escape, join
from ucpstore.tree.nodes import Node, short, shown, walk

MergeNodes = Callable[[Sequence[tuple[int, Node]], str], Node]
"""Merge the nodes of ranks at a display path; `ucpstore.tree.merge` gives it."""

_BY_RULE: Node = {"array": ""}


@dataclass(frozen=True, slots=True)
class Group:
    """One parameter group: its place in the list, its parameters in order, its values.

    `values` holds every key of the group but `params` and `param_names`. A group without
    parameters keeps its index and values.
    """

    index: int
    names: tuple[str, ...]
    values: Mapping[str, Node]


@dataclass(frozen=True, slots=True)
class OptimizerNode:
    """An optimizer: `path` of its item, groups, and states by parameter and state name.

    `extra` holds whatever else the optimizer's state has at its top level.
    """

    path: str
    groups: tuple[Group, ...]
    states: Mapping[str, Mapping[str, Node]]
    extra: Mapping[str, Node] = field(default_factory=dict)


def state_path(path: str, state: str, name: str) -> str:
    """Where the array of one state of one parameter lies by rule."""
    return join(path, escape(state), escape(name))


def to_node(optimizer: OptimizerNode) -> Node:
    """The stored form."""
    positions: dict[str, int] = {}
    for group in optimizer.groups:
        for name in group.names:
            positions.setdefault(name, len(positions))
    for name in optimizer.states:
        positions.setdefault(name, len(positions))
    sets: dict[bytes, tuple[list[Node], list[int]]] = {}
    for name, states in optimizer.states.items():
        values: list[Node] = [
            [
                state,
                _BY_RULE if node == {"array": state_path(optimizer.path, state, name)} else node,
            ]
            for state, node in states.items()
        ]
        members = sets.setdefault(canonical(values), (values, []))[1]
        members.append(positions[name])
    return {
        "optimizer": {
            "path": optimizer.path,
            "names": list(positions),
            "groups": [
                {
                    "index": group.index,
                    "members": _runs([positions[name] for name in group.names]),
                    "values": _pairs(group.values),
                }
                for group in optimizer.groups
            ],
            "states": [
                {"members": _runs(members), "values": values} for values, members in sets.values()
            ],
            "extra": _pairs(optimizer.extra),
        }
    }


def from_node(node: Node) -> OptimizerNode:
    """The optimizer of a node tagged `optimizer`; FormatError where its form is another."""
    body = _object(node, ("optimizer",))["optimizer"]
    body = _object(body, ("path", "names", "groups", "states", "extra"))
    path = expect(body["path"], str, "the path of an optimizer")
    names = [expect(name, str, "a parameter name") for name in _list(body["names"])]
    groups = []
    for item in _list(body["groups"]):
        entry = _object(item, ("index", "members", "values"))
        index = expect(entry["index"], int, "the index of a parameter group")
        members = tuple(names[at] for at in _positions(entry["members"], len(names)))
        groups.append(Group(index, members, _mapping(entry["values"])))
    found: dict[int, dict[str, Node]] = {}
    for item in _list(body["states"]):
        entry = _object(item, ("members", "values"))
        values = _mapping(entry["values"])
        for at in _positions(entry["members"], len(names)):
            found[at] = {
                state: {"array": state_path(path, state, names[at])} if value == _BY_RULE else value
                for state, value in values.items()
            }
    states = {names[at]: found[at] for at in sorted(found)}
    return OptimizerNode(path, tuple(groups), states, _mapping(body["extra"]))


def leaves(optimizer: OptimizerNode, path: str = "") -> Iterator[tuple[str, Node]]:
    """(display path, node) of every leaf: values of groups, states of parameters, extras."""
    for group in optimizer.groups:
        for key, node in group.values.items():
            yield from walk(node, shown(path, f"param_groups.{group.index}.{key}"))
    for name, states in optimizer.states.items():
        for state, node in states.items():
            yield from walk(node, shown(path, f"{state}.{name}"))
    for key, node in optimizer.extra.items():
        yield from walk(node, shown(path, key))


def merge(
    optimizers: Sequence[tuple[int, OptimizerNode]], shown_path: str, merge_nodes: MergeNodes
) -> OptimizerNode:
    """One optimizer from those of several ranks, given as (rank, optimizer).

    Names are united. Groups of the same index and equal values become one, others stay apart. Per
    parameter the states are united, and those that several ranks have must agree. Raises
    StateError, naming path, ranks and values, where a parameter is in groups of different values,
    or where ranks have different groups without parameters at the same index.
    """
    first_rank, first = optimizers[0]
    for rank, other in optimizers[1:]:
        if other.path != first.path:
            raise StateError(
                f"{shown_path}: rank {first_rank} keeps this optimizer at {first.path!r}, "
                f"rank {rank} at {other.path!r}; save it under the same key on every rank"
            )
    states: dict[str, dict[str, list[tuple[int, Node]]]] = {}
    extra: dict[str, list[tuple[int, Node]]] = {}
    for rank, optimizer in optimizers:
        for name, held in optimizer.states.items():
            for state, node in held.items():
                states.setdefault(name, {}).setdefault(state, []).append((rank, node))
        for key, node in optimizer.extra.items():
            extra.setdefault(key, []).append((rank, node))
    return OptimizerNode(
        first.path,
        _merge_groups(optimizers, shown_path),
        {
            name: {
                state: merge_nodes(nodes, shown(shown_path, f"{state}.{name}"))
                for state, nodes in held_by.items()
            }
            for name, held_by in states.items()
        },
        {key: merge_nodes(nodes, shown(shown_path, key)) for key, nodes in extra.items()},
    )


@dataclass(frozen=True, slots=True)
class _Seen:
    """The group that a parameter, or an index without parameters, was first seen in."""

    rank: int
    group: Group
    key: tuple[int, bytes]


def _merge_groups(
    optimizers: Sequence[tuple[int, OptimizerNode]], shown_path: str
) -> tuple[Group, ...]:
    merged: dict[tuple[int, bytes], tuple[Group, dict[str, None]]] = {}
    of_name: dict[str, _Seen] = {}
    empty: dict[int, _Seen] = {}
    for rank, optimizer in optimizers:
        for group in optimizer.groups:
            key = (group.index, canonical(sorted(group.values.items())))
            names = merged.setdefault(key, (group, {}))[1]
            here = _Seen(rank, group, key)
            for name in group.names:
                names[name] = None
                seen = of_name.setdefault(name, here)
                if seen.key != key:
                    raise _disagree(f"{shown_path}: parameter {name}", seen, here)
            if not group.names:
                seen = empty.setdefault(group.index, here)
                if seen.key != key:
                    where = f"{shown_path}: param_groups.{group.index}, which has no parameters"
                    raise _disagree(where, seen, here)
    groups = [Group(group.index, tuple(names), group.values) for group, names in merged.values()]
    return tuple(sorted(groups, key=lambda group: group.index))


def _disagree(where: str, left: _Seen, right: _Seen) -> StateError:
    if left.group.index != right.group.index:
        difference = (
            f"is in group {left.group.index} on rank {left.rank}, "
            f"in group {right.group.index} on rank {right.rank}"
        )
    else:
        keys = [*left.group.values, *(k for k in right.group.values if k not in left.group.values)]
        key = next(
            key
            for key in keys
            if canonical(left.group.values.get(key)) != canonical(right.group.values.get(key))
            or (key in left.group.values) != (key in right.group.values)
        )
        difference = (
            f"has {key} = {_value(left, key)} on rank {left.rank}, "
            f"{_value(right, key)} on rank {right.rank}"
        )
    return StateError(f"{where}: {difference}; give every rank the same groups and values")


def _value(seen: _Seen, key: str) -> str:
    return short(seen.group.values[key]) if key in seen.group.values else "no such key"


def _runs(positions: Sequence[int]) -> list[Node]:
    """Positions as runs `[first, count]` of following numbers, in the order given."""
    runs: list[list[int]] = []
    for at in positions:
        if runs and at == runs[-1][0] + runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([at, 1])
    return [list[Node](run) for run in runs]


def _positions(runs: Node, count: int) -> Iterator[int]:
    for item in _list(runs):
        run = [expect(number, int, "a run of parameter names") for number in _list(item)]
        if len(run) != 2 or run[0] < 0 or run[1] < 1 or sum(run) > count:
            raise FormatError(f"{run} is no run [first, count] of {count} parameter names")
        yield from range(run[0], run[0] + run[1])


def _pairs(values: Mapping[str, Node]) -> list[Node]:
    return [[key, node] for key, node in values.items()]


def _mapping(pairs: Node) -> dict[str, Node]:
    found: dict[str, Node] = {}
    for item in _list(pairs):
        pair = _list(item)
        if len(pair) != 2:
            raise FormatError(f"{short(item)} is no pair [key, node] of an optimizer node")
        found[expect(pair[0], str, "a key of an optimizer node")] = pair[1]
    return found


def _list(node: Node) -> list[Node]:
    return expect(node, list, "a part of an optimizer node")


def _object(node: Node, keys: tuple[str, ...]) -> dict[str, Node]:
    body: dict[str, Node] = expect(node, dict, "an optimizer node or a part of it")
    if set(body) != set(keys):
        raise FormatError(
            f"a part of an optimizer node should have the keys {', '.join(keys)}, but has "
            f"{', '.join(sorted(body))}; it was written by a newer ucpstore"
        )
    return body
