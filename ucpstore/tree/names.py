"""Names of what a tree holds, as a user asks for it: keys joined by `/`, as in Zarr paths."""

from __future__ import annotations

from collections.abc import Iterator

from ucpstore.errors import FormatError, StateError
from ucpstore.format.documents import expect
from ucpstore.tree import optimizer
from ucpstore.tree.nodes import Node, body_of, children, key_shown, pairs_of, short, tag_of


def top_level(tree: Node) -> dict[str, Node]:
    """The items of a step's tree by name."""
    if tag_of(tree) not in ("dict", "ordered_dict"):
        raise FormatError(
            f"the tree of a step must be a dict of items, but it is {short(tree)}; "
            "it was written by something else, or by a newer ucpstore"
        )
    return {key_shown(key): node for key, node in pairs_of(tree)}


def array_names(node: Node) -> dict[str, str]:
    """Paths of the arrays of an item by name; of tied tensors every name is there.

    An item that is an array has the empty name. States of an optimizer are named
    `<state>/<parameter>`, as their folders are.
    """
    return {name: path for name, path, _ in _arrays(node, "")}


def check_paths(tree: Node) -> None:
    """Raise StateError where two names of a merged tree have the same array path.

    One rank never makes such paths; two can, where one has the key 1 and another the key "1".
    """
    seen: set[str] = set()
    for name, path, tied in _arrays(tree, ""):
        if tied:  # its array may come later, from another rank
            continue
        if path in seen:
            raise StateError(
                f"{name}: keys of different types that read the same, held by different ranks, "
                f"would both be stored at {path}; use keys of one type on all ranks"
            )
        seen.add(path)


def _arrays(node: Node, name: str) -> Iterator[tuple[str, str, bool]]:
    """(name, path, whether it is a tied name) of every array."""
    tag = tag_of(node)
    if tag in ("array", "link"):
        yield name, expect(body_of(node), str, "the path of an array"), tag == "link"
    elif tag == "optimizer":
        opened = optimizer.from_node(node)
        states = sorted({state for each in opened.states.values() for state in each})
        for state in states:
            for parameter, values in opened.states.items():
                if state in values:
                    yield from _arrays(values[state], _joined(name, f"{state}/{parameter}"))
    else:
        for key, child in children(node):
            yield from _arrays(child, _joined(name, key))


def _joined(name: str, key: str) -> str:
    return f"{name}/{key}" if name else key
