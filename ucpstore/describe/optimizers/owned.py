"""What an optimizer holds by name: each of its parameters, or parts of one that is a flat row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ucpstore.describe.modules.named import Name, Named, inner_optimizer, names_of
from ucpstore.describe.ranks import Ranks
from ucpstore.describe.tensors.flat import Member, full_name_of, hold_flat, members_of
from ucpstore.describe.tensors.hold import Held, hold
from ucpstore.describe.tensors.stacks import layer_of
from ucpstore.errors import StateError
from ucpstore.flat import Flat, FlatOptimizer

Hold = Callable[[torch.Tensor, str], Held]


@dataclass(frozen=True, slots=True, eq=False)
class Owned:
    """One named tensor whose states an optimizer has.

    `parameter` is the optimizer's, the key of its states. `weight` is the module's parameter of
    this name, None where no module of the state has it. `hold` tells what of the parameter, or of
    a state of its shape, belongs to this name; None where the parameter is the weight itself.
    `aliased` says that the weight is a part of the parameter's memory. `layers` are, where rules
    stack parameters under this name, all of them with their full names, in rising order of index;
    `parameter` and `weight` are then the first.
    """

    name: Name
    full_name: str
    parameter: torch.Tensor
    weight: torch.Tensor | None
    hold: Hold | None = None
    aliased: bool = False
    layers: tuple[tuple[str, torch.Tensor], ...] = ()

    @property
    def trained(self) -> bool:
        """Whether the weight is trained, as far as the state tells."""
        return self.weight is None or self.weight.requires_grad


@dataclass(frozen=True, slots=True, eq=False)
class Holding:
    """An optimizer and, for each of its groups in order, what the group holds.

    `loaded` is called at the end of a load.
    """

    optimizer: torch.optim.Optimizer
    groups: tuple[tuple[Owned, ...], ...]
    loaded: Callable[[], None] | None = None

    def __iter__(self) -> Iterator[Owned]:
        for group in self.groups:
            yield from group

    def by_parameter(self, group: int) -> dict[torch.Tensor, list[Owned]]:
        """The names of each parameter of one group."""
        found: dict[torch.Tensor, list[Owned]] = {}
        for owned in self.groups[group]:
            found.setdefault(owned.parameter, []).append(owned)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A parameter of an optimizer in which, from element `at` on, the tensor of `flat` lies.

    `group` are the global ranks over which the row is cut in `parts`, in order, one for each where
    None; without a group the flat tells it. `aliased` as in `Owned`.
    """

    parameter: torch.Tensor
    flat: Flat
    at: int = 0
    aliased: bool = False
    group: tuple[int, ...] = ()
    parts: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """A parameter of an optimizer that is a copy, of another dtype, of a module's parameter."""

    parameter: torch.Tensor
    weight: nn.Parameter


@dataclass(frozen=True, slots=True, eq=False)
class RowOptimizer:
    """An optimizer of rows and copies, by group; `loaded` is called after a load."""

    optimizer: torch.optim.Optimizer
    groups: tuple[tuple[Row | Copy, ...], ...]
    loaded: Callable[[], None] | None = None


def is_optimizer(value: object, where: str) -> bool:
    """Whether a value of the state is stored as an optimizer."""
    rows = isinstance(value, (FlatOptimizer, RowOptimizer))
    return rows or inner_optimizer(value, where) is not None


def holding_of(value: object, modules: Sequence[Named], ranks: Ranks, where: str) -> Holding:
    """What an optimizer of the state holds by name.

    Raises StateError, naming `where`, for parameters that have no name or several.
    """
    if isinstance(value, FlatOptimizer):
        return _of_rows(_rows_of(value, where), modules, ranks, where)
    if isinstance(value, RowOptimizer):
        return _of_rows(value, modules, ranks, where)
    optimizer = inner_optimizer(value, where)
    assert optimizer is not None, "no optimizer"
    names = names_of(optimizer, modules, where)
    groups = tuple(tuple(_owned(g["params"], names, ranks)) for g in optimizer.param_groups)
    _check_stacks(groups, where)
    return Holding(optimizer, groups)


def _owned(
    parameters: Sequence[torch.Tensor], names: Mapping[torch.Tensor, Name], ranks: Ranks
) -> Iterator[Owned]:
    """What one group holds: each parameter, those that rules stack together."""
    found: dict[str, Owned] = {}
    order: dict[str, list[tuple[int, str, torch.Tensor]]] = {}
    for number, each in enumerate(parameters):
        name, full_name = names[each], _full_name(names[each], each)
        layer = layer_of(full_name, ranks)
        key = str(number) if layer is None else f"stack {name}"
        found.setdefault(key, Owned(name, full_name, each, each))
        if layer is not None:
            order.setdefault(key, []).append((layer[1], full_name, each))
    for key, owned in found.items():
        if key not in order:
            yield owned
            continue
        layers = tuple((n, p) for _, n, p in sorted(order[key], key=lambda layer: layer[0]))
        full_name, first = layers[0]
        yield Owned(owned.name, full_name, first, first, layers=layers)


def _check_stacks(groups: Sequence[Sequence[Owned]], where: str) -> None:
    seen: dict[str, tuple[int, Owned]] = {}
    for number, group in enumerate(groups):
        for owned in group:
            if not owned.layers:
                continue
            name = str(owned.name)
            at, other = seen.setdefault(name, (number, owned))
            if at != number:
                raise StateError(
                    f"{where}: {other.full_name} and {owned.full_name} are layers of the stack "
                    f"{name}, but lie in the groups {at} and {number}; put all layers of a stack "
                    "into one group"
                )
            trained = {parameter.requires_grad for _, parameter in owned.layers}
            if len(trained) > 1:
                raise StateError(
                    f"{where}: some layers of the stack {name} are frozen and some are trained, "
                    f"{owned.full_name} among them; freeze all of them or none"
                )


def _full_name(name: Name, parameter: torch.Tensor) -> str:
    assert name.module is not None
    return name.module.full_name(parameter)


def _rows_of(value: FlatOptimizer, where: str) -> RowOptimizer:
    """Each flat with the parameter in whose memory it lies."""
    optimizer = inner_optimizer(value.optimizer, where)
    if optimizer is None:
        raise StateError(
            f"{where}: the optimizer of a FlatOptimizer must be a torch.optim.Optimizer, but it is "
            f"a {type(value.optimizer).__name__}"
        )
    found: dict[torch.Tensor, list[Row]] = {
        parameter: [] for group in optimizer.param_groups for parameter in group["params"]
    }
    for flat in value.flats:
        if not isinstance(flat, Flat) or not flat.is_row:
            raise StateError(
                f"{where}: a FlatOptimizer needs a ucpstore.Flat, or several, for each parameter "
                f"of the optimizer, with names: Flat(tensor, {{name: shape}}); one is {flat!r}"
            )
        for parameter, rows in found.items():
            at = _start_in(parameter, flat.tensor)
            if at is not None:
                rows.append(Row(parameter, flat, at))
                break
        else:
            raise StateError(
                f"{where}: {flat!r} with {', '.join([*flat.shapes][:3])} lies in no parameter of "
                "the optimizer; give a Flat of the parameter itself, or of a part of it"
            )
    for number, (parameter, rows) in enumerate(found.items()):
        if not rows:
            raise StateError(
                f"{where}: parameter {number} of the optimizer, of shape {tuple(parameter.shape)}, "
                "has no Flat, so it is not known what lies in it"
            )
        rows.sort(key=lambda row: row.at)
        for row, behind in pairwise(rows):
            if row.at + row.flat.tensor.numel() > behind.at:
                raise StateError(
                    f"{where}: two Flats overlap in parameter {number} of the optimizer, that with "
                    f"{next(iter(row.flat.shapes))} and that with {next(iter(behind.flat.shapes))}"
                )
    groups = [
        tuple(row for each in group["params"] for row in found[each])
        for group in optimizer.param_groups
    ]
    return RowOptimizer(optimizer, tuple(groups))


def _start_in(parameter: torch.Tensor, tensor: torch.Tensor) -> int | None:
    """At which element of a parameter a tensor starts that lies in it."""
    if tensor is parameter:
        return 0
    if parameter.untyped_storage()._cdata != tensor.untyped_storage()._cdata:
        return None
    at = int(tensor.storage_offset()) - int(parameter.storage_offset())
    return at if at >= 0 and at + tensor.numel() <= parameter.numel() else None


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


def _of_rows(value: RowOptimizer, modules: Sequence[Named], ranks: Ranks, where: str) -> Holding:
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
