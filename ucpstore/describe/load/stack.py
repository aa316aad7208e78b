"""Parameters of the target's optimizer that are stored as one array, and so are their states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from ucpstore.describe.kinds import array_path
from ucpstore.describe.load.states import Destination, StateTarget, Steps
from ucpstore.describe.optimizers.keys import is_copy
from ucpstore.describe.optimizers.owned import Owned
from ucpstore.describe.place import Owner
from ucpstore.describe.reads.build import Thunk
from ucpstore.describe.reads.fresh import fresh_dtype
from ucpstore.describe.tensors.stacks import hold_stack
from ucpstore.tree.nodes import Node

Thunks = dict[torch.Tensor, dict[str, Thunk]]
"""How to get the states of each parameter."""


@dataclass(frozen=True, slots=True, eq=False)
class StackTarget:
    """The layers of one stack; what is one value for a parameter, as `step`, each of them gets."""

    into: Destination
    owned: Owned
    steps: Steps

    def match(self, states: Mapping[str, Node]) -> Thunks:
        """How to get each state of each layer, once all reads are done; nothing changes."""
        thunks: Thunks = {parameter: {} for _, parameter in self.owned.layers}
        for key, node in states.items():
            match = self._match_values if array_path(node) is None else self._match_array
            self.into.reads.differences.attempt(match, thunks, key, node)
        return thunks

    def _match_values(self, thunks: Thunks, key: str, node: Node) -> None:
        for full_name, parameter in self.owned.layers:
            owner = Owner(parameter, str(self.owned.name), full_name)
            layer = StateTarget(self.into, owner, self.into.now(parameter), self.steps)
            layer.match_one(thunks[parameter], key, node)

    def _match_array(self, thunks: Thunks, key: str, node: Node) -> None:
        reads, place = self.into.reads, self.into.at(key, self.owned.name)
        found: list[torch.Tensor] = []
        for _, parameter in self.owned.layers:
            now = self.into.now(parameter).get(key)
            if isinstance(now, torch.Tensor) and not reads.claims.has(now):
                found.append(now)
            else:
                dtype = fresh_dtype(reads, node, place, parameter.dtype)
                self.into.narrow.note(key, dtype, parameter)
                found.append(torch.zeros_like(parameter.detach(), dtype=dtype))
        names = [full_name for full_name, _ in self.owned.layers]
        held = hold_stack(found, names, reads.ranks, place.shown)
        held = replace(held, scale=held.scale if is_copy(self.into.optimizer, key) else 1)
        reads.stack(held, found, node, place)
        for (_, parameter), tensor in zip(self.owned.layers, found, strict=True):
            thunks[parameter][key] = partial(_itself, tensor)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
