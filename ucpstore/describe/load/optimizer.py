"""Optimizers on the load side: `optimizer.state` and `param_groups` are filled directly.

`Optimizer.load_state_dict` would cast moments to the parameter's dtype, and a step to create
states would change them: neither is called. States are assigned at the end only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch.distributed.tensor import DTensor

from ucpstore.describe.kinds import array_path, is_scalar, saved_scalar, what
from ucpstore.describe.load.groups import GroupsTarget, steps_on_device
from ucpstore.describe.load.masters import Masters, saved_entries, ties
from ucpstore.describe.load.narrow import Narrow
from ucpstore.describe.load.row import Member, RowTarget
from ucpstore.describe.modules.named import Named
from ucpstore.describe.optimizers.keys import FROZEN, MASTER, is_copy
from ucpstore.describe.optimizers.names import Name
from ucpstore.describe.optimizers.owned import Holding, Owned
from ucpstore.describe.place import Owner, Place
from ucpstore.describe.reads.build import ABSENT, Thunk, build
from ucpstore.describe.reads.fresh import fresh, fresh_dtype
from ucpstore.describe.reads.reads import Reads
from ucpstore.describe.tensors.plain import dtype_name
from ucpstore.describe.tensors.stacks import hold_stack
from ucpstore.errors import MismatchError, StateError
from ucpstore.tree.nodes import Node
from ucpstore.tree.optimizer import Group, OptimizerNode, from_node


@dataclass(frozen=True, slots=True, eq=False)
class _InGroup:
    """A parameter of a group. `step_moves`: the loaded group wants its `step` on another device."""

    owner: Owner
    steps_on_device: bool
    step_moves: bool


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
    _narrow: Narrow = field(init=False)
    _saved: OptimizerNode | None = None

    def __post_init__(self) -> None:
        self._narrow = Narrow(self.place)

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
            before, after = steps_on_device(group), steps_on_device({**group, **values})
            steps = (after, before != after)
            for parameter, held in self.holding.by_parameter(index).items():
                known = {owned for owned in held if self._names[owned] in group_of}
                if held[0].hold is not None:
                    row = self._row(parameter, held, known, steps)
                    if known:
                        self._states[parameter] = row.match()
                    else:
                        row.match_masters()
                elif known and held[0].layers:
                    self._match_stack(held[0], steps)
                elif known:
                    self._match_states(held[0], steps)
        for key, node in self.saved.extra.items():
            now = self.optimizer.state.get(key)  # type: ignore[call-overload]
            at = self.place.child("extra", ()).child(key, ())
            self._extra[key] = build(self.reads, node, at, now)
        self._narrow.warn()

    def match_masters(self) -> None:
        """All that there is to do for an optimizer that was not saved, but its module was."""
        for index in range(len(self.optimizer.param_groups)):
            for parameter, held in self.holding.by_parameter(index).items():
                if held[0].hold is not None:
                    self._row(parameter, held, set(), (False, False)).match_masters()

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
        steps: tuple[bool, bool],
    ) -> RowTarget:
        """A parameter in which several tensors lie, those `known` with saved states."""
        now = self.optimizer.state.get(parameter, {})
        members = []
        for owned in held:
            module, weight = owned.name.module, None
            if module is not None:
                weight = self._entries[module].get(owned.name.fqn)
            saved = owned in known and not self._thaws(owned)
            states = self._states_of(owned) if saved else {}
            members.append(Member(owned, states, weight, saved))

        def common(
            thunks: dict[str, Thunk], key: str, node: Node, place: Place, owned: Owned
        ) -> None:
            owner = Owner(parameter, str(owned.name), owned.full_name)
            self._match_state(thunks, key, node, place, _InGroup(owner, *steps), now.get(key))

        return RowTarget(
            parameter, now, tuple(members), self.place, self.reads, self._narrow, common
        )

    def _taken(self, owned: Owned) -> Mapping[str, Node] | None:
        """The saved states that the target has a place for; None where it starts without."""
        if self._thaws(owned):
            return None
        states = {key: node for key, node in self._states_of(owned).items() if key != FROZEN}
        if MASTER in states and not self._has_own(owned, MASTER):
            self._match_master(owned, states.pop(MASTER))
        return states

    def _match_states(self, owned: Owned, steps: tuple[bool, bool]) -> None:
        states = self._taken(owned)
        if states is None:
            return
        parameter, name = owned.parameter, str(owned.name)
        member = _InGroup(Owner(parameter, name, owned.full_name), *steps)
        now = self.optimizer.state.get(parameter, {})
        thunks: dict[str, Thunk] = {}
        for key, node in states.items():
            place = self.place.child(key, ()).child(name, ())
            self.reads.differences.attempt(
                self._match_state, thunks, key, node, place, member, now.get(key)
            )
        self._states[parameter] = thunks

    def _match_stack(self, owned: Owned, steps: tuple[bool, bool]) -> None:
        """The states of parameters that are stored as one array."""
        states = self._taken(owned)
        if states is None:
            return
        for _, parameter in owned.layers:
            self._states[parameter] = {}
        for key, node in states.items():
            self.reads.differences.attempt(self._match_layers, owned, key, node, steps)

    def _match_layers(self, owned: Owned, key: str, node: Node, steps: tuple[bool, bool]) -> None:
        place = self.place.child(key, ()).child(str(owned.name), ())
        path = array_path(node)
        found: list[torch.Tensor] = []
        for full_name, parameter in owned.layers:
            now = self.optimizer.state.get(parameter, {}).get(key)
            if path is None:
                thunks = self._states[parameter]
                member = _InGroup(Owner(parameter, str(owned.name), full_name), *steps)
                self._match_state(thunks, key, node, place, member, now)
            elif isinstance(now, torch.Tensor) and not self.reads.claims.has(now):
                found.append(now)
            else:
                dtype = fresh_dtype(self.reads, node, place, parameter.dtype)
                self._narrow.note(key, dtype, parameter)
                found.append(torch.zeros_like(parameter.detach(), dtype=dtype))
        if path is None:
            return
        names = [full_name for full_name, _ in owned.layers]
        held = hold_stack(found, names, self.reads.ranks, place.shown)
        held = replace(held, scale=held.scale if is_copy(self.optimizer, key) else 1)
        self.reads.stack(held, found, node, place)
        for (_, parameter), tensor in zip(owned.layers, found, strict=True):
            self._states[parameter][key] = partial(_itself, tensor)

    def _match_state(
        self,
        thunks: dict[str, Thunk],
        key: str,
        node: Node,
        place: Place,
        member: _InGroup,
        now: object,
    ) -> None:
        """Add how to get one state of one parameter to `thunks`."""
        parameter = member.owner.parameter
        owner = replace(member.owner, is_state=not is_copy(self.optimizer, key), key=key)
        path = array_path(node)
        if path is None and not is_scalar(node):
            if isinstance(now, torch.Tensor):
                raise MismatchError(
                    f"{place.shown}: the target is a tensor, but {what(node)} was saved"
                )
            thunks[key] = build(self.reads, node, place, now, parameter.device)
            return
        if key == "step" and member.step_moves and isinstance(now, torch.Tensor):
            now = None
        if isinstance(now, torch.Tensor) and not self.reads.claims.has(now):
            self.reads.tensor(now, node, place, owner if now.shape == parameter.shape else None)
            thunks[key] = lambda: now
            return
        if now is not None and not isinstance(now, torch.Tensor):
            raise MismatchError(
                f"{place.shown}: the target is a {type(now).__name__}, but {what(node)} was saved"
            )
        if path is None:
            saved = saved_scalar(node)
            if not owner.is_state and parameter.dim() == 0:
                scale = self.reads.held(owner).scale
                saved = saved if scale == 1 else saved / scale
            thunks[key] = _scalar(key, saved, parameter, member.steps_on_device)
            return
        alike = self._is_alike(path, owner, place)
        made = fresh(
            self.reads,
            node,
            place,
            like_tensor=parameter if alike else None,
            device=parameter.device,
            owner=owner if alike else None,
        )
        if alike:
            self._narrow.note(key, made.dtype, parameter)
        thunks[key] = lambda: made

    def _is_alike(self, path: str, owner: Owner, place: Place) -> bool:
        """Whether a state that is made anew lies as its parameter does.

        Raises MismatchError where a rule of the state's own says otherwise, and only the state
        itself would tell which of the two it goes by.
        """
        held, stored = self.reads.held(owner), self.reads.info(path).shape
        if stored != held.shape:
            return False
        spec, here = self.reads.ranks.spec, tuple(held.local.shape)
        if spec is None or here == stored:
            return True
        own = spec.rule(place.shown)
        if own is None or own == spec.rule(owner.full_name):
            return True
        with contextlib.suppress(StateError):
            lowered = spec.lower(place.shown, here, self.reads.ranks.rank)
            if (lowered.shape, lowered.partition) == (held.shape, held.partition):
                return True
        raise MismatchError(
            f"{place.shown}: the target's optimizer has no such state yet, and the one that was "
            f"saved has the shape {stored} of its parameter, of which this rank has {here}; so it "
            f"may lie as the parameter does, or by rule {own} of its own. Let the optimizer make "
            "its states before the load, or let the rule match only what does not lie as its "
            "parameter does"
        )

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


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _scalar(key: str, saved: torch.Tensor, parameter: torch.Tensor, on_device: bool) -> Thunk:
    """A 0-d state made anew, where the optimizer wants it.

    Adam and its kin keep `step` on the CPU unless the group is capturable or fused; every other
    state lies on the device of the parameter, and is placed as one that is 0-d as well.
    """
    if key == "step":
        return lambda: saved.to(parameter.device) if on_device else saved
    if parameter.dim() == 0 and isinstance(parameter, DTensor):
        local = saved.to(parameter.device)
        return lambda: DTensor.from_local(
            local, parameter.device_mesh, parameter.placements, run_check=False
        )
    return lambda: saved.to(parameter.device)
