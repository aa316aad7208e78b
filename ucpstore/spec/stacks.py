"""Stacks: several tensors of a rank that are layers of one array. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ucpstore.errors import StateError
from ucpstore.geometry import Box, Index, Piece


@dataclass(frozen=True, slots=True)
class Layer:
    """One tensor of a stack by its own full name, and its index in the stack."""

    name: str
    index: int
    shape: Index
    dtype: str


def check_layers(stack: str, layers: Sequence[Layer]) -> None:
    """Refuse layers, in order, that are not alike or of which two have one index."""
    first = layers[0]
    for layer in layers[1:]:
        for what in ("shape", "dtype"):
            if getattr(layer, what) != getattr(first, what):
                raise StateError(
                    f"{stack}: layers of a stack must be alike, but {first.name} has {what} "
                    f"{getattr(first, what)} and {layer.name} has {getattr(layer, what)}; give "
                    "them stacks of their own"
                )
    for one, other in pairwise(layers):
        if one.index == other.index:
            raise StateError(
                f"{stack}: the rules give both {one.name} and {other.name} the index {one.index}; "
                "each layer of a stack has an index of its own"
            )


def check_places(
    stack: str, layers: Sequence[Layer], shape: Index, pieces: Sequence[Piece], rule: str
) -> None:
    """Refuse layers that are not those which a rank holds of the stack by its rule."""
    if not math.prod(shape):
        return
    held = sorted({n for each in pieces for n in range(each.box.offset[0], each.box.stop[0])})
    found = [layer.index for layer in layers]
    if held != found:
        raise StateError(
            f"{stack}: rule {rule} gives this rank the layers {_few(held)} of {shape[0]}, but its "
            f"tensors, {layers[0].name} the first, have the indexes {_few(found)}; correct the "
            "function of stacked, or what the rule says of dimension 0"
        )


def pieces_of_layer(pieces: Sequence[Piece], at: int) -> tuple[Piece, ...]:
    """What pieces of a rank's stack have in its `at`-th layer; local boxes count along that."""
    found = []
    for piece in pieces:
        first = piece.local.offset[0]
        if first <= at < piece.local.stop[0]:
            start = piece.box.offset[0] + at - first
            box = Box((start, *piece.box.offset[1:]), (1, *piece.box.shape[1:]))
            found.append(Piece(box, Box((0, *piece.local.offset[1:]), box.shape)))
    return tuple(found)


def _few(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown}, ... ({len(numbers)} in all)" if len(numbers) > 8 else shown or "(none)"
