"""The states of one parameter of the target's optimizer: filled in place, or made anew."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import DTensor

from ucpstore.describe.kinds import array_path, is_scalar, saved_scalar, what
from ucpstore.describe.load.narrow import Narrow
from ucpstore.describe.optimizers.keys import is_copy
from ucpstore.describe.place import Owner, Place
from ucpstore.describe.reads.build import Thunk, build
from ucpstore.describe.reads.fresh import fresh
from ucpstore.describe.reads.reads import Reads
from ucpstore.errors import MismatchError, StateError
from ucpstore.tree.nodes import Node


@dataclass(frozen=True, slots=True, eq=False)
class Destination:
    """An optimizer of the target, as far as its states need it."""

    optimizer: torch.optim.Optimizer
    place: Place
    reads: Reads
    narrow: Narrow

    def at(self, key: str, name: object) -> Place:
        """The place of a state of the parameter of a name."""
        return self.place.child(key, ()).child(str(name), ())

    def now(self, parameter: torch.Tensor) -> Mapping[str, object]:
        """The states that the optimizer has."""
        states: Mapping[str, object] = self.optimizer.state.get(parameter, {})
        return states


@dataclass(frozen=True, slots=True)
class Steps:
    """Where the group of a parameter wants its `step` once it is loaded.

    `on_device`: where the parameter is, rather than on the CPU. `moves`: elsewhere than now.
    """

    on_device: bool = False
    moves: bool = False

    @staticmethod
    def of(group: Mapping[str, object], loaded: Mapping[str, object]) -> Steps:
        """Those of a group of the target that is given the values `loaded`."""
        before, after = _on_device(group), _on_device({**group, **loaded})
        return Steps(after, before != after)


@dataclass(frozen=True, slots=True, eq=False)
class StateTarget:
    """One parameter of the target's optimizer, which may be a layer of a stack or a whole row."""

    into: Destination
    owner: Owner
    now: Mapping[str, object]
    steps: Steps

    def match(self, states: Mapping[str, Node]) -> dict[str, Thunk]:
        """How to get each state, once all reads are done; nothing changes."""
        thunks: dict[str, Thunk] = {}
        for key, node in states.items():
            self.into.reads.differences.attempt(self.match_one, thunks, key, node)
        return thunks

    def match_one(self, thunks: dict[str, Thunk], key: str, node: Node) -> None:
        """Add how to get one state to `thunks`."""
        reads, parameter, now = self.into.reads, self.owner.parameter, self.now.get(key)
        place = self.into.at(key, self.owner.name)
        owner = replace(self.owner, is_state=not is_copy(self.into.optimizer, key), key=key)
        path = array_path(node)
        if path is None and not is_scalar(node):
            if isinstance(now, torch.Tensor):
                raise MismatchError(
                    f"{place.shown}: the target is a tensor, but {what(node)} was saved"
                )
            thunks[key] = build(reads, node, place, now, parameter.device)
            return
        if key == "step" and self.steps.moves and isinstance(now, torch.Tensor):
            now = None
        if isinstance(now, torch.Tensor) and not reads.claims.has(now):
            reads.tensor(now, node, place, owner if now.shape == parameter.shape else None)
            thunks[key] = lambda: now
            return
        if now is not None and not isinstance(now, torch.Tensor):
            raise MismatchError(
                f"{place.shown}: the target is a {type(now).__name__}, but {what(node)} was saved"
            )
        if path is None:
            saved = saved_scalar(node)
            if not owner.is_state and parameter.dim() == 0:
                scale = reads.held(owner).scale
                saved = saved if scale == 1 else saved / scale
            thunks[key] = _scalar(key, saved, parameter, self.steps.on_device)
            return
        alike = self._is_alike(path, owner, place)
        made = fresh(
            reads,
            node,
            place,
            like_tensor=parameter if alike else None,
            device=parameter.device,
            owner=owner if alike else None,
        )
        if alike:
            self.into.narrow.note(key, made.dtype, parameter)
        thunks[key] = lambda: made

    def _is_alike(self, path: str, owner: Owner, place: Place) -> bool:
        """Whether a state that is made anew lies as its parameter does.

        Raises MismatchError where a rule of the state's own says otherwise, and only the state
        itself would tell which of the two it goes by.
        """
        reads = self.into.reads
        held, stored = reads.held(owner), reads.info(path).shape
        if stored != held.shape:
            return False
        spec, here = reads.ranks.spec, tuple(held.local.shape)
        if spec is None or here == stored:
            return True
        own = spec.rule(place.shown)
        if own is None or own == spec.rule(owner.full_name):
            return True
        with contextlib.suppress(StateError):
            lowered = spec.lower(place.shown, here, reads.ranks.rank)
            if (lowered.shape, lowered.partition) == (held.shape, held.partition):
                return True
        raise MismatchError(
            f"{place.shown}: the target's optimizer has no such state yet, and the one that was "
            f"saved has the shape {stored} of its parameter, of which this rank has {here}; so it "
            f"may lie as the parameter does, or by rule {own} of its own. Let the optimizer make "
            "its states before the load, or let the rule match only what does not lie as its "
            "parameter does"
        )


def _on_device(group: Mapping[str, object]) -> bool:
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
