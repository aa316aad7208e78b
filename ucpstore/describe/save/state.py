"""The save side: from the user's state to arrays, a typed tree and per-rank documents.

Only metadata is read: no tensor is copied but for foreign byte orders, pending conjugations and
0-d values that lie in the tree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ucpstore import dtypes
from ucpstore.describe.engines.deepspeed import expand
from ucpstore.describe.kinds import array_path
from ucpstore.describe.modules.entries import Entry, entries
from ucpstore.describe.modules.keys import keys_of
from ucpstore.describe.modules.named import Named, modules_of
from ucpstore.describe.optimizers.holding import holding_of, is_optimizer
from ucpstore.describe.place import ROOT, Owner, Place, dimension_names, is_plain
from ucpstore.describe.ranks import Ranks
from ucpstore.describe.save.optimizer import optimizer_node
from ucpstore.describe.tensors.flat import hold_flat
from ucpstore.describe.tensors.held import Held, View
from ucpstore.describe.tensors.hold import hold
from ucpstore.describe.tensors.memory import memory_of
from ucpstore.describe.tensors.numbers import wide_of
from ucpstore.describe.tensors.numpys import from_numpy, identity_of
from ucpstore.describe.tensors.plain import check_kind, plain
from ucpstore.describe.tensors.stacks import hold_stack
from ucpstore.describe.values.objects import is_stateful
from ucpstore.describe.values.perrank import PerRankDocument, as_per_rank, contents, coordinate
from ucpstore.errors import StateError, UnsupportedError
from ucpstore.flat import Flat
from ucpstore.format.documents import canonical
from ucpstore.geometry import ArraySpec
from ucpstore.perrank import PerRank
from ucpstore.spec import Spec
from ucpstore.tree.encode import encode, encode_value
from ucpstore.tree.nodes import Node
from ucpstore.wrappers import EXTRA_STATE, is_engine

_MAPPING_TAGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered_dict"}


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


@dataclass(frozen=True, slots=True, eq=False)
class LocalState:
    """The state as this rank sees it; `arrays` and `per_rank` are sorted by path."""

    tree: Node
    arrays: tuple[LocalArray, ...]
    per_rank: tuple[PerRankDocument, ...]


def check_state(state: object) -> Mapping[str, object]:
    """The items of a state; StateError for what is no mapping of items and no engine."""
    if is_engine(state):
        return expand(state, "")
    if not isinstance(state, Mapping):
        raise StateError(
            f"state must be a dict of items, but it is a {type(state).__name__}; "
            "pass {'model': model, 'optim': optimizer} or the like"
        )
    return state


def describe(
    state: object,
    *,
    per_rank: Sequence[str] | str = (),
    cast: Sequence[tuple[str, str]] = (),
    codec_of: Callable[[str], str | None] = lambda name: None,
    group_ranks: Mapping[int, int],
    rank: int | None = None,
    spec: Spec | None = None,
) -> LocalState:
    """Describe a state; no communication, and nothing in it changes.

    `per_rank` are name patterns (`loader.*`, as in fnmatch, over names joined with dots) of values
    that differ by rank, `cast` pairs of such a pattern and the Zarr name of the dtype in which
    arrays of these names are stored (the first that matches counts). 0-d tensors that lie in the
    tree keep theirs: a `step` of 1001 would be 1000 in bfloat16. `codec_of` gives the compressor
    of the array of a name. `group_ranks` maps global ranks to ranks of the process group, `rank` is
    this process's rank in it (needed only where torch.distributed is not initialised). `spec` says
    how plain tensors lie over the ranks. Raises StateError or UnsupportedError, naming the path,
    for whatever cannot be stored.
    """
    state = check_state(state)
    patterns = (per_rank,) if isinstance(per_rank, str) else tuple(per_rank)
    ranks = Ranks.here(group_ranks, rank, spec)
    walk = _SaveWalk(ranks, patterns, tuple(cast), codec_of, modules_of(dict(state), ranks))
    tree = walk.value(dict(state), ROOT)
    return LocalState(
        tree,
        tuple(walk.arrays[path] for path in sorted(walk.arrays)),
        tuple(sorted(walk.documents, key=lambda document: document.path)),
    )


@dataclass(slots=True, eq=False)
class _SaveWalk:
    """One walk over a state.

    `first` has the path of the first array of each memory. Ties do not reach over items, which can
    be loaded without each other; all top-level leaves are one scope. `kept` keeps every
    tensor alive meanwhile, so that no memory is used twice and taken for a tie.
    """

    ranks: Ranks
    patterns: tuple[str, ...]
    casts: tuple[tuple[str, str], ...]
    codec_of: Callable[[str], str | None]
    modules: tuple[Named, ...]
    arrays: dict[str, LocalArray] = field(default_factory=dict)
    documents: list[PerRankDocument] = field(default_factory=list)
    first: dict[object, str] = field(default_factory=dict)
    kept: list[torch.Tensor] = field(default_factory=list)

    def value(self, value: object, place: Place, owner: Owner | None = None) -> Node:
        """The node of any value; see `ucpstore.describe.save.optimizer.Walk`."""
        if is_plain(value) and not self.patterns:
            return encode(value, place.shown)
        own = self._per_rank(value, place)
        if own is not None:
            return self._document(own, place)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, place, owner)
        if isinstance(value, Flat):
            return self._flat(value, place)
        if is_engine(value):
            value = expand(value, place.shown)
        if isinstance(value, np.ndarray):
            tensor = from_numpy(value, place.shown)
            return self._array(tensor, place, identity=identity_of(value))
        if isinstance(value, nn.Module):
            return self._module(value, place)
        if is_optimizer(value, place.shown):
            holding = holding_of(value, self.modules, self.ranks, place.shown)
            return optimizer_node(holding, place, self)
        if is_stateful(value):
            return self.value(value.state_dict(), place)
        return self._container(value, place, owner)

    def _container(self, value: object, place: Place, owner: Owner | None) -> Node:
        if isinstance(value, OrderedDict) and hasattr(value, "_metadata"):
            return self._module_dict(value, place)
        tag = _MAPPING_TAGS.get(type(value))
        if tag is not None:
            assert isinstance(value, dict)
            return {
                tag: [
                    [
                        encode(key, f"{place.shown} (a key)"),
                        self.value(item, place.child(key, value), owner),
                    ]
                    for key, item in value.items()
                ]
            }
        if type(value) in (list, tuple):
            assert isinstance(value, (list, tuple))
            items = [self.value(item, place.child(at, ()), owner) for at, item in enumerate(value)]
            return items if isinstance(value, list) else {"tuple": items}
        return encode(value, place.shown)

    def _per_rank(self, value: object, place: Place) -> PerRank[object] | None:
        own = as_per_rank(value)
        if (
            own is None
            and place.depth
            and any(fnmatchcase(place.shown, pattern) for pattern in self.patterns)
        ):
            return PerRank(value)
        return own

    def _document(self, own: PerRank[object], place: Place) -> Node:
        at = coordinate(own, self.ranks, place.shown)
        data = canonical(encode_value(contents(own.value, place.shown), place.shown))
        self.documents.append(PerRankDocument(place.path, at.axis, at.index, at.count, data))
        return {"per_rank": {"path": place.path, "axis": at.axis, "count": at.count}}

    def _module(self, module: nn.Module, place: Place) -> Node:
        found = keys_of(entries(module, place.shown), place, self.ranks)
        pairs: list[Node] = []
        for key, entry in found.items():
            inside = place.child(key, found)
            if entry.tensor is not None:
                node = self._entry(entry, entry.tensor, inside, place)
            else:
                assert entry.extra_of is not None
                node = self.value(entry.extra_of.get_extra_state(), inside)
            pairs.append([key, node])
        return {"dict": pairs}

    def _entry(self, entry: Entry, tensor: torch.Tensor, inside: Place, module: Place) -> Node:
        if entry.layers:
            return self._stacked(entry, inside, module)
        full_name = module.full(entry.name)
        stored = self.ranks.stored(full_name)
        tied = stored != self.ranks.key(full_name)
        at = module.child(module.inside(stored, entry.name), ()) if tied else inside
        identity = ("identity", id(tensor))
        node = self._array(tensor, at, identity=identity, full_name=full_name)
        return {"link": at.path} if tied and array_path(node) == at.path else node

    def _stacked(self, stack: Entry, inside: Place, module: Place) -> Node:
        tensors = [entry.tensor for entry in stack.layers if entry.tensor is not None]
        self.kept += tensors
        names = [module.full(entry.name) for entry in stack.layers]
        held = hold_stack(tensors, names, self.ranks, inside.shown)
        dims = dimension_names(inside.name, len(held.shape))
        return self._put(held, inside, dims, is_plain=True)

    def _module_dict(self, values: Mapping[object, object], place: Place) -> Node:
        """What `module.state_dict()` returned: the same node as that of the module."""
        pairs: list[Node] = []
        for key, value in values.items():
            inside = place.child(key, values)
            if isinstance(value, torch.Tensor) and not str(key).endswith(EXTRA_STATE):
                node = self._array(value, inside)
            else:
                node = self.value(value, inside)
            pairs.append([encode(key, place.shown), node])
        return {"dict": pairs}

    def _flat(self, flat: Flat, place: Place) -> Node:
        """The same node as that of a whole tensor, or a dict of them."""
        found = hold_flat(flat, self.ranks, place.shown)
        self.kept.append(flat.tensor)
        if not flat.is_row:
            held = found[""]
            names = dimension_names(flat.of or place.name, len(held.shape))
            return self._put(held, place, names, is_plain=True)
        pairs: list[Node] = []
        for key, held in found.items():
            names = dimension_names(key, len(held.shape))
            inside = place.child(key, found)
            pairs.append([key, self._put(held, inside, names, is_plain=True)])
        return {"dict": pairs}

    def part(self, held: Held, place: Place, name: str) -> Node:
        """What is held of one tensor of a row; see `ucpstore.describe.save.optimizer.Walk`."""
        self.kept.append(held.local)
        names = dimension_names(name, len(held.shape))
        return self._put(held, place, names, is_plain=True)

    def _tensor(self, tensor: torch.Tensor, place: Place, owner: Owner | None) -> Node:
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

    def _is_averaged(self, owner: Owner | None, place: Place) -> bool:
        """Whether a 0-d state is a moment of a 0-d parameter of which the mean is stored."""
        if owner is None or owner.parameter.dim() or owner.key == "step":
            return False
        return hold(owner.parameter, self.ranks, place.shown, owner.full_name).mean

    def _state_array(self, tensor: torch.Tensor, place: Place, owner: Owner | None) -> Node:
        if owner is None:
            return self._array(tensor, place)
        if tensor.shape != owner.parameter.shape:
            return self._array(tensor, place, tie=False, state=True)
        names = dimension_names(owner.name, tensor.dim())
        return self._array(tensor, place, names=names, tie=False, owner=owner, state=True)

    def _array(
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
        full_name = owner.full_name if owner is not None else full_name
        held = hold(tensor, self.ranks, place.shown, full_name)
        self.kept.append(tensor)
        if tie:
            keys = [(place.item, key) for key in (identity, memory_of(tensor)) if key is not None]
            known = next((self.first[key] for key in keys if key in self.first), None)
            if known is not None:
                self._owned(known, held)
                return {"link": known}
            self.first.update((key, place.path) for key in keys)
        if names is None:
            names = dimension_names(place.name, len(held.shape))
        if state:
            # A parameter may have some states on one rank, and others on another. A scaled one is
            # added up from all ranks, each of which has its whole gradient.
            copies = owner is not None and not owner.is_state
            held = replace(held, alone="", tied=False, scale=held.scale if copies else 1)
        return self._put(held, place, names, is_plain=not isinstance(tensor, DTensor))

    def _owned(self, path: str, held: Held) -> None:
        """A rank may come to the tensor that others are tied to after one of those."""
        known = self.arrays[path]
        if known.spec.tied and not held.tied:
            spec = replace(known.spec, alone=held.alone, tied=False)
            self.arrays[path] = replace(known, spec=spec)

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
        if place.path in self.arrays:
            raise StateError(f"{place.shown}: two tensors have the path {place.path}; rename one")
        self.arrays[place.path] = LocalArray(spec, views, is_plain)
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
