"""Kinds of nodes, as both sides ask for them."""

from __future__ import annotations

import torch

from ucpstore.tree.decode import decode
from ucpstore.tree.nodes import MAPPINGS, Node, items_of, pairs_of, short, tag_of

DICTS = ("dict", "ordered_dict")
"""Tags of dicts that a dict or a module of the target is filled from."""

_ARRAYS = ("array", "link")
_NAMED = {
    "array": "a tensor",
    "link": "a tensor",
    "scalar": "a 0-d tensor",
    "dict": "a dict",
    "tuple": "a tuple",
    "optimizer": "an optimizer",
    "per_rank": "a value per rank",
}
_ELSEWHERE = frozenset({"array", "link", "scalar", "per_rank", "optimizer"})


def array_path(node: Node) -> str | None:
    """The path of the array that a node stands for, its own or that of a tied name."""
    if isinstance(node, dict):
        for tag in _ARRAYS:
            if tag in node:
                return str(node[tag])
    return None


def is_scalar(node: Node) -> bool:
    """Whether a node is a 0-d tensor that lies in the tree."""
    return tag_of(node) == "scalar"


def only_values(node: Node) -> bool:
    """Whether a node holds nothing but Python values: no tensors, optimizers, per-rank values."""
    tag = tag_of(node)
    if tag in _ELSEWHERE:
        return False
    if tag in MAPPINGS:
        return all(only_values(item) for _, item in pairs_of(node))
    if tag in ("tuple", "deque") or isinstance(node, list):
        return all(only_values(item) for item in items_of(node))
    return True


def what(node: Node) -> str:
    """What a node holds, for messages."""
    if isinstance(node, list):
        return "a list"
    tag = tag_of(node)
    if tag is None:
        return f"the value {node!r}"
    return _NAMED.get(tag, f"a value of kind {tag}")


def saved_scalar(node: Node) -> torch.Tensor:
    """The 0-d CPU tensor in a node."""
    value = decode(node)
    assert isinstance(value, torch.Tensor)
    return value


def told(node: Node) -> str:
    """A value that lies in the tree, for messages."""
    return str(saved_scalar(node).item()) if is_scalar(node) else short(node)


def children(node: Node) -> dict[object, Node]:
    """The nodes in that of a dict, by their keys."""
    return {decode(key): child for key, child in pairs_of(node)}
