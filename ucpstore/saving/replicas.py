"""Digests of values that several ranks hold, so that replicas that differ are found."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import numpy as np

from ucpstore.describe import LocalArray
from ucpstore.geometry import Piece
from ucpstore.options import MIB
from ucpstore.staging import read_local

if TYPE_CHECKING:
    import torch

SMALL_BYTES = 1 * MIB
"""Tensors up to this size are compared on every save, larger ones on the first."""

_compared: set[str] = set()
"""The comparisons, of a structure among some ranks, that included large tensors."""


def replica_digests(
    arrays: Iterable[LocalArray], comparison: str, check: str | None
) -> dict[str, str]:
    """Digests of the pieces that a rank holds of what is taken to be replicated.

    Those are plain tensors: small ones always, all of them on the first save of a structure among
    the same ranks, which `comparison` names. `check` "always" takes every tensor, "never" none.
    Values that are averaged may differ.
    """
    compared = (array for array in arrays if array.plain or check == "always")
    return _digests((array for array in compared if not array.spec.mean), comparison, check)


def joined_digests(
    arrays: Iterable[LocalArray], joined: Collection[str], comparison: str, check: str | None
) -> dict[str, str]:
    """Digests of the pieces of the arrays at the paths `joined`, which several meshes hold.

    As many as of plain tensors; none where `replica_digests` has taken them.
    """
    if check == "always" or not joined:
        return {}
    found = (each for each in arrays if each.spec.path in joined and not each.spec.mean)
    return _digests(found, comparison, check)


def compared(comparison: str) -> None:
    """Remember that a save has compared large tensors too."""
    _compared.add(comparison)


def _digests(arrays: Iterable[LocalArray], comparison: str, check: str | None) -> dict[str, str]:
    """By path and, for what is not the whole array, its place in the array."""
    if check == "never":
        return {}
    everything = check == "always" or comparison not in _compared
    found = {}
    for array in arrays:
        if everything or sum(view.tensor.nbytes for view in array.views) <= SMALL_BYTES:
            for view in array.views:
                for piece in view.pieces:
                    whole = piece.box.shape == array.spec.shape
                    place = "" if whole else f"\0{piece.box.offset}{piece.box.shape}"
                    found[array.spec.path + place] = _digest(view.tensor, piece)
    return found


def _digest(tensor: torch.Tensor, piece: Piece) -> str:
    values = np.ascontiguousarray(read_local(tensor, piece.local))
    return hashlib.blake2b(values.reshape(-1).view(np.uint8).data, digest_size=8).hexdigest()
