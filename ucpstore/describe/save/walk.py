"""The walk over a state: what is stored for each kind of value."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import numpy as np
import torch
from torch import nn

from ucpstore.describe.engines.deepspeed import expand
from ucpstore.describe.modules.named import Named
from ucpstore.describe.optimizers.holding import holding_of, is_optimizer
from ucpstore.describe.place import Owner, Place, is_plain
from ucpstore.describe.ranks import Ranks
from ucpstore.describe.save.arrays import LocalArrays
from ucpstore.describe.save.module import module_dict_node, module_node
from ucpstore.describe.save.optimizer import optimizer_node
from ucpstore.describe.tensors.flat import hold_flat
from ucpstore.describe.tensors.numpys import from_numpy, identity_of
from ucpstore.describe.values.objects import is_stateful
from ucpstore.describe.values.perrank import PerRankDocument, as_per_rank, contents, coordinate
from ucpstore.flat import Flat
from ucpstore.format.documents import canonical
from ucpstore.perrank import PerRank
from ucpstore.tree.encode import encode, encode_value
from ucpstore.tree.nodes import Node
from ucpstore.wrappers import is_engine

_MAPPING_TAGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered_dict"}


@dataclass(slots=True, eq=False)
class SaveWalk:
    """One walk over a state, which is the `Walk` of `protocol.py`."""

    ranks: Ranks
    patterns: tuple[str, ...]
    modules: tuple[Named, ...]
    arrays: LocalArrays
    documents: list[PerRankDocument] = field(default_factory=list)

    def value(self, value: object, place: Place, owner: Owner | None = None) -> Node:
        """The node of any value; tensors of the owner's shape have its dimension names."""
        if is_plain(value) and not self.patterns:
            return encode(value, place.shown)
        own = self._per_rank(value, place)
        if own is not None:
            return self._document(own, place)
        if isinstance(value, torch.Tensor):
            return self.arrays.tensor(value, place, owner)
        if isinstance(value, Flat):
            return self._flat(value, place)
        if is_engine(value):
            value = expand(value, place.shown)
        if isinstance(value, np.ndarray):
            tensor = from_numpy(value, place.shown)
            return self.arrays.array(tensor, place, identity=identity_of(value))
        if isinstance(value, nn.Module):
            return module_node(value, place, self)
        if is_optimizer(value, place.shown):
            holding = holding_of(value, self.modules, self.ranks, place.shown)
            return optimizer_node(holding, place, self)
        if is_stateful(value):
            return self.value(value.state_dict(), place)
        return self._container(value, place, owner)

    def _container(self, value: object, place: Place, owner: Owner | None) -> Node:
        if isinstance(value, OrderedDict) and hasattr(value, "_metadata"):
            return module_dict_node(value, place, self)
        tag = _MAPPING_TAGS.get(type(value))
        if tag is not None:
            assert isinstance(value, dict)
            return {tag: self._pairs(value, place, owner)}
        if type(value) in (list, tuple):
            assert isinstance(value, (list, tuple))
            items = [self.value(item, place.child(at, ()), owner) for at, item in enumerate(value)]
            return items if isinstance(value, list) else {"tuple": items}
        return encode(value, place.shown)

    def _pairs(self, values: dict[object, object], place: Place, owner: Owner | None) -> list[Node]:
        pairs: list[Node] = []
        for key, item in values.items():
            inside = place.child(key, values)  # first, for it says which key cannot be stored
            node = encode(key, f"{inside.shown} (a key)")
            pairs.append([node, self.value(item, inside, owner)])
        return pairs

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

    def _flat(self, flat: Flat, place: Place) -> Node:
        """The same node as that of a whole tensor, or a dict of them."""
        found = hold_flat(flat, self.ranks, place.shown)
        if not flat.is_row:
            return self.arrays.part(found[""], place, flat.of or place.name)
        pairs: list[Node] = [
            [key, self.arrays.part(held, place.child(key, found), key)]
            for key, held in found.items()
        ]
        return {"dict": pairs}
