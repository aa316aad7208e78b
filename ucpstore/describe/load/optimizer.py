"""Optimizers on the load side: `optimizer.state` and `param_groups` are filled directly.

`Optimizer.load_state_dict` would cast moments to the parameter's dtype, and a step to create
states would change them: neither is called. States are assigned at the end only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from ucpstore.describe.kinds import array_path
from ucpstore.describe.load.groups import GroupsTarget
from ucpstore.describe.load.masters import Masters, saved_entries, ties
from ucpstore.describe.load.narrow import Narrow
from ucpstore.describe.load.row import Member, RowTarget
from ucpstore.describe.load.stack import StackTarget
from ucpstore.describe.load.states import Destination, StateTarget, Steps
from ucpstore.describe.modules.named import Named
from ucpstore.describe.optimizers.keys import FROZEN, MASTER
from ucpstore.describe.optimizers.names import Name
from ucpstore.describe.optimizers.owned import Holding, Owned
from ucpstore.describe.place import Owner, Place
from ucpstore.describe.reads.build import ABSENT, Thunk, build
from ucpstore.describe.reads.reads import Reads
from ucpstore.describe.tensors.plain import dtype_name
from ucpstore.tree.nodes import Node
from ucpstore.tree.optimizer import Group, OptimizerNode, from_node


@dataclass(slots=True, eq=False)
class OptimizerTarget:
    """One optimizer of the target and the saved one.

    `prepare`, once all targets are prepared `match`, and after the reads `finish`.
    """

    holding: Holding
    node: Node
    place: Place
    reads: Reads
    tree: Node
    _names: dict[Owned, str] = field(default_factory=dict)
    _entries: dict[Named, Mapping[str, Node]] = field(default_factory=dict)
    _states: dict[torch.Tensor, dict[str, Thunk]] = field(default_factory=dict)
    _groups: GroupsTarget = field(init=False)
    _extra: dict[str, Thunk] = field(default_factory=dict)
    _into: Destination = field(init=False)
    _saved: OptimizerNode | None = None

    def __post_init__(self) -> None:
        self._into = Destination(self.optimizer, self.place, self.reads, Narrow(self.place))

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The target's own."""
        return self.holding.optimizer

    @property
    def saved(self) -> OptimizerNode:
        """The stored optimizer."""
        if self._saved is None:
            self._saved = from_node(self.node)
        return self._saved

    @property
    def saved_group_count(self) -> int:
        """Number of groups that the saved optimizer had."""
        return 1 + max((group.index for group in self.saved.groups), default=-1)

    def prepare(self, masters: Masters) -> None:
        """Find the saved name of each tensor, and tell `masters` which the checkpoint has."""
        group_of = self._group_of()
        modules = {owned.name.module for owned in self.holding if owned.name.module is not None}
        self._entries.update((module, saved_entries(module, self.tree)) for module in modules)
        tied_of = {module: ties(entries) for module, entries in self._entries.items()}
        for owned in self.holding:
            name = owned.name
            tied = name.fqn if name.module is None else tied_of[name.module].get(name.fqn, name.fqn)
            other = str(Name(name.prefix, tied, name.module))
            known = str(name) in group_of or other not in group_of
            self._names[owned] = str(name) if known else other
            if owned.weight is None:
                continue
            master = self._states_of(owned).get(MASTER)
            if master is not None and array_path(master) and not self._has_own(owned, MASTER):
                masters.saved[owned.weight] = master
            if owned.hold is not None:
                masters.derived.add(owned.weight)

    def match(self) -> None:
        """Check everything; nothing of the optimizer changes."""
        group_of = self._group_of()
        self._match_names(group_of)
        self._groups = GroupsTarget(self.optimizer, self.saved.groups, self.place, self.reads)
        for index, group in enumerate(self.optimizer.param_groups):
            members = [self._names[owned] for owned in self.holding.groups[index]]
            values = self._groups.match(index, members, group_of)
            steps = Steps.of(group, values)
            for parameter, held in self.holding.by_parameter(index).items():
                known = {owned for owned in held if self._names[owned] in group_of}
                if held[0].hold is not None:
                    row = self._row(parameter, held, known, steps)
                    if known:
                        self._states[parameter] = row.match()
                    else:
                        row.match_masters()
                elif known:
                    self._match_states(held[0], steps)
        for key, node in self.saved.extra.items():
            now = self.optimizer.state.get(key)  # type: ignore[call-overload]
            at = self.place.child("extra", ()).child(key, ())
            self._extra[key] = build(self.reads, node, at, now)
        self._into.narrow.warn()

    def match_masters(self) -> None:
        """All that there is to do for an optimizer that was not saved, but its module was."""
        for index in range(len(self.optimizer.param_groups)):
            for parameter, held in self.holding.by_parameter(index).items():
                if held[0].hold is not None:
                    self._row(parameter, held, set(), Steps()).match_masters()

    def same_groups(self) -> bool:
        """Whether the target's groups are the saved ones, as far as this rank has parameters."""
        if len(self.optimizer.param_groups) != self.saved_group_count:
            return False
        members: dict[int, set[str]] = {}
        for group in self.saved.groups:
            members.setdefault(group.index, set()).update(group.names)
        return all(
            {self._names[owned] for owned in group} <= members.get(index, set())
            for index, group in enumerate(self.holding.groups)
        )

    def finish(self) -> None:
        """Put states and hyper-parameters in place, once all reads are done."""
        for parameter, thunks in self._states.items():
            values = {key: thunk() for key, thunk in thunks.items()}
            kept = {key: value for key, value in values.items() if value is not ABSENT}
            if kept:
                state = self.optimizer.state[parameter]
                state.clear()
                state.update(kept)
            else:
                self.optimizer.state.pop(parameter, None)
        self._groups.finish()
        for key, thunk in self._extra.items():
            self.optimizer.state[key] = thunk()  # type: ignore[index]
        if self.holding.loaded is not None:
            self.holding.loaded()

    def _group_of(self) -> dict[str, Group]:
        return {name: group for group in self.saved.groups for name in group.names}

    def _states_of(self, owned: Owned) -> Mapping[str, Node]:
        return self.saved.states.get(self._names[owned], {})

    def _has_own(self, owned: Owned, key: str) -> bool:
        """Whether the target's optimizer keeps such a state itself."""
        return owned.hold is None and key in self.optimizer.state.get(owned.parameter, {})

    def _match_names(self, saved: Mapping[str, Group]) -> None:
        """Names of one side only; without those that are frozen there and have no state.

        Some optimizers have frozen parameters in their groups, some leave them out.
        """
        known = set(self._names.values())
        self.reads.differences.missing += [
            f"{self.place.shown}.{owned.name}"
            for owned, name in self._names.items()
            if name not in saved and (owned.trained or self.optimizer.state.get(owned.parameter))
        ]
        self.reads.differences.unexpected += [
            f"{self.place.shown}.{name}"
            for name in saved
            if name not in known and self.saved.states.get(name, {}) != {FROZEN: False}
        ]

    def _thaws(self, owned: Owned) -> bool:
        """Whether the target trains what was frozen and has no state; tells so."""
        states = self._states_of(owned)
        if {**states} != {FROZEN: False} or not owned.trained or not self._has_states():
            return False
        self.reads.differences.missing.append(f"{self.place.shown}.{owned.name}")
        self.reads.differences.hints.append(
            f"{self.place.shown}.{owned.name}: frozen when it was saved, so it has no state, but "
            "the target trains it; freeze it, or pass strict=False to start it without state"
        )
        return True

    def _row(
        self,
        parameter: torch.Tensor,
        held: Iterable[Owned],
        known: Collection[Owned],
        steps: Steps,
    ) -> RowTarget:
        """A parameter in which several tensors lie, those `known` with saved states."""
        members = []
        for owned in held:
            module, weight = owned.name.module, None
            if module is not None:
                weight = self._entries[module].get(owned.name.fqn)
            saved = owned in known and not self._thaws(owned)
            states = self._states_of(owned) if saved else {}
            members.append(Member(owned, states, weight, saved))
        now = self._into.now(parameter)
        return RowTarget(self._into, parameter, now, tuple(members), steps)

    def _taken(self, owned: Owned) -> Mapping[str, Node] | None:
        """The saved states that the target has a place for; None where it starts without."""
        if self._thaws(owned):
            return None
        states = {key: node for key, node in self._states_of(owned).items() if key != FROZEN}
        if MASTER in states and not self._has_own(owned, MASTER):
            self._match_master(owned, states.pop(MASTER))
        return states

    def _match_states(self, owned: Owned, steps: Steps) -> None:
        """The states of a parameter of its own, or of those that are one stack."""
        states = self._taken(owned)
        if states is None:
            return
        if owned.layers:
            self._states.update(StackTarget(self._into, owned, steps).match(states))
            return
        owner = Owner(owned.parameter, str(owned.name), owned.full_name)
        target = StateTarget(self._into, owner, self._into.now(owned.parameter), steps)
        self._states[owned.parameter] = target.match(states)

    def _match_master(self, owned: Owned, node: Node) -> None:
        """A master for a target without: its parameter is read from it if it has that dtype."""
        stored = self.reads.info(array_path(node)).dtype
        if stored == dtype_name(owned.parameter.dtype, self.place.shown):
            return
        at = f"{self.place.shown}.{MASTER}.{owned.name}"
        self.reads.differences.unexpected.append(at)
        self.reads.differences.hints.append(
            f"{at}: saved with a master of {stored}, for which the target has no place; make the "
            f"parameter {stored}, keep masters, or pass strict=False to go on without"
        )

    def _has_states(self) -> bool:
        return any(key != FROZEN for states in self.saved.states.values() for key in states)
