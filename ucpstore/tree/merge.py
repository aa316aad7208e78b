"""One tree from the trees of all ranks.

Ranks may hold different parts of a dict, as pipeline stages do; what several ranks hold must be
the same on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ucpstore.errors import StateError
from ucpstore.format.documents import canonical
from ucpstore.tree import optimizer
from ucpstore.tree.nodes import (
    MAPPINGS,
    Node,
    items_of,
    key_shown,
    pairs_of,
    rebuild,
    same,
    short,
    shown,
    tag_of,
)

Ranked = tuple[int, Node]


def merge(nodes: Sequence[Ranked], path: str = "") -> Node:
    """The union of (rank, tree) pairs, ranks rising; `path` is what messages begin with.

    Dicts are united key by key, in the order of the first rank that has a key. Lists and tuples
    must have the same length and are merged element by element, optimizers by their own rule.
    Every other value must be equal on all ranks that have it, or StateError names the path, two
    ranks and their values. Values of `PerRank` are equal by construction: their node only says
    where the values of all ranks lie.
    """
    first_rank, first = nodes[0]
    if len(nodes) == 1:
        return first
    # Most ranks have equal trees: comparing bytes is far cheaper than walking.
    if all(same(first, node) for _, node in nodes[1:]):
        return first
    kind = _kind(first)
    for rank, node in nodes[1:]:
        if _kind(node) != kind:
            raise _unequal(path, (first_rank, first), (rank, node))
    if kind in ("dict", "ordered_dict"):
        return _merge_dicts(nodes, path, kind)
    if kind in ("list", "tuple", "deque"):
        return _merge_lists(nodes, path)
    if kind == "optimizer":
        opened = [(rank, optimizer.from_node(node)) for rank, node in nodes]
        return optimizer.to_node(optimizer.merge(opened, path, merge))
    for rank, node in nodes[1:]:
        if not _equal_leaves(first, node, kind):
            raise _unequal(path, (first_rank, first), (rank, node))
    return first


def _kind(node: Node) -> str:
    if isinstance(node, list):
        return "list"
    return tag_of(node) or "value"


def _merge_dicts(nodes: Sequence[Ranked], path: str, kind: str) -> Node:
    keys: dict[bytes, tuple[Node, list[Ranked]]] = {}
    for rank, node in nodes:
        for key, child in pairs_of(node):
            keys.setdefault(canonical(key), (key, []))[1].append((rank, child))
    return {kind: [[key, merge(held, shown(path, key_shown(key)))] for key, held in keys.values()]}


def _merge_lists(nodes: Sequence[Ranked], path: str) -> Node:
    first_rank, first = nodes[0]
    length = len(items_of(first))
    for rank, node in nodes[1:]:
        found = len(items_of(node))
        if found != length:
            raise StateError(
                f"{path}: rank {first_rank} has {length} elements, rank {rank} has {found}; "
                f"make the lists equally long, or use a dict with different keys; {_ADVICE}"
            )
        if not same(rebuild(node, [None] * found), rebuild(first, [None] * found)):
            raise _unequal(path, (first_rank, first), (rank, node))
    rows = [items_of(node) for _, node in nodes]
    return rebuild(
        first,
        [
            merge(
                [(rank, row[at]) for (rank, _), row in zip(nodes, rows, strict=True)],
                shown(path, str(at)),
            )
            for at in range(length)
        ],
    )


def _equal_leaves(left: Node, right: Node, kind: str) -> bool:
    # A Counter is one value, but the order of its keys is none of it.
    if kind not in MAPPINGS:
        return same(left, right)
    return sorted(map(canonical, pairs_of(left))) == sorted(map(canonical, pairs_of(right)))


def _unequal(path: str, left: Ranked, right: Ranked) -> StateError:
    return StateError(
        f"{path}: rank {left[0]} has {short(left[1])}, rank {right[0]} has {short(right[1])}; "
        f"{_ADVICE}"
    )


_ADVICE = (
    "a value that differs between ranks must be wrapped in PerRank, "
    "and every other made equal on all ranks"
)
