"""Groups of an optimizer on the load side: hyper-parameters, which follow the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ucpstore.describe.optimizers.keys import IDENTITY
from ucpstore.describe.place import Place
from ucpstore.describe.reads.build import Thunk, build
from ucpstore.describe.reads.reads import Reads
from ucpstore.tree.nodes import Node, same
from ucpstore.tree.optimizer import Group

_SCHEDULED = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
"""Values that torch's schedulers add to the groups of any optimizer."""


@dataclass(slots=True, eq=False)
class GroupsTarget:
    """The groups of one optimizer of the target: `match` each in order, then `finish`."""

    optimizer: torch.optim.Optimizer
    saved: Sequence[Group]
    place: Place
    reads: Reads
    _values: list[dict[str, Thunk]] = field(default_factory=list)

    def match(
        self, index: int, members: Sequence[str], by_name: Mapping[str, Group]
    ) -> Mapping[str, Node]:
        """The hyper-parameters for a group: those of its parameters, which must agree."""
        found = [by_name[name] for name in members if name in by_name]
        if not members:
            # the values of a group without parameters cannot follow any
            found = sorted(
                (group for group in self.saved if group.index == index),
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
        self._values.append(
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

    def finish(self) -> None:
        """Put the hyper-parameters in place."""
        for group, values_of in zip(self.optimizer.param_groups, self._values, strict=True):
            for key, thunk in values_of.items():
                group[key] = _hyper_parameter(group.get(key), thunk())


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
