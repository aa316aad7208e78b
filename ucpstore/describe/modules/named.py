"""The modules of a state, and the names under which their parameters are stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ucpstore.describe.modules.entries import first_names, parameters_of
from ucpstore.describe.place import ROOT, Place, is_plain
from ucpstore.describe.ranks import Ranks
from ucpstore.describe.values.counters import Counters
from ucpstore.errors import UnsupportedError
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
            if not isinstance(item, torch.Tensor):  # states are full of them; a place costs more
                yield from _find(item, (*keys, key), place.child(key, value), ranks)
    elif type(value) in (list, tuple):
        assert isinstance(value, (list, tuple))
        for at, item in enumerate(value):
            yield from _find(item, (*keys, at), place.child(at, ()), ranks)
