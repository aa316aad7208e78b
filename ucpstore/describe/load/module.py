"""Modules on the load side: parameters and buffers are filled in place, and masters count."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ucpstore.describe.kinds import DICTS, array_path, children, what
from ucpstore.describe.load.masters import Masters
from ucpstore.describe.load.names import compare_names
from ucpstore.describe.modules.entries import Entry, entries
from ucpstore.describe.modules.keys import keys_of
from ucpstore.describe.place import Owner, Place
from ucpstore.describe.reads.build import build
from ucpstore.describe.reads.reads import Reads
from ucpstore.describe.tensors.stacks import hold_stack
from ucpstore.errors import MismatchError
from ucpstore.tree.nodes import Node, tag_of

Restore = tuple[Place, Callable[[], None]]
"""What hands a saved state to an object of the target, and the place that an error names."""


@dataclass(frozen=True, slots=True, eq=False)
class ModuleTarget:
    """One module of the target; `masters` are what its parameters may be read from instead."""

    module: nn.Module
    place: Place
    reads: Reads
    masters: Masters

    def match(self, node: Node) -> list[Restore]:
        """Check everything; what to hand over at the end."""
        place = self.place
        if tag_of(node) not in DICTS:
            raise MismatchError(
                f"{place.shown}: the target is a module, but {what(node)} was saved"
            )
        saved = children(node)
        found = keys_of(entries(self.module, place.shown), place, self.reads.ranks)
        saved |= self._ties(found, saved)
        compare_names(dict.fromkeys(found), saved, place, self.reads.differences)
        self._stack_hint(found, saved)
        restores: list[Restore] = []
        for name, entry in found.items():
            if name in saved:
                inside = place.child(name, found)
                if entry.tensor is not None:
                    self._entry(entry, entry.tensor, saved[name], inside)
                else:
                    self.reads.differences.attempt(
                        self._extra, entry, saved[name], inside, restores
                    )
        return restores

    def _entry(self, entry: Entry, tensor: torch.Tensor, node: Node, inside: Place) -> None:
        if entry.layers:
            self.reads.differences.attempt(self._stacked, entry, node, inside)
            return
        own = Owner(tensor, inside.name, self.place.full(entry.name), is_state=False)
        node = self.masters.source(tensor, node, self.reads, inside.shown)
        self.reads.tensor(tensor, node, inside, own, derived=tensor in self.masters.derived)

    def _stacked(self, stack: Entry, node: Node, inside: Place) -> None:
        tensors = [entry.tensor for entry in stack.layers if entry.tensor is not None]
        names = [self.place.full(entry.name) for entry in stack.layers]
        held = hold_stack(tensors, names, self.reads.ranks, inside.shown)
        node = self.masters.source(tensors[0], node, self.reads, inside.shown)
        self.reads.stack(held, tensors, node, inside, derived=tensors[0] in self.masters.derived)

    def _extra(self, entry: Entry, saved: Node, place: Place, restores: list[Restore]) -> None:
        assert entry.extra_of is not None
        owner = entry.extra_of
        thunk = build(self.reads, saved, place, owner.get_extra_state())
        restores.append((place, lambda: owner.set_extra_state(thunk())))

    def _ties(self, found: Mapping[str, Entry], saved: Mapping[object, Node]) -> dict[object, Node]:
        """What names of a module are loaded from that were saved under the one they are tied to."""
        first = {id(entry.tensor): saved[name] for name, entry in found.items() if name in saved}
        ties: dict[object, Node] = {}
        for name, entry in found.items():
            if name not in saved and entry.tensor is not None:
                stored = self.reads.ranks.stored(self.place.full(entry.name))
                node = saved.get(self.place.inside(stored, entry.name), first.get(id(entry.tensor)))
                if node is not None:
                    ties[name] = node
        return ties

    def _stack_hint(self, found: Mapping[str, Entry], saved: Mapping[object, Node]) -> None:
        """Tell of `stacked` where tensors are missing that are layers of an array that is there."""
        for name, entry in found.items():
            if name in saved or entry.tensor is None:
                continue
            parts = name.split(".")
            for at in (at for at, part in enumerate(parts) if part.isdigit()):
                stack = ".".join((*parts[:at], *parts[at + 1 :]))
                info = self.reads.arrays.get(array_path(saved.get(stack)) or "")
                if stack in found or info is None or len(info.shape) != entry.tensor.dim() + 1:
                    continue
                self.reads.differences.hints.append(
                    f"{self.place.child(name, found).shown}: the checkpoint has "
                    f"{self.place.child(stack, saved).shown} of shape {info.shape}; if that has "
                    "all layers or experts, a rule with stacked loads separate ones from it "
                    "(docs/specification.md)"
                )
                return
