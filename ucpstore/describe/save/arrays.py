"""The arrays of a state: what is tied to what, and in which dtype each is stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import torch
from torch.distributed.tensor import DTensor

from ucpstore import dtypes
from ucpstore.describe.place import Owner, Place, dimension_names
from ucpstore.describe.ranks import Ranks
from ucpstore.describe.tensors.held import Held, View
from ucpstore.describe.tensors.hold import hold
from ucpstore.describe.tensors.memory import memory_of
from ucpstore.describe.tensors.numbers import wide_of
from ucpstore.describe.tensors.plain import check_kind, plain
from ucpstore.errors import StateError, UnsupportedError
from ucpstore.geometry import ArraySpec
from ucpstore.tree.encode import encode
from ucpstore.tree.nodes import Node


@dataclass(frozen=True, slots=True, eq=False)
class LocalArray:
    """One array and what this rank holds of it.

    The dtype of the views is another than that of `spec` where values are converted on their way
    into the store. `plain` says that it is no DTensor, so that ranks that hold the same boxes are
    not known to hold the same values.
    """

    spec: ArraySpec
    views: tuple[View, ...]
    plain: bool


@dataclass(slots=True, eq=False)
class LocalArrays:
    """The arrays that a walk over a state has come to, in `found` by path.

    `_first` has the path of the first array of each memory. Ties do not reach over items, which can
    be loaded without each other; all top-level leaves are one scope. `_kept` keeps every
    tensor alive meanwhile, so that no memory is used twice and taken for a tie.
    """

    ranks: Ranks
    casts: Sequence[tuple[str, str]]
    codec_of: Callable[[str], str | None]
    found: dict[str, LocalArray] = field(default_factory=dict)
    _first: dict[object, str] = field(default_factory=dict)
    _kept: list[torch.Tensor] = field(default_factory=list)

    def tensor(self, tensor: torch.Tensor, place: Place, owner: Owner | None) -> Node:
        """The node of any tensor outside of modules; that of a plain 0-d one has its value."""
        if isinstance(tensor, DTensor):
            return self._state_array(tensor, place, owner)
        check_kind(tensor, place.shown)
        if tensor.dim() == 0 and not self._is_averaged(owner, place):
            value = plain(tensor, place.shown).cpu()
            if owner is not None and not owner.is_state:
                scale = hold(tensor, self.ranks, place.shown, owner.full_name).scale
                value = value if scale == 1 else value * scale
            return encode(value, place.shown)
        return self._state_array(tensor, place, owner)

    def array(
        self,
        tensor: torch.Tensor,
        place: Place,
        *,
        names: tuple[str, ...] | None = None,
        identity: object | None = None,
        tie: bool = True,
        full_name: str | None = None,
        owner: Owner | None = None,
        state: bool = False,
    ) -> Node:
        """The node of a tensor that is an array, or a link to the array that it is tied to.

        `identity` tells the same tensor where its memory does not, `full_name` or `owner` what a
        specification goes by. `state` says that it is one of an optimizer.
        """
        full_name = owner.full_name if owner is not None else full_name
        held = hold(tensor, self.ranks, place.shown, full_name)
        self._kept.append(tensor)
        if tie:
            known = self._known(held, place, identity, memory_of(tensor))
            if known is not None:
                return {"link": known}
        if names is None:
            names = dimension_names(place.name, len(held.shape))
        if state:
            # A parameter may have some states on one rank, and others on another. A scaled one is
            # added up from all ranks, each of which has its whole gradient.
            copies = owner is not None and not owner.is_state
            held = replace(held, alone="", tied=False, scale=held.scale if copies else 1)
        return self._put(held, place, names, is_plain=not isinstance(tensor, DTensor))

    def part(self, held: Held, place: Place, name: str) -> Node:
        """The node of what is held of one array, whose dimensions are named after `name`.

        Nothing else is tied to it: it is a part of a row, or a stack.
        """
        self._kept.append(held.local)
        names = dimension_names(name, len(held.shape))
        return self._put(held, place, names, is_plain=True)

    def _is_averaged(self, owner: Owner | None, place: Place) -> bool:
        """Whether a 0-d state is a moment of a 0-d parameter of which the mean is stored."""
        if owner is None or owner.parameter.dim() or owner.key == "step":
            return False
        return hold(owner.parameter, self.ranks, place.shown, owner.full_name).mean

    def _state_array(self, tensor: torch.Tensor, place: Place, owner: Owner | None) -> Node:
        if owner is None:
            return self.array(tensor, place)
        if tensor.shape != owner.parameter.shape:
            return self.array(tensor, place, tie=False, state=True)
        names = dimension_names(owner.name, tensor.dim())
        return self.array(tensor, place, names=names, tie=False, owner=owner, state=True)

    def _known(self, held: Held, place: Place, *memory: object | None) -> str | None:
        """The path of the array of the same memory, if there is one; else this is the first."""
        keys = [(place.item, key) for key in memory if key is not None]
        known = next((self._first[key] for key in keys if key in self._first), None)
        if known is None:
            self._first.update((key, place.path) for key in keys)
        else:
            self._owned(known, held)
        return known

    def _owned(self, path: str, held: Held) -> None:
        """A rank may come to the tensor that others are tied to after one of those."""
        known = self.found[path]
        if known.spec.tied and not held.tied:
            spec = replace(known.spec, alone=held.alone, tied=False)
            self.found[path] = replace(known, spec=spec)

    def _put(
        self,
        held: Held,
        place: Place,
        names: tuple[str, ...],
        *,
        is_plain: bool,
    ) -> Node:
        dtype = self._stored_dtype(held.dtype, place)
        if held.mean:
            _check_mean(held.dtype, dtype, place)
        codec = self.codec_of(place.shown)
        spec = ArraySpec(
            place.path,
            held.shape,
            dtype,
            names,
            held.partition,
            codec,
            held.alone,
            held.tied,
            held.mean,
        )
        views = held.views
        if held.scale != 1:
            # in a dtype that has both the own values and the stored ones
            wide = wide_of(held.local.dtype, dtype)
            views = tuple(View(view.tensor.to(wide) * held.scale, view.pieces) for view in views)
        if place.path in self.found:
            raise StateError(f"{place.shown}: two tensors have the path {place.path}; rename one")
        self.found[place.path] = LocalArray(spec, views, is_plain)
        return {"array": place.path}

    def _stored_dtype(self, dtype: str, place: Place) -> str:
        """In which dtype an array of `dtype` is stored, by the first pattern that matches."""
        for pattern, wanted in self.casts:
            if fnmatchcase(place.shown, pattern):
                # A load never converts to a narrower kind, so it could not take back what became a
                # float of an int.
                if dtypes.kind(dtype) != dtypes.kind(wanted):
                    raise UnsupportedError(
                        f"{place.shown}: cast[{pattern!r}] asks for {wanted}, but {dtype} is "
                        f"stored as {dtypes.kind(dtype)} only, so that it can be loaded again; "
                        f"put {place.shown!r}: torch.{dtype} before this pattern, the first that "
                        "matches counts"
                    )
                return wanted
        return dtype


def _check_mean(own: str, stored: str, place: Place) -> None:
    """Refuse a mean of values that would be rounded before they are added up."""
    if wide_of(dtypes.to_torch(own), stored) != dtypes.to_torch(stored):
        raise UnsupportedError(
            f"{place.shown}: a rule averages it, and cast stores it as {stored}, but it is {own}: "
            "the ranks' values would be rounded before their mean is made; put "
            f"{place.shown!r}: torch.{own} before the pattern that matches it, the first counts"
        )
