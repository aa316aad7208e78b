"""From a rule and a rank's own tensor to the array and its partition. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ucpstore.errors import StateError
from ucpstore.geometry import Flat, Index, Partition, Split
from ucpstore.spec.axes import Axes
from ucpstore.spec.parts import (
    Average,
    AxisNames,
    Padded,
    Part,
    Renamed,
    Replicate,
    Scaled,
    Shard,
    Stacked,
    Tied,
    Unique,
)

_Given = TypeVar("_Given")


@dataclass(frozen=True, slots=True)
class Lowered:
    """One tensor as all ranks see it.

    `key` is its name in the state's tree, `name` that of the array, another one where it is `tied`
    to a tensor of other ranks. Stored values are the own ones times `scale`; with `mean` those of
    all holders, averaged. `alone` are the coordinates, such as `pp=0`, whose ranks alone hold it by
    its rule.
    """

    key: str
    name: str
    shape: Index
    partition: Partition
    scale: int
    rule: str
    alone: str = ""
    mean: bool = False

    @property
    def tied(self) -> bool:
        """Whether the tensor is stored as another one."""
        return self.key != self.name


def lower(
    name: str,
    shape: Index,
    rule: str,
    parts: Sequence[Part],
    axes: Axes,
    coordinates: Mapping[str, int],
    flat: tuple[AxisNames, Flat] | None = None,
) -> Lowered:
    """What the rank at `coordinates` holds, whose own tensor has `shape`.

    With `flat` the tensor is a block that is cut further, flattened, over axes that no part names.
    Raises StateError, naming the tensor, the numbers and the rule, where they do not fit.
    """
    where = f"{name}: rule {rule}"
    _check_axes(where, parts, axes, flat)
    shards = [part for part in parts if isinstance(part, Shard)]
    whole = list(shape)
    splits: list[Split | Flat | None] = []
    order: list[AxisNames] = []
    for dim in range(len(shape)):
        here = [shard for shard in shards if _dim(where, shard.dim, shape) == dim]
        whole[dim] = _extent(where, shape[dim], dim, here, axes, coordinates)
    for shard in shards:
        dim = _dim(where, shard.dim, shape)
        splits.append(Split(dim, sections=shard.sections, sizes=shard.sizes))
        order.append(shard.axes)
    real = list(whole)
    padded: set[int] = set()
    for part in parts:
        if isinstance(part, Padded):
            dim = _dim(where, part.dim, shape)
            if dim in padded:
                raise StateError(f"{where}: padded names dimension {dim} twice; name it once")
            padded.add(dim)
            if part.size > whole[dim]:
                raise StateError(
                    f"{where}: padded({part.dim}, {part.size}) says that {part.size} elements are "
                    f"real, but with its padding dimension {dim} has {whole[dim]} on all ranks "
                    f"together ({shape[dim]} on this one); is the real size or an axis wrong?"
                )
            real[dim] = part.size
    if flat is not None:
        splits.append(flat[1])
        order.append(flat[0])
    fixed = {
        axis: coordinates.get(axis, 0)
        for part in parts
        if isinstance(part, Unique)
        for axis in part.axes
    }
    used = {axis for group in order for axis in group} | set(fixed)
    rest = tuple(axis for axis, size in axes.sizes.items() if axis not in used and size > 1)
    if rest or not order:
        order.append(rest)
        splits.append(None)
    extents, ranks = axes.mesh(order, fixed)
    key = key_of(name, parts, coordinates, rule)
    stored = next((part.name for part in parts if isinstance(part, Tied)), key)
    return Lowered(
        key,
        stored,
        tuple(real),
        Partition(extents, ranks, tuple(splits), tuple(whole) if real != whole else ()),
        axes.size([a for part in parts if isinstance(part, Scaled) for a in part.axes]),
        rule,
        ", ".join(f"{axis}={at}" for axis, at in fixed.items() if axes.size((axis,)) > 1),
        axes.size([a for part in parts if isinstance(part, Average) for a in part.axes]) > 1,
    )


def key_of(name: str, parts: Sequence[Part], coordinates: Mapping[str, int], rule: str) -> str:
    """The name in the tree: another one than its own where a part renames it."""
    for part in parts:
        if isinstance(part, Renamed):
            own, name = name, _called("renamed", part.name, name, coordinates, rule)
            if not isinstance(name, str) or not name:
                raise StateError(
                    f"{own}: rule {rule}: the function of renamed gave {name!r}, which is no name"
                )
        elif isinstance(part, Stacked):
            return stack_of(name, part, coordinates, rule)[0]
    return name


def stack_of(
    name: str, part: Stacked, coordinates: Mapping[str, int], rule: str
) -> tuple[str, int]:
    """The name of the stack of which a tensor is a layer, and the layer's index."""
    given = _called("stacked", part.name, name, coordinates, rule)
    match given:
        case (str() as stack, int() as index) if stack and index >= 0:
            return stack, index
    raise StateError(
        f"{name}: rule {rule}: the function of stacked gave {given!r}; it must give the name of "
        "the stack and an index of at least 0, as ('model.layers.wq.weight', 3)"
    )


def _called(
    what: str,
    function: Callable[[str, Mapping[str, int]], _Given],
    name: str,
    coordinates: Mapping[str, int],
    rule: str,
) -> _Given:
    """What a user's function gives."""
    try:
        return function(name, coordinates)
    except Exception as error:
        raise StateError(
            f"{name}: rule {rule}: the function of {what} raised {type(error).__name__}: {error}; "
            f"it was called with {name!r} and {dict(coordinates)}"
        ) from error


def _check_axes(
    where: str, parts: Sequence[Part], axes: Axes, flat: tuple[AxisNames, Flat] | None
) -> None:
    """Each axis does one thing to a tensor, and what it does is said where it has several ranks."""
    seen: dict[str, str] = {}
    named = [
        (type(part).__name__.lower(), part.axes)
        for part in parts
        if isinstance(part, (Average, Shard, Replicate, Unique, Scaled))
    ]
    if flat is not None:
        named.append(("ucpstore.Flat", flat[0]))
    for what, group in named:
        for axis in group:
            if axis in seen:
                raise StateError(
                    f"{where}: {seen[axis]} and {what} both use the axis {axis!r}; an axis does "
                    "one thing to a tensor"
                )
            seen[axis] = what
    for axis, size in axes.sizes.items():
        if size > 1 and axis not in seen:
            raise StateError(
                f"{where}: it does not say what the axis {axis!r} of size {size} does; add "
                f"replicate({axis!r}), unique({axis!r}) or shard(dim, {axis!r}) to the rule, or "
                f"name it once for all rules, Spec(..., replicate=({axis!r},))"
            )


def _dim(where: str, dim: int, shape: Index) -> int:
    if not -len(shape) <= dim < len(shape):
        raise StateError(
            f"{where}: it names dimension {dim}, but the tensor has shape {shape} on this rank"
        )
    return dim % len(shape)


def _extent(
    where: str,
    own: int,
    dim: int,
    shards: Sequence[Shard],
    axes: Axes,
    coordinates: Mapping[str, int],
) -> int:
    """The extent of a whole dimension, padding included, of which this rank has `own`."""
    if not shards:
        return own
    count = 1
    for shard in shards:
        count *= axes.size(shard.axes)
    exact = [shard for shard in shards if shard.size is not None or shard.sizes or shard.sections]
    if not exact:
        _check_unit(where, own, dim, shards)
        return own * count
    if len(shards) > 1:
        raise StateError(
            f"{where}: dimension {dim} is cut {len(shards)} times, and one of the cuts has size, "
            "sizes or sections; give it one cut over several axes, shard(dim, ('dp', 'tp'), ...)"
        )
    (shard,) = shards
    if shard.sizes and len(shard.sizes) != count:
        raise StateError(
            f"{where}: sizes has {len(shard.sizes)} parts, but {'x'.join(shard.axes)} has {count} "
            "coordinates; give one size for each"
        )
    for section in shard.sections:
        if section % (count * shard.unit):
            raise StateError(
                f"{where}: a section of {section} elements of dimension {dim} cannot be cut over "
                f"{'x'.join(shard.axes)}={count} in whole units of {shard.unit}; choose a size of "
                "the axis that divides it. Where ranks share a head, so that the axis is larger "
                "than the number of heads, the fused tensor has no one order: keep query, key and "
                "value in tensors of their own"
            )
    total = shard.size if shard.size is not None else sum(shard.sizes or shard.sections)
    position = 0
    for axis in shard.axes:
        position = position * axes.size((axis,)) + coordinates.get(axis, 0)
    if shard.sizes:
        expected = shard.sizes[position]
    else:
        part = -(-total // count)
        expected = min(part, max(total - position * part, 0))
    if own != expected:
        raise StateError(
            f"{where}: of {total} elements of dimension {dim} coordinate {position} of "
            f"{'x'.join(shard.axes)}={count} should hold {expected}, but this rank's tensor has "
            f"{own}; are the lengths of the rule those of the whole dimension, and is the axis the "
            "right one?"
        )
    _check_unit(where, own, dim, shards)
    return total


def _check_unit(where: str, own: int, dim: int, shards: Sequence[Shard]) -> None:
    for shard in shards:
        if own % shard.unit:
            raise StateError(
                f"{where}: {own} elements of dimension {dim} on this rank are no whole number of "
                f"units of {shard.unit}; choose a size of the axis that cuts between units, or "
                "give the parts as sizes="
            )
