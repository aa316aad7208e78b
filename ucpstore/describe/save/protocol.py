"""The walk of `walk.py`, as far as modules and optimizers on its way need it."""

from __future__ import annotations

from typing import Protocol

from ucpstore.describe.place import Owner, Place
from ucpstore.describe.ranks import Ranks
from ucpstore.describe.save.arrays import LocalArrays
from ucpstore.tree.nodes import Node


class Walk(Protocol):
    """The walk over one state."""

    ranks: Ranks
    arrays: LocalArrays

    def value(self, value: object, place: Place, owner: Owner | None = None) -> Node:
        """The node of any value; tensors of the shape of the owner have its dimension names."""
