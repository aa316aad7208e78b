"""Digests of values that several ranks hold, so that replicas that differ are found."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from ucpstore.describe import LocalArray
from ucpstore.options import MIB
from ucpstore.staging import read_local

SMALL_BYTES = 1 * MIB
"""Plain tensors up to this size are compared on every save, larger ones on the first."""

_compared: set[str] = set()
"""Digests of the structures whose plain tensors this process has compared whole."""


def replica_digests(
    arrays: Iterable[LocalArray], structure: str, check: str | None
) -> dict[str, str]:
    """Digests by fragment: the array's path and, for a DTensor's fragment, its boxes.

    Plain tensors are taken to be replicas: small ones always, all of them on the first save of a
    structure. `check` "always" takes every fragment, "never" none.
    """
    if check == "never":
        return {}
    everything = check == "always"
    first = structure not in _compared
    found = {}
    for array in arrays:
        small = array.tensor.nbytes <= SMALL_BYTES
        if everything or (array.plain and (small or first)):
            name = array.spec.path
            if not array.plain:
                name += "\0" + repr([(p.box.offset, p.box.shape) for p in array.pieces])
            found[name] = _digest(array)
    return found


def compared(structure: str) -> None:
    """Remember that a save of a structure has compared its large plain tensors too."""
    _compared.add(structure)


def _digest(array: LocalArray) -> str:
    total = hashlib.blake2b(digest_size=8)
    for piece in array.pieces:
        values = read_local(array.tensor, piece.local)
        total.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
    return total.hexdigest()
