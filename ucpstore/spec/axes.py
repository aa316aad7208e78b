"""The named axes of a job, and which rank lies where on them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from ucpstore.errors import StateError
from ucpstore.geometry import Index


class Coordinates(dict[str, int]):
    """A rank's coordinate on each axis, 0 on those that are not there."""

    def __missing__(self, axis: str) -> int:
        return 0


class Axes:
    """Names and sizes, the outermost first, and the ranks in row-major order of the coordinates.

    An axis that is not named here has size 1, so that one list of rules serves every arrangement.
    """

    def __init__(self, sizes: Mapping[str, int], ranks: Sequence[int] | None = None) -> None:
        for name, size in sizes.items():
            if not isinstance(name, str) or not name or type(size) is not int or size < 1:
                raise StateError(
                    f"axes must be names with sizes of at least 1, as {{'dp': 2, 'tp': 4}}; got "
                    f"{name!r}: {size!r}"
                )
        self.sizes = dict(sizes)
        count = math.prod(self.sizes.values())
        self.ranks = tuple(range(count)) if ranks is None else tuple(ranks)
        if any(type(rank) is not int for rank in self.ranks):
            raise StateError(f"ranks must be whole numbers, but they are {list(self.ranks)}")
        if len(self.ranks) != count or len(set(self.ranks)) != count:
            raise StateError(
                f"the axes {self} have {count} places, but {len(self.ranks)} ranks are given, "
                f"{len(set(self.ranks))} of them different; give one rank for each place"
            )
        self._at = {rank: position for position, rank in enumerate(self.ranks)}
        self._meshes: dict[object, tuple[Index, Index]] = {}

    def __str__(self) -> str:
        return " x ".join(f"{name}={size}" for name, size in self.sizes.items()) or "(none)"

    def size(self, axes: Sequence[str]) -> int:
        """Number of coordinates of several axes together."""
        return math.prod(self.sizes.get(name, 1) for name in axes)

    def coordinates(self, rank: int) -> Coordinates:
        """A rank's coordinate on each axis; StateError for a rank that is on none."""
        position = self._at.get(rank)
        if position is None:
            raise StateError(
                f"rank {rank} has no place on the axes {self} of the specification, which are for "
                f"{len(self.ranks)} ranks; the sizes must be those of the job that saves or loads"
            )
        found = Coordinates()
        for name, size in reversed(self.sizes.items()):
            position, found[name] = divmod(position, size)
        return found

    def mesh(
        self, order: Sequence[tuple[str, ...]], fixed: Mapping[str, int]
    ) -> tuple[Index, Index]:
        """Extents and ranks of a mesh whose axes are groups of ours, some coordinates fixed."""
        key = (tuple(order), tuple(fixed.items()))
        if key not in self._meshes:
            self._meshes[key] = self._lay_out(order, fixed)
        return self._meshes[key]

    def _lay_out(
        self, order: Sequence[tuple[str, ...]], fixed: Mapping[str, int]
    ) -> tuple[Index, Index]:
        steps: dict[str, int] = {}
        step = 1
        for name, size in reversed(self.sizes.items()):
            steps[name] = step
            step *= size
        start = sum(coordinate * steps[name] for name, coordinate in fixed.items() if name in steps)
        offsets = [
            range(0, self.sizes[name] * steps[name], steps[name])
            for group in order
            for name in group
            if name in steps
        ]
        places = (start + sum(each) for each in itertools.product(*offsets))
        extents = tuple(self.size(group) for group in order)
        return extents, tuple(self.ranks[place] for place in places)
