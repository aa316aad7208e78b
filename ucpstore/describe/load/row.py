"""A parameter of the target's optimizer in which several named tensors lie, or a copy of one.

Its states are read into tensors of its own shape, each name into its part. What is one value for
all of its elements, as `step`, must be saved alike for all names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ucpstore.describe.kinds import array_path, is_scalar, told
from ucpstore.describe.load.states import Destination, StateTarget, Steps
from ucpstore.describe.optimizers.keys import FROZEN, MASTER
from ucpstore.describe.optimizers.owned import Owned
from ucpstore.describe.place import Owner, Place
from ucpstore.describe.reads.build import Thunk
from ucpstore.describe.reads.fresh import fresh_dtype
from ucpstore.describe.reads.reads import Reads
from ucpstore.tree.nodes import Node, same


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One name of a row with what was saved of it; `weight` is the node of the parameter.

    `known` is false for a name without saved states, which is told as a whole.
    """

    owned: Owned
    states: Mapping[str, Node]
    weight: Node
    known: bool


@dataclass(frozen=True, slots=True, eq=False)
class RowTarget:
    """One parameter of the optimizer."""

    into: Destination
    parameter: torch.Tensor
    now: Mapping[str, object]
    members: tuple[Member, ...]
    steps: Steps

    @property
    def reads(self) -> Reads:
        return self.into.reads

    def match(self) -> dict[str, Thunk]:
        """How to get each state, once all reads are done; nothing changes."""
        thunks: dict[str, Thunk] = {}
        keys = dict.fromkeys(key for member in self.members for key in member.states)
        for key in keys:
            if key not in (FROZEN, MASTER):
                self.reads.differences.attempt(self._match, thunks, key)
        self.match_masters()
        return thunks

    def _match(self, thunks: dict[str, Thunk], key: str) -> None:
        saved = {member: member.states[key] for member in self.members if key in member.states}
        lacking = [member for member in self.members if member.known and member not in saved]
        self.reads.differences.missing += [self._at(key, member).shown for member in lacking]
        first = next(iter(saved))
        if not self._is_cut(key, saved):
            for member, node in saved.items():
                if not same(node, saved[first]):
                    self.reads.differences.problems.append(
                        f"{self.into.place.shown}: {first.owned.name} and {member.owned.name} lie "
                        f"in one parameter of the target's optimizer, which has one {key!r}, but "
                        f"they were saved with {told(saved[first])} and {told(node)}; put them "
                        "into rows of their own"
                    )
                    return
            owner = Owner(self.parameter, str(first.owned.name), first.owned.full_name)
            common = StateTarget(self.into, owner, self.now, self.steps)
            common.match_one(thunks, key, saved[first])
            return
        now = self.now.get(key)
        if not (
            isinstance(now, torch.Tensor)
            and now.shape == self.parameter.shape
            and not self.reads.claims.has(now)
        ):
            dtype = self._fresh_dtype(key, saved)
            # padding lies between the names
            now = torch.zeros_like(self.parameter.detach(), dtype=dtype)
        self.reads.row(now, self._at(key, first))
        for member, node in saved.items():
            self._fill(now, member, node, self._at(key, member))
        made = now
        thunks[key] = lambda: made

    def _fresh_dtype(self, key: str, saved: Mapping[Member, Node]) -> torch.dtype:
        """The widest that a name of the row asks for."""
        wanted = [
            fresh_dtype(self.reads, node, self._at(key, member), self.parameter.dtype)
            for member, node in saved.items()
            if array_path(node) is not None
        ]
        dtype = max(wanted, key=lambda each: each.itemsize, default=self.parameter.dtype)
        self.into.narrow.note(key, dtype, self.parameter)
        return dtype

    def _is_cut(self, key: str, saved: Mapping[Member, Node]) -> bool:
        """Whether a state has a value for each element of the row."""
        if any(array_path(node) is not None for node in saved.values()):
            return True
        if not all(map(is_scalar, saved.values())):
            return False
        now = self.now.get(key)
        if isinstance(now, torch.Tensor):
            return bool(now.dim()) and now.shape == self.parameter.shape
        # 0-d states of 0-d tensors were saved as values; `step` alone is one for any shape
        weights = [member.owned.weight for member in saved]
        return key != "step" and all(each is not None and each.dim() == 0 for each in weights)

    def match_masters(self) -> None:
        """Fill the row itself, from the masters that were saved or else from the parameters.

        The latter also where nothing of the optimizer was saved: the parameters would go back to
        old values with the next step otherwise.
        """
        wanted = [member for member in self.members if not member.owned.aliased]
        if not wanted:
            return
        self.reads.row(self.parameter, self._at(MASTER, wanted[0]))
        for member in wanted:
            place = self._at(MASTER, member)
            node = member.states.get(MASTER, member.weight)
            if node is None:
                if member.known:
                    self.reads.differences.missing.append(place.shown)
            else:
                # the parameter is never wider than its master
                self._fill(self.parameter, member, node, place, derived=MASTER not in member.states)

    def _fill(
        self,
        row: torch.Tensor,
        member: Member,
        node: Node,
        place: Place,
        *,
        derived: bool = False,
    ) -> None:
        hold = member.owned.hold
        assert hold is not None
        held = hold(row, place.shown)
        self.reads.part(held, node, place, derived=derived)

    def _at(self, key: str, member: Member) -> Place:
        return self.into.at(key, member.owned.name)
