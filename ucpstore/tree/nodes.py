"""Nodes: the JSON form of Python values that the tree is made of.

A node is null, a boolean, a number, a string, a list of nodes, or an object with exactly one key,
its tag. This module knows which parts of a tagged node are nodes again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ucpstore.errors import FormatError
from ucpstore.format.documents import Json, canonical

Node = Json

MAX_DEPTH: Final = 100
"""How deep containers may nest."""

MAPPINGS: Final = frozenset({"dict", "ordered_dict", "counter"})
SEQUENCES: Final = frozenset({"tuple", "set", "frozenset"})


def tag_of(node: Node) -> str | None:
    """The tag of a tagged node; None for plain JSON. FormatError for an object of other keys."""
    if not isinstance(node, dict):
        return None
    if len(node) != 1:
        raise FormatError(
            f"a node of the tree must have one tag, but has {sorted(node)}; "
            "it was written by something else, or by a newer ucpstore"
        )
    return next(iter(node))


def body_of(node: Node) -> Node:
    """What stands under the tag of a tagged node; None for plain JSON."""
    tag = tag_of(node)
    return node[tag] if isinstance(node, dict) and tag is not None else None


def pairs_of(node: Node) -> list[tuple[Node, Node]]:
    """The (key, value) pairs of a node tagged as a mapping."""
    body = body_of(node)
    if not isinstance(body, list):
        raise _misshapen(node)
    found = []
    for pair in body:
        if not isinstance(pair, list) or len(pair) != 2:
            raise _misshapen(node)
        found.append((pair[0], pair[1]))
    return found


def items_of(node: Node) -> list[Node]:
    """The elements of a node that holds a sequence: a list, tuple, set or deque."""
    if isinstance(node, list):
        return node
    body = body_of(node)
    if isinstance(body, dict):
        body = body.get("items")
    if not isinstance(body, list):
        raise _misshapen(node)
    return body


def children(node: Node) -> list[tuple[str, Node]]:
    """The nodes directly inside a container with what to show as their names; else nothing."""
    if isinstance(node, list):
        return [(str(index), child) for index, child in enumerate(node)]
    tag = tag_of(node)
    if tag in MAPPINGS:
        return [(key_shown(key), child) for key, child in pairs_of(node)]
    if tag in SEQUENCES or tag == "deque":
        return [(str(index), child) for index, child in enumerate(items_of(node))]
    return []


def rebuild(node: Node, parts: Sequence[Node]) -> Node:
    """The container with other nodes in the place of its `children`."""
    if isinstance(node, list):
        return list(parts)
    tag = tag_of(node)
    if tag in MAPPINGS:
        pairs = pairs_of(node)
        return {tag: [[key, part] for (key, _), part in zip(pairs, parts, strict=True)]}
    if tag in SEQUENCES:
        return {tag: list(parts)}
    if tag == "deque":
        body = body_of(node)
        return {tag: {**body, "items": list(parts)}} if isinstance(body, dict) else node
    return node


def key_shown(key: Node) -> str:
    """What a message shows for a dict key."""
    return key if isinstance(key, str) else canonical(key).decode("ascii")


def shown(path: str, name: str) -> str:
    """The display path of a child: keys as the user wrote them, joined with dots."""
    return f"{path}.{name}" if path else name


def short(node: Node, limit: int = 80) -> str:
    """A node for a message, cut to about `limit` characters."""
    text = canonical(node).decode("ascii")
    return text if len(text) <= limit else text[:limit] + "..."


def same(left: Node, right: Node) -> bool:
    """Whether two nodes are the same bytes; unlike `==`, 1, 1.0 and True differ, 0.0 and -0.0."""
    if left is right:
        return True
    # == is quick to say no; True == 1 and the like need the bytes.
    return left == right and canonical(left) == canonical(right)


def walk(node: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    """(display path, node) of every leaf, in order; empty containers are leaves.

    A node tagged `optimizer` is one leaf: `ucpstore.tree.optimizer.leaves` opens it.
    """
    inside = children(node)
    if not inside:
        yield path, node
    for name, child in inside:
        yield from walk(child, shown(path, name))


def _misshapen(node: Node) -> FormatError:
    return FormatError(
        f"a node of the tree has another form than its tag promises: {short(node)}; "
        "it was written by something else, or by a newer ucpstore"
    )
