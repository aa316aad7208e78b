"""The walk over a target: what is done for each kind of value, and in which order it ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from ucpstore.describe.engines.deepspeed import expand
from ucpstore.describe.kinds import DICTS, children, only_values, what
from ucpstore.describe.load.module import ModuleTarget, Restore
from ucpstore.describe.load.names import compare_names
from ucpstore.describe.load.optimizer import OptimizerTarget
from ucpstore.describe.load.prepared import PreparedOptimizers
from ucpstore.describe.optimizers.holding import is_optimizer
from ucpstore.describe.optimizers.rows import RowOptimizer
from ucpstore.describe.place import Place
from ucpstore.describe.reads.build import ABSENT, build, document
from ucpstore.describe.reads.reads import Reads
from ucpstore.describe.tensors.flat import hold_flat
from ucpstore.describe.values.counters import Counters
from ucpstore.describe.values.objects import Stateful, is_stateful
from ucpstore.describe.values.perrank import as_per_rank, restore
from ucpstore.errors import MismatchError, StateError
from ucpstore.flat import Flat, FlatOptimizer
from ucpstore.perrank import PerRank
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


@dataclass(slots=True, eq=False)
class TargetWalk:
    """One walk over a target and, beside it, the stored tree.

    `value` for each item, and after the reads `finish`.
    """

    reads: Reads
    prepared: PreparedOptimizers
    optimizers: list[OptimizerTarget] = field(default_factory=list)
    objects: list[tuple[Place, Stateful, Node]] = field(default_factory=list)
    restores: list[Restore] = field(default_factory=list)
    rebuilds: list[Callable[[], None]] = field(default_factory=list)

    @property
    def found(self) -> int:
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

    def value(self, value: object, node: Node, place: Place, put: Put) -> None:
        """Match a value of the target; what is wrong with it becomes one of the differences."""
        self.reads.differences.attempt(self._one, value, node, place, put)

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
            module = ModuleTarget(value, place, self.reads, self.prepared.masters)
            self.restores += module.match(node)
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
        compare_names(dict.fromkeys(wanted), saved, place, self.reads.differences)
        for key, item in value.items():
            inside = place.child(key, value)
            if key in saved:
                self.value(item, saved[key], inside, slot(value, key))
            else:
                self.prepared.absent(item, inside)
        if not value and "state" in place.shown and any(type(key) is int for key in saved):
            self.reads.differences.hints.append(
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
        compare_names(dict.fromkeys(found), saved, place, self.reads.differences)
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
            self.value(item, part, place.child(at, ()), slot(items, at))
        if isinstance(value, tuple):
            # around the same tensors, for the values beside them; inner tuples come first
            self.rebuilds.append(lambda: put(tuple(items)))

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


def slot(container: object, key: object) -> Put:
    """The slot of a container under a key."""

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
