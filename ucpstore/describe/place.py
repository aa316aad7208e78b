"""Places in the state tree: what a user calls them and where their arrays lie."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from ucpstore.errors import StateError, UnsupportedError
from ucpstore.format.paths import join, segment_of
from ucpstore.tree.nodes import MAX_DEPTH


@dataclass(frozen=True, slots=True)
class Place:
    """One value's place.

    `shown` joins the keys with dots, `model.layers.0.wq.weight`: messages and name patterns use
    it. `path` is the storage path, segments escaped. `name` is `shown` without the item's key,
    from which dimension names are made; that of a top-level leaf is its key.
    """

    shown: str = ""
    path: str = ""
    name: str = ""
    depth: int = 0

    @property
    def item(self) -> str:
        """What ties and selections go by: the item's segment, empty for all top-level leaves."""
        return self.path.partition("/")[0] if self.depth > 1 else ""

    def full(self, name: str) -> str:
        """The full name of what has the name `name` below this place."""
        return f"{self.shown}.{name}" if self.depth else name

    def inside(self, full_name: str, own: str) -> str:
        """The name below this place of what a rule gives the full name, in place of `own`.

        StateError where that lies elsewhere.
        """
        start = self.full("")
        if not full_name.startswith(start):
            raise StateError(
                f"{self.full(own)}: a rule gives it the name {full_name!r}, but full names of what "
                f"lies in {self.shown} must begin with {start!r}"
            )
        return full_name[len(start) :]

    def child(self, key: object, siblings: Collection[object]) -> Place:
        """The place of one element; `siblings` are all keys of the container."""
        text = str(key)
        shown = f"{self.shown}.{text}" if self.depth else text
        if self.depth >= MAX_DEPTH:
            raise StateError(
                f"{shown[:200]}: containers nest deeper than {MAX_DEPTH}, or one holds itself; "
                "flatten the state"
            )
        try:
            path = join(self.path, segment_of(key, siblings))
        except UnsupportedError as error:
            raise UnsupportedError(f"{shown}: {error}") from None
        name = f"{self.name}.{text}" if self.depth > 1 else text
        return Place(shown, path, name, self.depth + 1)


@dataclass(frozen=True, slots=True, eq=False)
class Owner:
    """The parameter that a value belongs to.

    `name` is the one in the optimizer; `full_name` the one that the parameter's module gives it, by
    which a specification knows it. `is_state` tells a state of the optimizer, which follows the
    gradient, from the parameter and copies of it. `key` is what the optimizer calls the state.
    """

    parameter: torch.Tensor
    name: str
    full_name: str
    is_state: bool = True
    key: str = ""


ROOT = Place()
"""The state itself; its children are the items."""


_PLAIN = frozenset({int, float, str, bool, type(None), bytes, complex})


def is_plain(value: object) -> bool:
    """Whether a value is a number, a string or the like, or a list or tuple of such only.

    Long lists of numbers are common in schedulers and loaders; they need no walk.
    """
    kind = type(value)
    if kind is list or kind is tuple:
        return _PLAIN.issuperset(map(type, value))  # type: ignore[call-overload]
    return kind in _PLAIN


def dimension_names(name: str, dims: int) -> tuple[str, ...]:
    """Names that are equal for arrays of one parameter and differ from every other's."""
    return tuple(f"{name}:{dim}" for dim in range(dims))
