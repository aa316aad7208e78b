"""The keys of a module's entries in the tree: their names, or those that rules give them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ucpstore.describe.modules.entries import Entry
from ucpstore.describe.place import Place
from ucpstore.describe.ranks import Ranks
from ucpstore.describe.tensors.memory import memory_of
from ucpstore.describe.tensors.stacks import layer_of
from ucpstore.errors import StateError


def keys_of(found: Sequence[Entry], place: Place, ranks: Ranks) -> dict[str, Entry]:
    """The entries of the module at `place` by their keys in the tree, which rules may rename."""
    keys: dict[str, Entry] = {}
    stacks: dict[str, list[tuple[int, Entry]]] = {}
    for entry in found:
        full_name = place.full(entry.name)
        key = place.inside(ranks.key(full_name), entry.name)
        layer = None if entry.tensor is None else layer_of(full_name, ranks)
        if layer is not None and (key in stacks or key not in keys):
            keys.setdefault(key, entry)
            stacks.setdefault(key, []).append((layer[1], entry))
            continue
        if key in keys:
            raise StateError(
                f"{place.full(entry.name)} and {place.full(keys[key].name)}: rules give both the "
                f"name {place.full(key)}; give each a name of its own"
            )
        keys[key] = entry
    for key, layers in stacks.items():
        layers.sort(key=lambda each: each[0])
        entries = tuple(entry for _, entry in layers)
        keys[key] = replace(entries[0], layers=entries)
    _check_ties([entry for each in stacks.values() for _, entry in each], found, place)
    return keys


def _check_ties(layers: Sequence[Entry], found: Sequence[Entry], place: Place) -> None:
    """Refuse a layer of a stack that is tied to another tensor of its module."""
    if not layers:
        return
    names: dict[object, str] = {}
    stacked = {entry.name for entry in layers}
    for entry in found:
        if entry.tensor is None:
            continue
        key = memory_of(entry.tensor) or id(entry.tensor)
        other = names.setdefault(key, entry.name)
        if other != entry.name and {other, entry.name} & stacked:
            raise StateError(
                f"{place.full(entry.name)} is tied to {place.full(other)}, and a rule stacks "
                "one of them; layers of a stack have memory of their own: untie them, or store "
                "them by themselves"
            )
