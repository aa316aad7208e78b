"""Masters: where a load takes a module's parameter from, and what rows are filled with.

A master is stored where it has another dtype than the parameter that is made of it. Where one is
stored, it is the value, and the parameter a copy of it with fewer bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ucpstore.describe.kinds import array_path, children
from ucpstore.describe.modules.named import Named
from ucpstore.describe.reads.reads import Reads
from ucpstore.describe.tensors.plain import dtype_name
from ucpstore.tree.nodes import MAPPINGS, Node, items_of, pairs_of, tag_of


@dataclass(slots=True, eq=False)
class Masters:
    """The masters of a checkpoint by parameter of the target.

    `derived` are the parameters that have a master in the target, of which they are a copy.
    """

    saved: dict[torch.Tensor, Node] = field(default_factory=dict)
    derived: set[torch.Tensor] = field(default_factory=set)

    def source(self, weight: torch.Tensor, node: Node, reads: Reads, where: str) -> Node:
        """The node to read a parameter from: `node`, the module's own, or that of its master."""
        master = self.saved.get(weight)
        path = array_path(node)
        if master is None or path is None:
            return node
        wanted = dtype_name(weight.dtype, where)
        exact = reads.info(array_path(master)).dtype == wanted
        if reads.info(path).dtype != wanted and (exact or weight in self.derived):
            return master
        return node


def saved_entries(module: Named, tree: Node) -> Mapping[str, Node]:
    """The nodes of a saved module's entries by name; none where it was not saved as a dict."""
    node: Node = tree
    for key in module.keys:
        if isinstance(node, list) or tag_of(node) == "tuple":
            items = items_of(node)
            node = items[key] if isinstance(key, int) and key < len(items) else None
        else:
            node = children(node).get(key)
    if tag_of(node) not in MAPPINGS:
        return {}
    return {str(name): child for name, child in pairs_of(node)}


def ties(entries: Mapping[str, Node]) -> dict[str, str]:
    """For each tied name of a saved module the name that its optimizer states have."""
    names = {array_path(child): name for name, child in entries.items() if tag_of(child) == "array"}
    return {
        name: names[array_path(child)]
        for name, child in entries.items()
        if tag_of(child) == "link" and array_path(child) in names
    }
