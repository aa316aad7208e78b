"""What ranks of a job hold by a specification, told and proved without the job.

A state here is as `save` takes it, or with shapes in place of tensors: a dict of modules (on any
device, meta too), tensors, tuples of whole numbers, and dicts and lists of such.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ucpstore.errors import StateError
from ucpstore.geometry import ArraySpec, Index, Partition, Piece, RankClass, merge, pieces_of
from ucpstore.spec.lower import Lowered
from ucpstore.spec.stacks import Layer
from ucpstore.wrappers import (
    EXTRA_STATE,
    has_extra_state,
    is_engine,
    is_module,
    submodules,
    tensors_of,
)

if TYPE_CHECKING:
    from torch import nn


class Rules(Protocol):
    """What is asked of a specification; see `ucpstore.Spec`."""

    def lower(self, name: str, shape: Index, rank: int) -> Lowered: ...

    def stack(self, name: str, rank: int) -> tuple[str, int] | None: ...

    def lower_stack(
        self, layers: Sequence[Layer], rank: int
    ) -> tuple[Lowered, tuple[tuple[Piece, ...], ...]]: ...


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor of a state. One that `tells` its own arrangement, as a DTensor, needs no rule."""

    name: str
    shape: Index
    dtype: str
    tells: bool


def leaves(state: object) -> tuple[Leaf, ...]:
    """The tensors of a state, in order; no optimizers, whose states follow their parameters."""
    _refuse_engine(state, "the state")
    if not isinstance(state, Mapping):
        raise StateError(
            "give the state as a rank saves it, a dict of items, e.g. {'model': model}, not a "
            f"{type(state).__name__}; tensors may be their shapes, {{'model': {{'w': (4, 3)}}}}"
        )
    return tuple(_walk(state, ""))


def _walk(value: Any, name: str, *, shapes: bool = True) -> Iterator[Leaf]:
    """Tensors of a value; with `shapes` tuples of numbers stand for tensors too."""
    _refuse_engine(value, name)
    inside = f"{name}." if name else ""
    if hasattr(value, "shape"):
        shape = tuple(map(int, value.shape))
        # A rank's 0-d tensor is a value like any other, but for those of modules.
        if shape:
            yield _leaf(name, shape, value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk(item, f"{inside}{key}", shapes=shapes)
    elif is_module(value):
        yield from _module(value, name)
    elif isinstance(value, tuple) and shapes and value and all(type(n) is int for n in value):
        yield _leaf(name, value, None)
    elif isinstance(value, (list, tuple)):
        for at, item in enumerate(value):
            yield from _walk(item, f"{inside}{at}", shapes=shapes)


def _refuse_engine(value: object, where: str) -> None:
    if is_engine(value):
        raise StateError(
            f"{where}: a DeepSpeed engine tells itself how it lies over the ranks and is saved "
            "without a specification (docs/deepspeed.md); leave it out"
        )


def _module(module: nn.Module, where: str) -> Iterator[Leaf]:
    """What `save` finds in a module, under the same names."""
    for prefix, _, inner in submodules(module, where):
        inside = f"{where}.{prefix}" if where else prefix
        for name, tensor in tensors_of(inner):
            yield _leaf(f"{inside}{name}", tuple(map(int, tensor.shape)), tensor)
        if has_extra_state(inner):
            yield from _walk(inner.get_extra_state(), f"{inside}{EXTRA_STATE}", shapes=False)


def _leaf(name: str, shape: Index, tensor: object) -> Leaf:
    dtype = str(getattr(tensor, "dtype", "")).removeprefix("torch.")
    return Leaf(name, shape, dtype, hasattr(tensor, "placements"))


def table(rules: Rules, state: object, rank: int) -> str:
    """One line for each tensor of a rank; see `Spec.explain`."""
    rows = [("name", "rule", "own shape", "array", "shape", "pieces")]
    found_in = leaves(state)
    stacks = _stacks(rules, found_in, rank)
    for leaf in found_in:
        if leaf.tells:
            rows.append((leaf.name, "(DTensor)", "", leaf.name, str(leaf.shape), ""))
            continue
        if leaf.name in stacks:
            found, pieces = stacks[leaf.name]
        else:
            found = rules.lower(leaf.name, leaf.shape, rank)
            pieces = pieces_of(found.partition, found.shape, rank)
        shown = " ".join(map(_bounds, (piece.box for piece in pieces))) or "nothing"
        if found.scale != 1:
            shown += f" times {found.scale}"
        if found.mean:
            shown += " averaged"
        rows.append((leaf.name, found.rule, str(leaf.shape), found.name, str(found.shape), shown))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = []
    for *cells, last in rows:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append("  ".join([*padded, last]).rstrip())
    return "\n".join(lines)


def _stacks(
    rules: Rules, found: Sequence[Leaf], rank: int
) -> dict[str, tuple[Lowered, tuple[Piece, ...]]]:
    """For each layer of a stack what the rank holds of the stack, and the pieces of the layer."""
    stacks: dict[str, list[Layer]] = {}
    for leaf in found:
        at = None if leaf.tells else rules.stack(leaf.name, rank)
        if at is not None:
            stacks.setdefault(at[0], []).append(Layer(leaf.name, at[1], leaf.shape, leaf.dtype))
    known: dict[str, tuple[Lowered, tuple[Piece, ...]]] = {}
    for layers in stacks.values():
        layers.sort(key=lambda layer: layer.index)
        lowered, pieces = rules.lower_stack(layers, rank)
        for layer, own in zip(layers, pieces, strict=True):
            known[layer.name] = (lowered, own)
    return known


def _bounds(box: Any) -> str:
    """As one would index the array."""
    return "[" + ", ".join(f"{o}:{e}" for o, e in zip(box.offset, box.stop, strict=True)) + "]"


def prove(rules: Rules, states: Sequence[object], ranks: Sequence[int]) -> None:
    """Refuse what a save by `ranks` with these states would refuse; see `Spec.prove`."""
    if len(states) != len(ranks):
        raise StateError(
            f"prove takes the states of all ranks in rising order: {len(ranks)} by the axes of the "
            f"specification, but it got {len(states)}"
        )
    same: dict[object, Partition] = {}
    classes: dict[object, tuple[list[int], tuple[ArraySpec, ...]]] = {}
    for rank, state in zip(sorted(ranks), states, strict=True):
        specs: dict[str, ArraySpec] = {}
        found_in = leaves(state)
        stacks = _stacks(rules, found_in, rank)
        for leaf in found_in:
            if leaf.tells:
                continue
            known_stack = stacks.get(leaf.name)
            lowered = known_stack[0] if known_stack else rules.lower(leaf.name, leaf.shape, rank)
            spec = _described(lowered, leaf, same)
            known = specs.setdefault(spec.path, spec)
            if known.shape != spec.shape:
                raise StateError(
                    f"{leaf.name}: on rank {rank} it is stored as {spec.path} of shape "
                    f"{spec.shape}, as which another tensor has shape {known.shape}"
                )
            if known.tied and not spec.tied:
                specs[spec.path] = spec
        # Partitions of many ranks are slow to hash, and one object where they are equal.
        key = tuple(
            (s.path, s.shape, s.dtype, s.alone, s.tied, id(s.partition)) for s in specs.values()
        )
        classes.setdefault(key, ([], tuple(specs.values())))[0].append(rank)
    merge([RankClass(tuple(members), specs) for members, specs in classes.values()])


def _described(found: Lowered, leaf: Leaf, same: dict[object, Partition]) -> ArraySpec:
    own = found.partition
    partition = same.setdefault((own.axes, id(own.ranks), own.splits, own.padded), own)
    names = tuple(f"{found.name}:{dim}" for dim in range(len(found.shape)))
    return ArraySpec(
        found.name,
        found.shape,
        leaf.dtype,
        names,
        partition,
        alone=found.alone,
        tied=found.tied,
        mean=found.mean,
    )
