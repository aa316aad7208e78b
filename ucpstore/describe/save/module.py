"""Modules on the save side: a dict of their entries, by the keys that rules may give them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ucpstore.describe.kinds import array_path
from ucpstore.describe.modules.entries import Entry, entries
from ucpstore.describe.modules.keys import keys_of
from ucpstore.describe.place import Place
from ucpstore.describe.save.protocol import Walk
from ucpstore.describe.tensors.stacks import hold_stack
from ucpstore.tree.encode import encode
from ucpstore.tree.nodes import Node
from ucpstore.wrappers import EXTRA_STATE


def module_node(module: nn.Module, place: Place, walk: Walk) -> Node:
    """The node of a module: a dict of its entries; tied ones are links to the first."""
    found = keys_of(entries(module, place.shown), place, walk.ranks)
    pairs: list[Node] = []
    for key, entry in found.items():
        inside = place.child(key, found)
        if entry.tensor is not None:
            node = _entry(entry, entry.tensor, inside, place, walk)
        else:
            assert entry.extra_of is not None
            node = walk.value(entry.extra_of.get_extra_state(), inside)
        pairs.append([key, node])
    return {"dict": pairs}


def module_dict_node(values: Mapping[object, object], place: Place, walk: Walk) -> Node:
    """What `module.state_dict()` returned: the same node as that of the module."""
    pairs: list[Node] = []
    for key, value in values.items():
        inside = place.child(key, values)
        if isinstance(value, torch.Tensor) and not str(key).endswith(EXTRA_STATE):
            node = walk.arrays.array(value, inside)
        else:
            node = walk.value(value, inside)
        pairs.append([encode(key, place.shown), node])
    return {"dict": pairs}


def _entry(entry: Entry, tensor: torch.Tensor, inside: Place, module: Place, walk: Walk) -> Node:
    if entry.layers:
        return _stacked(entry, inside, module, walk)
    full_name = module.full(entry.name)
    stored = walk.ranks.stored(full_name)
    tied = stored != walk.ranks.key(full_name)
    at = module.child(module.inside(stored, entry.name), ()) if tied else inside
    identity = ("identity", id(tensor))
    node = walk.arrays.array(tensor, at, identity=identity, full_name=full_name)
    return {"link": at.path} if tied and array_path(node) == at.path else node


def _stacked(stack: Entry, inside: Place, module: Place, walk: Walk) -> Node:
    tensors = [entry.tensor for entry in stack.layers if entry.tensor is not None]
    names = [module.full(entry.name) for entry in stack.layers]
    held = hold_stack(tensors, names, walk.ranks, inside.shown)
    return walk.arrays.part(held, inside, inside.name)
