"""Names of the tensors that lie in rows, and of those that are copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ucpstore.describe.modules.named import Named
from ucpstore.describe.optimizers.names import Name
from ucpstore.describe.optimizers.owned import Holding, Owned
from ucpstore.describe.optimizers.rows import Copy, Row, RowOptimizer
from ucpstore.describe.ranks import Ranks
from ucpstore.describe.tensors.flat import Member, full_name_of, hold_flat, members_of
from ucpstore.describe.tensors.held import Held
from ucpstore.describe.tensors.hold import hold
from ucpstore.errors import StateError
from ucpstore.flat import Flat


def holding_of_rows(
    value: RowOptimizer, modules: Sequence[Named], ranks: Ranks, where: str
) -> Holding:
    """What an optimizer of rows and copies holds by name; StateError for what has no one name."""
    names = _Names.of(value, modules, where)
    groups = []
    for group in value.groups:
        found: list[Owned] = []
        for row in group:
            if isinstance(row, Row):
                found += _members(row, names, ranks, where)
            else:
                found.append(_copied(row, names, modules, ranks, where))
        groups.append(tuple(found))
    return Holding(value.optimizer, tuple(groups), value.loaded)


@dataclass(slots=True, eq=False)
class _Names:
    """Names of the tensors of rows: below the one module, or behind the module's key."""

    modules: Mapping[str, Named]
    weights: Mapping[str, torch.Tensor]
    places: frozenset[str]
    seen: set[str] = field(default_factory=set)

    @staticmethod
    def of(value: RowOptimizer, modules: Sequence[Named], where: str) -> _Names:
        places = set()
        for row in _all(value):
            if isinstance(row, Row):
                places.add(_place_of(row.flat))
            else:
                places.add(_holder(row.weight, modules, where).shown)
        weights = {module.full_name(each): each for module in modules for each in module.own}
        return _Names({module.shown: module for module in modules}, weights, frozenset(places))

    def check(self, place: str, member: Member, where: str) -> None:
        """Refuse a row that names what its module does not have, or with another shape.

        Its states would be stored under a name of which no other arrangement knows.
        """
        module = self.modules.get(place)
        if module is None or not member.name:
            return
        weight = module.parameters.get(member.name)
        if weight is None:
            has = ", ".join([*module.parameters][:3])
            raise StateError(
                f"{where}: a Flat names {member.name!r}, but the module {place!r} of the state has "
                f"no such parameter; it has {has}, ... Names are the module's own, without its key"
            )
        # A parameter whose memory was given back is empty; one that is cut tells its whole shape.
        comparable = weight.numel() and not isinstance(weight, DTensor)
        if comparable and tuple(weight.shape) != member.shape:
            raise StateError(
                f"{where}: a Flat names {member.name!r} with shape {member.shape}, but it has "
                f"shape {tuple(weight.shape)} in the module {place!r} of the state"
            )

    def name(self, place: str, key: str, where: str) -> Name:
        made = Name(place if len(self.places) > 1 else "", key, self.modules.get(place))
        if str(made) in self.seen:
            raise StateError(
                f"{where}: {made} is in two places of the optimizer; name each tensor once"
            )
        self.seen.add(str(made))
        return made


def _members(row: Row, names: _Names, ranks: Ranks, where: str) -> Iterator[Owned]:
    # All together: it checks that they do not overlap, and gives names by the specification.
    mesh = ranks.line(row.group, row.parts, where) if row.group else None
    whole = Flat(
        row.flat.tensor,
        row.flat.shapes,
        row.flat.over,
        offsets=row.flat.offsets,
        of=row.flat.of,
        is_state=False,
    )
    keys = hold_flat(whole, ranks, where, mesh)
    for key, member in zip(keys, members_of(row.flat, where), strict=True):
        name = names.name(_place_of(row.flat), key, where)
        names.check(_place_of(row.flat), member, where)
        full_name = full_name_of(row.flat, member, where)
        shapes, offsets = {member.name: member.shape}, {member.name: member.offset}

        def held(
            tensor: torch.Tensor,
            shown: str,
            shapes: Mapping[str, Sequence[int]] = shapes,
            offsets: Mapping[str, int] = offsets,
        ) -> Held:
            part = tensor.detach().narrow(0, row.at, row.flat.tensor.numel())
            own = Flat(
                part,
                shapes,
                row.flat.over,
                offsets=offsets,
                of=row.flat.of,
                is_state=tensor is not row.parameter,
            )
            return next(iter(hold_flat(own, ranks, shown, mesh).values()))

        weight = names.weights.get(full_name)
        yield Owned(name, full_name, row.parameter, weight, held, row.aliased)


def _place_of(flat: Flat) -> str:
    return "model" if flat.of is None else flat.of


def _copied(row: Copy, names: _Names, modules: Sequence[Named], ranks: Ranks, where: str) -> Owned:
    module = _holder(row.weight, modules, where)
    full_name = module.full_name(row.weight)

    def held(tensor: torch.Tensor, shown: str) -> Held:
        return hold(tensor, ranks, shown, full_name)

    name = names.name(module.shown, module.names[row.weight], where)
    return Owned(name, full_name, row.parameter, row.weight, held)


def _holder(weight: nn.Parameter, modules: Sequence[Named], where: str) -> Named:
    holder = next((module for module in modules if weight in module.names), None)
    if holder is None:
        raise StateError(
            f"{where}: a parameter of shape {tuple(weight.shape)} is in no module of the state, so "
            "it has no name; add the module that holds it"
        )
    return holder


def _all(value: RowOptimizer) -> Iterator[Row | Copy]:
    for group in value.groups:
        yield from group
