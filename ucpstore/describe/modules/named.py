"""Names of an optimizer's parameters, taken from the modules of the same state."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ucpstore.describe.modules.entries import Entry, first_names, parameters_of
from ucpstore.describe.place import ROOT, Place, is_plain
from ucpstore.describe.ranks import Ranks
from ucpstore.describe.tensors.stacks import check_ties, layer_of
from ucpstore.describe.values.counters import Counters
from ucpstore.errors import StateError, UnsupportedError
from ucpstore.perrank import PerRank
from ucpstore.wrappers import is_engine


@dataclass(frozen=True, slots=True, eq=False)
class Named:
    """A module of the state, its keys in the state, and the names of its parameters.

    `names` are those under which they are stored, `own` the module's own ones, the first of each
    parameter. `parameters` has them by every name of their own.
    """

    keys: tuple[object, ...]
    shown: str
    names: Mapping[nn.Parameter, str]
    own: Mapping[nn.Parameter, str]
    parameters: Mapping[str, nn.Parameter]

    def full_name(self, parameter: torch.Tensor) -> str:
        """The name by which a specification knows the parameter."""
        own = self.own[parameter]  # type: ignore[index]
        return f"{self.shown}.{own}" if self.shown else own


@dataclass(frozen=True, slots=True)
class Name:
    """A parameter's name in the optimizer: `prefix` is the module's key where there are several.

    `module` is the one of the state that has the parameter, if any.
    """

    prefix: str
    fqn: str
    module: Named | None

    def __str__(self) -> str:
        return f"{self.prefix}.{self.fqn}" if self.prefix else self.fqn


def modules_of(state: object, ranks: Ranks) -> tuple[Named, ...]:
    """Every module in a state's dicts, lists and tuples, in order.

    Raises UnsupportedError for a DeepSpeed engine under a specification, before a rule is asked.
    """
    return tuple(_find(state, (), ROOT, ranks))


def _find(value: object, keys: tuple[object, ...], place: Place, ranks: Ranks) -> Iterator[Named]:
    if ranks.spec is not None and (is_engine(value) or isinstance(value, Counters)):
        where = place.shown if is_engine(value) else "the state"  # it was made of an engine
        raise UnsupportedError(
            f"{where}: a DeepSpeed engine tells itself how it lies over the ranks, which does not "
            "go together with a specification; leave spec out (docs/deepspeed.md)"
        )
    if is_engine(value):
        value = {"model": value.module}  # type: ignore[attr-defined]
    if isinstance(value, nn.Module):
        found = parameters_of(value, place.shown)
        own = first_names(found)
        names = {
            each: place.inside(ranks.stored(place.full(name)), name) for each, name in own.items()
        }
        yield Named(keys, place.shown, names, own, found)
    elif is_plain(value):
        return
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _find(item, (*keys, key), place.child(key, value), ranks)
    elif type(value) in (list, tuple):
        assert isinstance(value, (list, tuple))
        for at, item in enumerate(value):
            yield from _find(item, (*keys, at), place.child(at, ()), ranks)


def keys_of(found: Sequence[Entry], place: Place, ranks: Ranks) -> dict[str, Entry]:
    """The entries of the module at `place` by their keys in the tree, which rules may rename."""
    keys: dict[str, Entry] = {}
    stacks: dict[str, list[tuple[int, Entry]]] = {}
    for entry in found:
        full_name = place.full(entry.name)
        key = place.inside(ranks.key(full_name), entry.name)
        layer = None if entry.tensor is None else layer_of(full_name, ranks)
        if layer is not None and (key in stacks or key not in keys):
            keys.setdefault(key, entry)
            stacks.setdefault(key, []).append((layer[1], entry))
            continue
        if key in keys:
            raise StateError(
                f"{place.full(entry.name)} and {place.full(keys[key].name)}: rules give both the "
                f"name {place.full(key)}; give each a name of its own"
            )
        keys[key] = entry
    for key, layers in stacks.items():
        layers.sort(key=lambda each: each[0])
        entries = tuple(entry for _, entry in layers)
        keys[key] = replace(entries[0], layers=entries)
    check_ties([entry for each in stacks.values() for _, entry in each], found, place)
    return keys


def names_of(
    optimizer: torch.optim.Optimizer, modules: Sequence[Named], where: str
) -> dict[torch.Tensor, Name]:
    """A name for each parameter of the optimizer's groups.

    It is relative to the first module that holds all of them; where none does, each has the name
    in the first module that holds it, behind that module's key in the state.
    """
    parameters = [
        (parameter, at)
        for at, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    ]
    for module in modules:
        if all(parameter in module.names for parameter, _ in parameters):
            return {p: Name("", module.names[p], module) for p, _ in parameters}
    found: dict[torch.Tensor, Name] = {}
    for number, (parameter, at) in enumerate(parameters):
        holder = next((module for module in modules if parameter in module.names), None)
        if holder is None:
            raise StateError(
                f"{where}: parameter {number} of the optimizer (group {at}, shape "
                f"{tuple(parameter.shape)}) is in no module of the state, so it has no name; add "
                f"the module that holds it, e.g. {{'model': model, 'optim': optimizer}}{_engine()}"
            )
        found[parameter] = Name(holder.shown, holder.names[parameter], holder)
    return found


def _engine() -> str:
    """Advice for those who use DeepSpeed, whose optimizers hold copies and rows."""
    return ", or pass a DeepSpeed engine itself" if "deepspeed" in sys.modules else ""


def inner_optimizer(value: object, where: str) -> torch.optim.Optimizer | None:
    """The optimizer whose state counts, inside of wrappers; None for other values.

    Raises UnsupportedError for one whose `state_dict` shows that its state lies elsewhere.
    """
    if isinstance(value, PerRank):
        return None
    inner = getattr(value, "optimizer", None)
    if isinstance(value, torch.optim.Optimizer):
        plain = type(value).state_dict is torch.optim.Optimizer.state_dict
        if plain:
            return value
        if isinstance(inner, torch.optim.Optimizer):
            return inner_optimizer(inner, where)
        if _shows_own_state(value):
            return value
        raise UnsupportedError(
            f"{where}: {type(value).__qualname__} keeps state that its `state` does not hold; put "
            "the optimizers that it is made of into the state one by one"
        )
    wrapper = hasattr(value, "param_groups") and not isinstance(value, type)
    return (
        inner_optimizer(inner, where)
        if wrapper and isinstance(inner, torch.optim.Optimizer)
        else None
    )


def _shows_own_state(optimizer: torch.optim.Optimizer) -> bool:
    try:
        shown = optimizer.state_dict()
    except Exception:  # as ZeroRedundancyOptimizer, which must gather its state first
        return False
    states = shown.get("state") if isinstance(shown, dict) else None
    return (
        isinstance(states, dict)
        and set(shown) == {"state", "param_groups"}
        and len(states) == len(optimizer.state)
    )
