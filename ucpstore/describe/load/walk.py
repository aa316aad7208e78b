"""The load side: a target state against a stored tree.

Everything is checked before anything changes: the walk only collects reads, differences and what
to do at the end. Tensors are read in place; Python values, optimizer states and objects are put
in place by `Target.finish`, in this order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from ucpstore.describe.engines.deepspeed import expand
from ucpstore.describe.kinds import DICTS, array_path, children, only_values, what
from ucpstore.describe.load.optimizer import OptimizerTarget
from ucpstore.describe.load.prepared import PreparedOptimizers
from ucpstore.describe.load.schedulers import check_schedulers
from ucpstore.describe.modules.entries import Entry, entries
from ucpstore.describe.modules.keys import keys_of
from ucpstore.describe.modules.named import modules_of
from ucpstore.describe.optimizers.holding import is_optimizer
from ucpstore.describe.optimizers.rows import RowOptimizer
from ucpstore.describe.place import ROOT, Owner, Place
from ucpstore.describe.ranks import Ranks
from ucpstore.describe.reads.build import ABSENT, build, document
from ucpstore.describe.reads.differences import (
    ArrayInfo,
    Cast,
    Differences,
    Target,
    prefix_hint,
    warn_unmatched,
)
from ucpstore.describe.reads.reads import Reads
from ucpstore.describe.tensors.flat import hold_flat
from ucpstore.describe.tensors.stacks import hold_stack
from ucpstore.describe.values.counters import Counters
from ucpstore.describe.values.objects import Stateful, is_stateful
from ucpstore.describe.values.perrank import as_per_rank, restore
from ucpstore.errors import MismatchError, StateError
from ucpstore.flat import Flat, FlatOptimizer
from ucpstore.perrank import PerRank
from ucpstore.spec import Spec
from ucpstore.tree.decode import decode
from ucpstore.tree.nodes import Node, items_of, tag_of
from ucpstore.wrappers import is_engine

Put = Callable[[object], None]
"""Puts another value into the slot that a value of the target came from."""

_FILLED = (
    torch.Tensor,
    np.ndarray,
    nn.Module,
    torch.optim.Optimizer,
    Flat,
    FlatOptimizer,
    RowOptimizer,
)


def match(
    state: object,
    tree: Node,
    arrays: Mapping[str, ArrayInfo],
    *,
    strict: bool = True,
    cast: Cast = None,
    group_ranks: Mapping[int, int],
    rank: int | None = None,
    spec: Spec | None = None,
) -> Target:
    """Check a target against the tree and arrays of a step; no communication, nothing changes.

    `arrays` are those of at least the items that the target names. `cast` are name patterns
    (`model.*`) of tensors whose stored dtype may differ from the target's. `group_ranks`,
    `rank` and `spec` are as in `describe`. Raises one MismatchError (UnsupportedError where nothing
    else is wrong) that lists all differences.
    """
    if not isinstance(state, dict):
        raise StateError(
            f"the target must be a dict of items, but it is a {type(state).__name__}; "
            "e.g. {'model': model, 'optim': optimizer}"
        )
    ranks = Ranks.here(group_ranks, rank, spec)
    patterns = (cast,) if isinstance(cast, str) else tuple(cast or ())
    differences = Differences()
    reads = Reads(ranks, arrays, patterns, differences)
    prepared = PreparedOptimizers(modules_of(state, ranks), reads, tree)
    walk = _LoadWalk(reads, prepared, tree)
    items, skipped = walk.items(state)
    check_schedulers(walk.optimizers, walk.objects, differences)
    reads.refuse_overlaps()
    differences.refuse(strict=strict, alone=ranks.count == 1)
    if walk.unmatched:
        warn_unmatched(walk.unmatched, items, skipped)
    return Target(
        tuple(reads.found),
        items,
        skipped,
        (*differences.missing, *differences.kept),
        tuple(differences.unexpected),
        walk.finish,
    )


@dataclass(slots=True, eq=False)
class _LoadWalk:
    """One walk over a target and, beside it, the stored tree."""

    reads: Reads
    prepared: PreparedOptimizers
    tree: Node
    optimizers: list[OptimizerTarget] = field(default_factory=list)
    objects: list[tuple[Place, Stateful, Node]] = field(default_factory=list)
    restores: list[tuple[Place, Callable[[], None]]] = field(default_factory=list)
    rebuilds: list[Callable[[], None]] = field(default_factory=list)
    unmatched: dict[str, Sequence[str]] = field(default_factory=dict)
    """Items of which nothing is loaded though they were saved, and the names that are missing."""

    @property
    def differences(self) -> Differences:
        return self.reads.differences

    def items(self, state: dict[object, object]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Walk the items that the target names; (names loaded, names left out)."""
        saved = children(self.tree)
        self.prepared.find(state)
        for key, value in state.items():
            place = ROOT.child(key, state)
            if key in saved:
                known, found = len(self.differences.missing), self._found
                self._walk(value, saved[key], place, _slot(state, key))
                missing = self.differences.missing[known:]
                if missing and self._found == found:
                    self.unmatched[place.shown] = missing
            elif not isinstance(value, Counters):
                self.differences.missing.append(place.shown)
                self.differences.attempt(self.prepared.absent, value, place)
        if self.differences.missing and not saved.keys() >= state.keys():
            there = ", ".join(map(str, saved)) or "of an empty state"
            self.differences.hints.append(
                f"the checkpoint has the items {there}; leave out of the target what it lacks, or "
                "pass strict=False to load what both have"
            )
        if self.differences.missing and not saved.keys() & state.keys():
            self.unmatched.update({str(key): () for key in state})
        loaded = tuple(str(key) for key in state if key in saved)
        return loaded, tuple(str(key) for key in saved if key not in state)

    @property
    def _found(self) -> int:
        """How much there is to load so far."""
        reads = self.reads
        return sum((len(reads.found), len(reads.values), len(self.restores), len(self.optimizers)))

    def finish(self) -> None:
        """Put everything in place that is not a tensor of the target; after all reads, once."""
        for put in self.reads.values:
            put()
        for optimizer in self.optimizers:
            optimizer.finish()
        for place, action in self.restores:
            try:
                action()
            except Exception as error:
                raise StateError(
                    f"{place.shown}: it refused its saved state: {type(error).__name__}: {error}. "
                    "The target is undefined now; load again, without this item or into an object "
                    "built as the saved one was"
                ) from error
        for rebuild in self.rebuilds:
            rebuild()

    def _walk(self, value: object, node: Node, place: Place, put: Put) -> None:
        self.differences.attempt(self._one, value, node, place, put)

    def _one(self, value: object, node: Node, place: Place, put: Put) -> None:
        own = as_per_rank(value)
        if own is not None or tag_of(node) == "per_rank":
            self._per_rank(value, own or PerRank(value), node, place, put)
        elif isinstance(value, torch.Tensor):
            self.reads.tensor(value, node, place)
        elif isinstance(value, np.ndarray):
            self.reads.numpy(value, node, place)
        elif isinstance(value, Flat):
            self._flat(value, node, place)
        elif is_engine(value):
            self._dict(expand(value, place.shown), node, place)
        elif isinstance(value, nn.Module):
            self._module(value, node, place)
        elif is_optimizer(value, place.shown):
            self._optimizer(value, node, place)
        elif is_stateful(value):
            self._object(value, node, place)
        elif isinstance(value, dict) and type(value) is not Counter:
            self._dict(value, node, place)
        elif only_values(node) and _only_python(value):
            self._value(value, node, put)
        elif type(value) in (list, tuple):
            assert isinstance(value, (list, tuple))
            self._sequence(value, node, place, put)
        else:
            raise MismatchError(
                f"{place.shown}: the target is a {type(value).__name__}, but {what(node)} was saved"
            )

    def _value(self, value: object, node: Node, put: Put) -> None:
        if type(value) is list and isinstance(node, list):
            kept: list[object] = value

            def replace() -> None:
                kept[:] = decode(node)  # type: ignore[call-overload]

            self.reads.values.append(replace)
        else:
            self.reads.values.append(lambda: put(decode(node)))

    def _dict(self, value: dict[Any, object], node: Node, place: Place) -> None:
        if tag_of(node) not in DICTS:
            advice = "; pass the optimizer, not its state_dict()" * (tag_of(node) == "optimizer")
            raise MismatchError(
                f"{place.shown}: the target is a dict, but {what(node)} was saved{advice}"
            )
        saved = children(node)
        wanted = [key for key in value if key in saved or not isinstance(value[key], Counters)]
        self._names(dict.fromkeys(wanted), saved, place)
        for key, item in value.items():
            inside = place.child(key, value)
            if key in saved:
                self._walk(item, saved[key], inside, _slot(value, key))
            else:
                self.prepared.absent(item, inside)
        if not value and "state" in place.shown and any(type(key) is int for key in saved):
            self.differences.hints.append(
                f"{place.shown}: the state_dict() of an optimizer that has not stepped yet has no "
                "place for states; pass the optimizer itself"
            )

    def _flat(self, flat: Flat, node: Node, place: Place) -> None:
        if flat.is_row and tag_of(node) not in DICTS:
            raise MismatchError(
                f"{place.shown}: the target is a Flat, which is loaded from a dict of tensors, but "
                f"{what(node)} was saved"
            )
        found = hold_flat(flat, self.reads.ranks, place.shown)
        self.reads.row(flat.tensor, place)
        if not flat.is_row:
            self.reads.part(found[""], node, place)
            return
        saved = children(node)
        self._names(dict.fromkeys(found), saved, place)
        for key, held in found.items():
            if key in saved:
                self.reads.part(held, saved[key], place.child(key, found))

    def _sequence(
        self, value: list[object] | tuple[object, ...], node: Node, place: Place, put: Put
    ) -> None:
        kind = type(value).__name__
        if not isinstance(node, list) and tag_of(node) != "tuple":
            raise MismatchError(
                f"{place.shown}: the target is a {kind}, but {what(node)} was saved"
            )
        saved = items_of(node)
        if len(saved) != len(value):
            raise MismatchError(
                f"{place.shown}: saved with {len(saved)} elements, the target has {len(value)}"
            )
        items = value if isinstance(value, list) else list(value)
        for at, (item, part) in enumerate(zip(value, saved, strict=True)):
            self._walk(item, part, place.child(at, ()), _slot(items, at))
        if isinstance(value, tuple):
            # around the same tensors, for the values beside them; inner tuples come first
            self.rebuilds.append(lambda: put(tuple(items)))

    def _module(self, module: nn.Module, node: Node, place: Place) -> None:
        if tag_of(node) not in DICTS:
            raise MismatchError(
                f"{place.shown}: the target is a module, but {what(node)} was saved"
            )
        saved = children(node)
        found = keys_of(entries(module, place.shown), place, self.reads.ranks)
        saved |= self._ties(found, saved, place)
        self._names(dict.fromkeys(found), saved, place)
        self._stack_hint(found, saved, place)
        for name, entry in found.items():
            if name in saved:
                inside = place.child(name, found)
                if entry.tensor is not None:
                    self._entry(entry, entry.tensor, saved[name], inside, place)
                else:
                    self.differences.attempt(self._extra, entry, saved[name], inside)

    def _entry(
        self, entry: Entry, tensor: torch.Tensor, node: Node, inside: Place, module: Place
    ) -> None:
        if entry.layers:
            self.differences.attempt(self._stacked, entry, node, inside, module)
            return
        own = Owner(tensor, inside.name, module.full(entry.name), is_state=False)
        masters = self.prepared.masters
        node = masters.source(tensor, node, self.reads, inside.shown)
        self.reads.tensor(tensor, node, inside, own, derived=tensor in masters.derived)

    def _stacked(self, stack: Entry, node: Node, inside: Place, module: Place) -> None:
        tensors = [entry.tensor for entry in stack.layers if entry.tensor is not None]
        names = [module.full(entry.name) for entry in stack.layers]
        held = hold_stack(tensors, names, self.reads.ranks, inside.shown)
        masters = self.prepared.masters
        node = masters.source(tensors[0], node, self.reads, inside.shown)
        self.reads.stack(held, tensors, node, inside, derived=tensors[0] in masters.derived)

    def _extra(self, entry: Entry, saved: Node, place: Place) -> None:
        assert entry.extra_of is not None
        owner = entry.extra_of
        thunk = build(self.reads, saved, place, owner.get_extra_state())
        self.restores.append((place, lambda: owner.set_extra_state(thunk())))

    def _optimizer(self, value: object, node: Node, place: Place) -> None:
        if tag_of(node) != "optimizer":
            raise MismatchError(
                f"{place.shown}: the target is an optimizer, but {what(node)} was saved; an "
                "optimizer's state_dict() can be loaded into a dict of the same form only"
            )
        target = self.prepared.target(value, node, place)
        target.match()
        self.optimizers.append(target)

    def _object(self, value: Stateful, node: Node, place: Place) -> None:
        thunk = build(self.reads, node, place, value.state_dict())
        self.objects.append((place, value, node))

        def hand_over() -> None:
            value.load_state_dict(thunk())

        self.restores.append((place, hand_over))

    def _per_rank(
        self, value: object, own: PerRank[object], node: Node, place: Place, put: Put
    ) -> None:
        if tag_of(node) != "per_rank":
            raise MismatchError(
                f"{place.shown}: the target differs by rank, but {what(node)} was saved for all "
                "ranks; pass it without PerRank"
            )
        thunk = document(self.reads, node, own, place)

        def apply() -> None:
            stored = thunk()
            if stored is not ABSENT:
                put(restore(value, stored))

        self.restores.append((place, apply))

    def _ties(
        self, found: Mapping[str, Entry], saved: Mapping[object, Node], place: Place
    ) -> dict[object, Node]:
        """What names of a module are loaded from that were saved under the one they are tied to."""
        first = {id(entry.tensor): saved[name] for name, entry in found.items() if name in saved}
        ties: dict[object, Node] = {}
        for name, entry in found.items():
            if name not in saved and entry.tensor is not None:
                stored = self.reads.ranks.stored(place.full(entry.name))
                node = saved.get(place.inside(stored, entry.name), first.get(id(entry.tensor)))
                if node is not None:
                    ties[name] = node
        return ties

    def _names(
        self, target: Mapping[object, object], saved: Mapping[object, Node], place: Place
    ) -> None:
        missing = [key for key in target if key not in saved]
        # A second name of an array that is loaded leaves nothing out.
        loaded = {array_path(saved[key]) for key in target if key in saved} - {None}
        unexpected = [
            key for key in saved if key not in target and array_path(saved[key]) not in loaded
        ]
        self.differences.missing += [place.child(key, target).shown for key in missing]
        self.differences.unexpected += [place.child(key, saved).shown for key in unexpected]
        hint = prefix_hint(
            {str(key) for key in missing}, {str(key) for key in unexpected}, place.shown
        )
        if hint:
            self.differences.hints.append(hint)

    def _stack_hint(
        self, found: Mapping[str, Entry], saved: Mapping[object, Node], place: Place
    ) -> None:
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
                self.differences.hints.append(
                    f"{place.child(name, found).shown}: the checkpoint has "
                    f"{place.child(stack, saved).shown} of shape {info.shape}; if that has all "
                    "layers or experts, a rule with stacked loads separate ones from it "
                    "(docs/specification.md)"
                )
                return


def _slot(container: object, key: object) -> Put:
    def put(value: object) -> None:
        container[key] = value  # type: ignore[index]

    return put


def _only_python(value: object) -> bool:
    """Whether a value of the target holds nothing that is filled in place."""
    if isinstance(value, dict):
        return all(_only_python(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return all(_only_python(item) for item in value)
    return not (isinstance(value, _FILLED) or as_per_rank(value) is not None or is_stateful(value))
