"""Values made anew from nodes, for what is handed over rather than filled in place."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ucpstore import dtypes
from ucpstore.describe.kinds import array_path, only_values, saved_scalar
from ucpstore.describe.place import Place
from ucpstore.describe.reads.reads import Reads
from ucpstore.describe.tensors.dtensor import like
from ucpstore.describe.tensors.held import View, whole
from ucpstore.describe.tensors.hold import hold
from ucpstore.describe.tensors.numpys import from_numpy, to_numpy
from ucpstore.describe.values.perrank import as_per_rank, coordinate
from ucpstore.errors import CorruptError, MismatchError, StateError
from ucpstore.format.per_rank import alone_path, from_row, packed_path
from ucpstore.geometry import Box, Index, Piece
from ucpstore.perrank import PerRank
from ucpstore.tree.decode import decode
from ucpstore.tree.nodes import MAPPINGS, Node, items_of, pairs_of, tag_of

Thunk = Callable[[], object]
"""Gives a value, once all reads are done."""

ABSENT: Final = object()
"""What a thunk gives where the checkpoint has nothing for this rank: leave the slot as it is."""


def build(
    reads: Reads,
    node: Node,
    place: Place,
    current: object = None,
    device: torch.device | str = "cpu",
) -> Thunk:
    """A value from a node, its tensors in the layout of those at the same place in `current`.

    A plain tensor of another shape than the current one, and every tensor that `current` does not
    have, comes as saved: plain, whole, on the device of the current one or else on `device`. A
    value per rank comes without the PerRank that `current` has around it.
    """
    path = array_path(node)
    if path is not None:
        return _array(reads, node, place, current, device)
    tag = tag_of(node)
    if tag == "scalar":
        on = current.device if isinstance(current, torch.Tensor) else device
        return lambda: saved_scalar(node).to(on)
    if tag == "per_rank":
        return document(reads, node, as_per_rank(current) or PerRank(current), place)
    if tag == "optimizer":
        raise StateError(f"{place.shown}: saved from an optimizer; the target has none here")
    if only_values(node):
        return lambda: decode(node)
    if tag in MAPPINGS:
        return _mapping(reads, node, place, current, device)
    return _sequence(reads, node, place, current, device)


def document(reads: Reads, node: Node, own: PerRank[object], place: Place) -> Thunk:
    """This rank's document of a per-rank value, decoded; missing where the axis differs."""
    assert isinstance(node, dict)
    stored = node["per_rank"]
    assert isinstance(stored, dict)
    path, axis, count = str(stored["path"]), stored["axis"], stored["count"]
    at = coordinate(own, reads.ranks, place.shown)
    if (at.axis, at.count) != (axis, count):
        if own.reshape is not None:
            assert isinstance(count, int)
            reshape = own.reshape
            values = _all_documents(reads, path, count)
            return lambda: reshape(values(), at.index, at.count)
        reads.differences.kept[place.shown] = (
            f"{place.shown}: a value per rank, saved for {count} along the axis {axis!r}; the "
            f"target has {at.count} along {at.axis!r}. Use the same axis and count, pass "
            "PerRank(value, axis, reshape=function) to make it of all that were saved, leave it "
            "out of the target, or pass strict=False to keep the target's"
        )
        return lambda: ABSENT
    alone = alone_path(path, at.index)
    if alone in reads.arrays:
        document = _bytes_of(reads, alone)
        return lambda: decode(json.loads(document.numpy().tobytes()))
    packed = packed_path(path)
    length = reads.info(packed).shape[1]
    buffer = torch.empty((1, length), dtype=torch.uint8, device="cpu")
    row = Piece(Box((at.index, 0), (1, length)), Box.whole((1, length)))
    reads.raw(packed, View(buffer, (row,)))
    return lambda: _unpacked(buffer, packed, at.index)


def _all_documents(reads: Reads, path: str, count: int) -> Callable[[], list[object]]:
    """The values of all indices, decoded, once all reads are done."""
    long = {index: alone_path(path, index) for index in range(count)}
    alone = {index: _bytes_of(reads, each) for index, each in long.items() if each in reads.arrays}
    packed = packed_path(path)
    rows = _bytes_of(reads, packed) if packed in reads.arrays else None

    def decoded(index: int) -> object:
        if index in alone:
            return decode(json.loads(alone[index].numpy().tobytes()))
        if rows is None:
            raise CorruptError(f"{path}: there is no document of index {index}")
        return _unpacked(rows[index], packed, index)

    return lambda: [decoded(index) for index in range(count)]


def _bytes_of(reads: Reads, path: str) -> torch.Tensor:
    shape = reads.info(path).shape
    buffer = torch.empty(shape, dtype=torch.uint8, device="cpu")
    reads.raw(path, View(buffer, whole(shape)))
    return buffer


def _unpacked(row: torch.Tensor, key: str, index: int) -> object:
    data = from_row(row.numpy().tobytes(), key)
    if data is None:
        raise CorruptError(f"{key}: row {index} names an array of its own that does not exist")
    return decode(json.loads(data))


def _array(
    reads: Reads, node: Node, place: Place, current: object, device: torch.device | str
) -> Thunk:
    if isinstance(current, DTensor):
        target: torch.Tensor = like(current, current.dtype)
        reads.tensor(target, node, place)
        return lambda: target
    shape = _shape_here(reads, node, current, place)
    if isinstance(current, torch.Tensor) and tuple(current.shape) == shape:
        made = torch.empty_like(current.detach())
    else:
        on = current.device if isinstance(current, torch.Tensor) else device
        on = "cpu" if isinstance(current, np.ndarray) else on
        dtype = dtypes.to_torch(reads.info(array_path(node)).dtype)
        made = torch.empty(shape, dtype=dtype, device=on)
    reads.tensor(made, node, place)
    if isinstance(current, np.ndarray):
        kind = current.dtype
        return lambda: to_numpy(made, kind)
    return lambda: made


def _shape_here(reads: Reads, node: Node, current: object, place: Place) -> Index:
    """The shape of the plain tensor that this rank has of an array.

    It is that of the current one where a rule makes the stored shape of it, else the stored one.
    """
    stored, spec = reads.info(array_path(node)).shape, reads.ranks.spec
    if spec is None:
        return stored
    if isinstance(current, np.ndarray):
        current = from_numpy(current, place.shown)
    if isinstance(current, torch.Tensor):
        own = tuple(current.shape)
        if hold(current, reads.ranks, place.shown).shape == stored:
            return own
    lowered = spec.lower(place.shown, stored, reads.ranks.rank)
    if lowered.shape == stored:
        return stored
    has = f"one of shape {own}" if isinstance(current, torch.Tensor) else "none there"
    raise MismatchError(
        f"{place.shown}: stored with shape {stored}, of which rule {lowered.rule} gives this rank "
        f"a part, but the target has {has}, which does not tell the shape of the part; give it a "
        "tensor of this rank's shape before the load"
    )


def _mapping(
    reads: Reads, node: Node, place: Place, current: object, device: torch.device | str
) -> Thunk:
    now = current if isinstance(current, Mapping) else {}
    pairs = pairs_of(node)
    keys = dict.fromkeys(decode(key) for key, _ in pairs)
    thunks = {
        key: build(reads, item, place.child(key, keys), now.get(key), device)
        for key, (_, item) in zip(keys, pairs, strict=True)
    }
    empty: Node = {str(tag_of(node)): []}

    def make() -> object:
        made = decode(empty)
        assert isinstance(made, dict)
        values = ((key, thunk()) for key, thunk in thunks.items())
        made.update((key, value) for key, value in values if value is not ABSENT)
        return made

    return make


def _sequence(
    reads: Reads, node: Node, place: Place, current: object, device: torch.device | str
) -> Thunk:
    now = current if isinstance(current, (list, tuple)) else ()
    thunks = [
        build(reads, item, place.child(at, ()), now[at] if at < len(now) else None, device)
        for at, item in enumerate(items_of(node))
    ]
    kind = list if isinstance(node, list) else tuple
    return lambda: kind(value for value in (thunk() for thunk in thunks) if value is not ABSENT)
