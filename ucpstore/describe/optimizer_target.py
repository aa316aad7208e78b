"""Optimizers on the load side: `optimizer.state` and `param_groups` are filled directly.

`Optimizer.load_state_dict` would cast moments to the parameter's dtype, and a step to create
states would change them: neither is called. States are assigned at the end only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor

from ucpstore.describe.build import ABSENT, Thunk, build
from ucpstore.describe.kinds import array_path, is_scalar, saved_scalar, what
from ucpstore.describe.naming import Name, Named, names_of
from ucpstore.describe.optimizers import FROZEN, IDENTITY
from ucpstore.describe.place import Owner, Place
from ucpstore.describe.reads import Reads
from ucpstore.errors import MismatchError
from ucpstore.tree.decode import decode
from ucpstore.tree.nodes import MAPPINGS, Node, items_of, pairs_of, same, tag_of
from ucpstore.tree.optimizer import Group, OptimizerNode, from_node


@dataclass(frozen=True, slots=True, eq=False)
class _Member:
    """A parameter of a group. `step_moves`: the loaded group wants its `step` on another device."""

    owner: Owner
    steps_on_device: bool
    step_moves: bool


_SCHEDULED = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
"""Values that torch's schedulers add to the groups of any optimizer."""


@dataclass(slots=True, eq=False)
class OptimizerTarget:
    """One optimizer of the target and the saved one; `match`, then, after the reads, `finish`."""

    optimizer: torch.optim.Optimizer
    node: Node
    place: Place
    reads: Reads
    modules: Sequence[Named]
    tree: Node
    _names: dict[torch.Tensor, str] = field(default_factory=dict)
    _states: dict[torch.Tensor, dict[str, Thunk]] = field(default_factory=dict)
    _groups: list[dict[str, Thunk]] = field(default_factory=list)
    _extra: dict[str, Thunk] = field(default_factory=dict)
    _saved: OptimizerNode | None = None

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

    def match(self) -> None:
        """Check everything; nothing of the optimizer changes."""
        saved = self.saved
        names = names_of(self.optimizer, self.modules, self.place.shown)
        group_of = {name: group for group in saved.groups for name in group.names}
        modules = {name.module for name in names.values()}
        ties = {module: _ties(module, self.tree) for module in modules}
        for parameter, name in names.items():
            tied = ties[name.module].get(name.fqn, name.fqn)
            other = str(Name(name.prefix, tied, name.module))
            known = str(name) in group_of or other not in group_of
            self._names[parameter] = str(name) if known else other
        self._match_names(names, group_of)
        for index, group in enumerate(self.optimizer.param_groups):
            members = [self._names[parameter] for parameter in group["params"]]
            values = self._match_group(index, members, group_of)
            before, after = _steps_on_device(group), _steps_on_device({**group, **values})
            for parameter in group["params"]:
                if self._names[parameter] in group_of:
                    name = names[parameter]
                    owner = Owner(parameter, str(name), name.module.full_name(parameter))
                    member = _Member(owner, after, before != after)
                    self._match_states(member)
        for key, node in saved.extra.items():
            now = self.optimizer.state.get(key)  # type: ignore[call-overload]
            at = self.place.child("extra", ()).child(key, ())
            self._extra[key] = build(self.reads, node, at, now)

    def same_groups(self) -> bool:
        """Whether the target's groups are the saved ones, as far as this rank has parameters."""
        if len(self.optimizer.param_groups) != self.saved_group_count:
            return False
        members: dict[int, set[str]] = {}
        for group in self.saved.groups:
            members.setdefault(group.index, set()).update(group.names)
        return all(
            {self._names[parameter] for parameter in group["params"]} <= members.get(index, set())
            for index, group in enumerate(self.optimizer.param_groups)
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
        for group, values_of in zip(self.optimizer.param_groups, self._groups, strict=True):
            for key, thunk in values_of.items():
                group[key] = _hyper_parameter(group.get(key), thunk())
        for key, thunk in self._extra.items():
            self.optimizer.state[key] = thunk()  # type: ignore[index]

    def _match_names(self, names: Mapping[torch.Tensor, Name], saved: Mapping[str, Group]) -> None:
        known = set(self._names.values())
        self.reads.differences.missing += [
            f"{self.place.shown}.{names[parameter]}"
            for parameter, name in self._names.items()
            if name not in saved
        ]
        self.reads.differences.unexpected += [
            f"{self.place.shown}.{name}" for name in saved if name not in known
        ]

    def _match_group(
        self, index: int, members: Sequence[str], saved: Mapping[str, Group]
    ) -> Mapping[str, Node]:
        """The hyper-parameters for a group: those of its parameters, which must agree."""
        found = [saved[name] for name in members if name in saved]
        if not members:
            # the values of a group without parameters cannot follow any
            found = sorted(
                (group for group in self.saved.groups if group.index == index),
                key=lambda group: len(group.names),
            )[:1]
        values: Mapping[str, Node] = found[0].values if found else {}
        for other in found[1:]:
            if other is found[0] or same(_in_order(other.values), _in_order(values)):
                continue
            differing = sorted(
                key
                for key in {*values, *other.values}
                if key not in values
                or key not in other.values
                or not same(values[key], other.values[key])
            )
            self.reads.differences.problems.append(
                f"{self.place.shown}: group {index} of the target has parameters that were saved "
                f"with different {', '.join(differing)} (such as {found[0].names[0]} and "
                f"{other.names[0]}); give them groups of their own"
            )
            break
        at = self.place.child("param_groups", ()).child(index, ())
        now = self.optimizer.param_groups[index]
        self._check_kind(index, values, now)
        self._groups.append(
            {
                key: build(self.reads, node, at.child(key, ()), now.get(key))
                for key, node in values.items()
            }
        )
        return values

    def _check_kind(
        self, index: int, saved: Mapping[str, Node], target: Mapping[str, object]
    ) -> None:
        """Refuse values of another kind of optimizer, whose states would be missing or unused.

        Flags do not tell, for new versions of torch add them to every optimizer.
        """
        ours = {key for key, value in target.items() if not isinstance(value, (bool, str))}
        theirs = {key for key, node in saved.items() if not isinstance(node, (bool, str))}
        fewer = sorted(key for key in ours - set(saved) if target[key] is not None)
        more = sorted(key for key in theirs - set(target) if saved[key] is not None)
        fewer = [key for key in fewer if key not in (*IDENTITY, *_SCHEDULED)]
        more = [key for key in more if key not in _SCHEDULED]
        if fewer and more and saved:
            self.reads.differences.problems.append(
                f"{self.place.shown}: group {index} was saved by another kind of optimizer: it has "
                f"{', '.join(more)}, while {type(self.optimizer).__name__} has {', '.join(fewer)}; "
                "build the optimizer that was saved, or leave it out of the target"
            )

    def _match_states(self, member: _Member) -> None:
        parameter, name = member.owner.parameter, member.owner.name
        states = dict(self.saved.states.get(self._names[parameter], {}))
        frozen = states.pop(FROZEN, None) is False
        if frozen and not states and parameter.requires_grad and self._has_states():
            self.reads.differences.missing.append(f"{self.place.shown}.{name}")
            self.reads.differences.hints.append(
                f"{self.place.shown}.{name}: frozen when it was saved, so it has no state, but the "
                "target trains it; freeze it, or pass strict=False to start it without state"
            )
            return
        now = self.optimizer.state.get(parameter, {})
        thunks: dict[str, Thunk] = {}
        for key, node in states.items():
            place = self.place.child(key, ()).child(name, ())
            self.reads.differences.attempt(
                self._match_state, thunks, key, node, place, member, now.get(key)
            )
        self._states[parameter] = thunks

    def _match_state(
        self,
        thunks: dict[str, Thunk],
        key: str,
        node: Node,
        place: Place,
        member: _Member,
        now: object,
    ) -> None:
        """Add how to get one state of one parameter to `thunks`."""
        parameter = member.owner.parameter
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
        if isinstance(now, torch.Tensor) and not self.reads.is_claimed(now):
            self.reads.tensor(
                now, node, place, member.owner if now.shape == parameter.shape else None
            )
            thunks[key] = lambda: now
            return
        if now is not None and not isinstance(now, torch.Tensor):
            raise MismatchError(
                f"{place.shown}: the target is a {type(now).__name__}, but {what(node)} was saved"
            )
        if path is None:
            thunks[key] = _scalar(key, saved_scalar(node), parameter, member.steps_on_device)
            return
        alike = self.reads.info(path).shape == self.reads.stored_shape(member.owner)
        made = self.reads.fresh(
            node,
            place,
            like_tensor=parameter if alike else None,
            device=parameter.device,
            owner=member.owner if alike else None,
        )
        thunks[key] = lambda: made

    def _has_states(self) -> bool:
        return any(key != FROZEN for states in self.saved.states.values() for key in states)


def _ties(module: Named, tree: Node) -> dict[str, str]:
    """For each tied name of a saved module the name that its optimizer states have."""
    node: Node = tree
    for key in module.keys:
        if isinstance(node, list) or tag_of(node) == "tuple":
            items = items_of(node)
            node = items[key] if isinstance(key, int) and key < len(items) else None
        else:
            node = {decode(name): child for name, child in pairs_of(node)}.get(key)
    if tag_of(node) not in MAPPINGS:
        return {}
    names = {
        array_path(child): str(name) for name, child in pairs_of(node) if tag_of(child) == "array"
    }
    return {
        str(name): names[array_path(child)]
        for name, child in pairs_of(node)
        if tag_of(child) == "link" and array_path(child) in names
    }


def _steps_on_device(group: Mapping[str, object]) -> bool:
    """Whether the optimizer wants `step` where the parameters are, rather than on the CPU."""
    return bool(group.get("capturable") or group.get("fused"))


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


def _hyper_parameter(now: object, saved: object) -> object:
    """What a group gets: a tensor is filled in place, a number stays one, else as saved."""
    if isinstance(now, torch.Tensor) and isinstance(saved, (torch.Tensor, int, float)):
        with torch.no_grad():
            now.fill_(saved)
        return now
    if type(now) in (int, float) and isinstance(saved, torch.Tensor) and saved.dim() == 0:
        return saved.item()
    return saved


def _in_order(values: Mapping[str, Node]) -> Node:
    return [[key, values[key]] for key in sorted(values)]
