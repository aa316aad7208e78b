"""What a rule can say of a tensor; a rule is a list of these.

The functions are what users call. Each checks what can be wrong with its own arguments, and gives
a value that `lower` turns into a partition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ucpstore.errors import StateError
from ucpstore.geometry import Index

AxisNames = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """See `shard`."""

    dim: int
    axes: AxisNames
    size: int | None
    sizes: Index
    sections: Index
    unit: int


@dataclass(frozen=True, slots=True)
class Replicate:
    """See `replicate`."""

    axes: AxisNames


@dataclass(frozen=True, slots=True)
class Unique:
    """See `unique`."""

    axes: AxisNames


@dataclass(frozen=True, slots=True)
class Padded:
    """See `padded`."""

    dim: int
    size: int


@dataclass(frozen=True, slots=True)
class Scaled:
    """See `scaled`."""

    axes: AxisNames


@dataclass(frozen=True, slots=True)
class Average:
    """See `average`."""

    axes: AxisNames


@dataclass(frozen=True, slots=True)
class Renamed:
    """See `renamed`."""

    name: Callable[[str, Mapping[str, int]], str]


@dataclass(frozen=True, slots=True)
class Tied:
    """See `tied`."""

    name: str


@dataclass(frozen=True, slots=True)
class Stacked:
    """See `stacked`."""

    name: Callable[[str, Mapping[str, int]], tuple[str, int]]


Part = Average | Shard | Replicate | Unique | Padded | Scaled | Renamed | Tied | Stacked


def shard(
    dim: int,
    axis: str | Sequence[str],
    *,
    size: int | None = None,
    sizes: Sequence[int] = (),
    sections: Sequence[int] = (),
    unit: int = 1,
) -> Part:
    """Dimension `dim` is cut over `axis`, of which each coordinate holds one part.

    Parts are equal, unless `size`, the extent of the whole, says that they follow the rule of
    `torch.chunk`, or `sizes` gives the extent of each. `sections` are the extents in the whole of
    the blocks of a fused tensor, in order, each of which is cut on its own: the array has them one
    behind the other, whatever the size of the axis. `unit` is what may not be cut, such as the
    rows of one attention head. Several axes, the outermost first, count as one.
    """
    for name, given in (("sizes", sizes), ("sections", sections)):
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise StateError(
                f"shard({dim!r}, {axis!r}): {name} must be a list of numbers of elements, but it "
                f"is {given!r}"
            )
    if sum((size is not None, bool(sizes), bool(sections))) > 1:
        raise StateError(
            f"shard({dim}, {axis!r}): give at most one of size, sizes and sections; they all say "
            "how long the whole dimension is"
        )
    lengths: tuple[object, ...] = (*sizes, *sections, unit, 0 if size is None else size)
    if type(dim) is not int or any(type(n) is not int or n < 0 for n in lengths) or unit == 0:
        raise StateError(
            f"shard({dim!r}, {axis!r}, size={size!r}, sizes={sizes!r}, sections={sections!r}, "
            f"unit={unit!r}): all but the axis are whole numbers, not below 0, the unit above 0"
        )
    return Shard(dim, _axes(axis, "shard"), size, tuple(sizes), tuple(sections), unit)


def replicate(*axes: str) -> Part:
    """All ranks along `axes` hold the same values."""
    return Replicate(_axes(axes, "replicate"))


def unique(*axes: str) -> Part:
    """Only the ranks with one coordinate on `axes` hold it, as of a pipeline stage's tensors."""
    return Unique(_axes(axes, "unique"))


def padded(dim: int, size: int) -> Part:
    """The ranks' parts of dimension `dim` have padding behind the `size` elements that are real.

    The array has the real size. A load fills the padding of its own ranks with zeros.
    """
    if type(dim) is not int or type(size) is not int or size < 1:
        raise StateError(
            f"padded({dim!r}, {size!r}): dim and the real size are whole numbers, the size above 0"
        )
    return Padded(dim, size)


def scaled(*axes: str) -> Part:
    """Each rank holds the value divided by the number of ranks along `axes`.

    As a bias of a row-parallel layer that is added on every rank before the sum. The array has the
    whole value. It is exact where that number is a power of two.
    """
    return Scaled(_axes(axes, "scaled"))


def average(*axes: str) -> Part:
    """The ranks along `axes` hold values that have drifted apart; the array has their mean.

    States of an optimizer that follow the rule are averaged as well. It cannot be undone: a load
    gives every rank the mean. The sum is made in float64, in the order of the ranks.
    """
    return Average(_axes(axes, "average"))


def renamed(name: Callable[[str, Mapping[str, int]], str]) -> Part:
    """It is stored under `name(own name, coordinates)`, as with the global number of a layer.

    Both names are full ones (`model.layers.0.wq.weight`), `coordinates` the rank's on all axes,
    0 on one that is not there.
    """
    if not callable(name):
        raise StateError(
            f"renamed({name!r}): give a function of the own name and the rank's coordinates"
        )
    return Renamed(name)


def tied(name: str) -> Part:
    """It is the tensor that is stored under the full name `name`, which another rule matches.

    As the head in the last pipeline stage that is the embedding in the first. One array is stored,
    and the ranks' values are compared as `check_replicas` says.
    """
    if not isinstance(name, str) or not name:
        raise StateError(f"tied({name!r}): give the name of the tensor that it is tied to")
    return Tied(name)


def stacked(name: Callable[[str, Mapping[str, int]], tuple[str, int]]) -> Part:
    """It is one layer, or expert, of an array that has all of them along a leading dimension.

    `name(own name, coordinates)` gives the full name of that array and the index in its dimension
    0. The other parts of the rule speak of the stack: to them the tensors of a rank are one, with
    the layers in rising order along dimension 0 and those of the tensors behind it.
    """
    if not callable(name):
        raise StateError(
            f"stacked({name!r}): give a function of the own name and the rank's coordinates, which "
            "returns the name of the stack and the index in it"
        )
    return Stacked(name)


def _axes(axes: str | Sequence[str], what: str) -> AxisNames:
    names = (axes,) if isinstance(axes, str) or not isinstance(axes, Sequence) else tuple(axes)
    if not names or not all(isinstance(name, str) and name for name in names):
        example = "shard(0, 'tp')" if what == "shard" else f"{what}('tp')"
        nothing = what in ("replicate", "unique") and names == ()
        advice = "; a rule that leaves all axes to the defaults of the Spec is []" * nothing
        raise StateError(f"{what}: name at least one axis, e.g. {example}; got {axes!r}{advice}")
    if len(set(names)) != len(names):
        raise StateError(f"{what}: the axes {names} are not all different")
    return names
