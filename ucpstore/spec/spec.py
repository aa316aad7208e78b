"""Spec: rules by name pattern, matched, lowered, explained and proved."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from fnmatch import translate
from typing import TYPE_CHECKING

from ucpstore.errors import StateError
from ucpstore.geometry import Flat, Index, Piece, pieces_of
from ucpstore.spec.axes import Axes
from ucpstore.spec.lower import Lowered, key_of, lower, stack_of
from ucpstore.spec.parts import (
    Average,
    AxisNames,
    Part,
    Renamed,
    Replicate,
    Scaled,
    Shard,
    Stacked,
    Tied,
    Unique,
)
from ucpstore.spec.simulate import prove, table
from ucpstore.spec.stacks import Layer, check_layers, check_places, pieces_of_layer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Pattern = str | re.Pattern[str]
Rules = Mapping[Pattern, Part | Sequence[Part]]

_PLACES = (Average, Shard, Replicate, Unique, Scaled)
_NAMES = (Renamed, Tied, Stacked)


class Spec:
    """How the tensors of a job lie over its ranks, by rules for names.

        spec = Spec({"pp": 2, "dp": 2, "tp": 2}, {
            "model.embed.weight": [shard(0, "tp"), padded(0, 50257)],
            "model.layers.*.wq.weight": shard(0, "tp"),
            "model.layers.*.norm.weight": replicate("tp"),
        }, replicate=("dp",), unique=("pp",))

    `axes` are names and sizes, the outermost first, or a DeviceMesh with names; an axis that is not
    there has size 1. `ranks` are the ranks of the process group in row-major order of the axes, 0,
    1, 2, ... where None. Patterns are globs over the full name (`model.layers.0.wq.weight`), or
    compiled regular expressions that match all of it. A rule says what each axis of several ranks
    does; `replicate` and `unique` say it for axes that a rule does not name. DTensors tell their
    own arrangement and need no rule; states of an optimizer that have the shape of their parameter
    follow its rule.
    """

    def __init__(
        self,
        axes: Mapping[str, int] | DeviceMesh,
        rules: Rules,
        *,
        replicate: Sequence[str] = (),
        unique: Sequence[str] = (),
        ranks: Sequence[int] | None = None,
    ) -> None:
        self._of_mesh = not isinstance(axes, Mapping)
        if not isinstance(axes, Mapping):
            if ranks is not None:
                raise StateError(
                    "ranks: a DeviceMesh says itself which ranks it has; give names and sizes as "
                    "axes, or leave ranks out"
                )
            axes, ranks = _from_mesh(axes)
        if not isinstance(rules, Mapping):
            raise StateError(
                "rules must be a dict of patterns of names and what they say, as "
                f"{{'model.*.weight': shard(0, 'tp')}}, but they are a {type(rules).__name__}"
            )
        self.axes = Axes(axes, ranks)
        self._replicate = _default("replicate", replicate)
        self._unique = _default("unique", unique)
        both = sorted({*self._replicate} & {*self._unique})
        if both:
            raise StateError(
                f"replicate and unique of a Spec both name {', '.join(both)}; an axis does one "
                "thing to the tensors whose rules do not name it"
            )
        self._rules = {pattern: _parts(pattern, rule) for pattern, rule in rules.items()}
        self._expressions = tuple((_expression(pattern), pattern) for pattern in self._rules)
        self._matched: dict[str, Pattern | None] = {}

    def __repr__(self) -> str:
        return f"<Spec {self.axes}, {len(self._rules)} rules>"

    def lower(
        self,
        name: str,
        shape: Index,
        rank: int,
        flat: tuple[AxisNames, Flat] | None = None,
    ) -> Lowered:
        """What `rank` holds by the one rule that matches `name`, its own tensor having `shape`.

        Where no axis has several ranks, a tensor without a rule is held whole. Raises StateError
        where no rule matches, where two do, and where the rule does not fit.
        """
        if self.stack(name, rank) is not None:
            raise StateError(
                f"{name}: rule {_shown(self._match(name) or '')} stacks it, but only parameters "
                "and buffers of modules, and their states in a torch optimizer, are stacked, not "
                "what lies in dicts, lists and rows (ucpstore.Flat); put the module into the "
                "state, or stack the tensors before the call"
            )
        return self._lower(name, shape, rank, flat)

    def stack(self, name: str, rank: int) -> tuple[str, int] | None:
        """The full name of the stack of which it is a layer, and the index; None for others."""
        for part in self._parts_for(name):
            if isinstance(part, Stacked):
                return stack_of(name, part, self.axes.coordinates(rank), self._rule(name))
        return None

    def lower_stack(
        self, layers: Sequence[Layer], rank: int
    ) -> tuple[Lowered, tuple[tuple[Piece, ...], ...]]:
        """What `rank` holds of a stack by its own `layers`, in rising order of index.

        And for each layer its pieces, whose local boxes have an extent of 1 along dimension 0.
        """
        first = layers[0]
        lowered = self._lower(first.name, (len(layers), *first.shape), rank, None)
        check_layers(lowered.key, layers)
        for layer in layers[1:]:
            if self._without_name(layer.name) != self._without_name(first.name):
                raise StateError(
                    f"{lowered.key}: the rules of {first.name} and of {layer.name} differ, but "
                    "they are layers of one stack; write one rule for all of its layers"
                )
        pieces = pieces_of(lowered.partition, lowered.shape, rank)
        check_places(lowered.key, layers, lowered.shape, pieces, lowered.rule)
        return lowered, tuple(pieces_of_layer(pieces, at) for at in range(len(layers)))

    def _without_name(self, name: str) -> tuple[Part, ...]:
        return tuple(part for part in self._parts_for(name) if not isinstance(part, Stacked))

    def _lower(
        self, name: str, shape: Index, rank: int, flat: tuple[AxisNames, Flat] | None
    ) -> Lowered:
        coordinates = self.axes.coordinates(rank)
        pattern = self._match(name)
        if pattern is None and any(size > 1 for size in self.axes.sizes.values()):
            near = [_shown(each) for each in self._rules if _near(each, name)]
            hint = f"; near are {', '.join(near[:5])}" if near else ""
            several = ", ".join(repr(axis) for axis, n in self.axes.sizes.items() if n > 1)
            raise StateError(
                f"{name}: none of the {len(self._rules)} rules of the specification matches, and "
                f"nothing is guessed over {self.axes}; add a rule, e.g. "
                f"{{{name!r}: replicate({several})}} for a tensor that all ranks hold{hint}"
            )
        own = () if pattern is None else self._rules[pattern]
        if flat is not None:  # parameters are replicated where their states are cut
            own = tuple(each for part in own for each in _besides(part, flat[0]))
        taken = {axis for part in own if isinstance(part, _PLACES) for axis in part.axes}
        taken.update(flat[0] if flat else ())
        parts = (
            *own,
            *(Replicate((axis,)) for axis in self._replicate if axis not in taken),
            *(Unique((axis,)) for axis in self._unique if axis not in taken),
        )
        return lower(name, shape, self._rule(name), parts, self.axes, coordinates, flat)

    def key(self, name: str, rank: int) -> str:
        """The name in the tree of what has the full name `name` on `rank`."""
        coordinates = self.axes.coordinates(rank)
        return key_of(name, self._parts_for(name), coordinates, self._rule(name))

    def stored(self, name: str, rank: int) -> str:
        """The name of its array: that of the tensor that it is tied to, or else its key."""
        ties = (part.name for part in self._parts_for(name) if isinstance(part, Tied))
        return next(ties, self.key(name, rank))

    def rule(self, name: str) -> str | None:
        """The pattern that matches a name, as messages show it; None where none does."""
        pattern = self._match(name)
        return None if pattern is None else _shown(pattern)

    def check_dtensor(self, name: str) -> None:
        """Refuse a rule that says more of a DTensor than a name."""
        for part in self._parts_for(name):
            if not isinstance(part, (Renamed, Tied)):
                raise StateError(
                    f"{name}: a rule says {type(part).__name__.lower()}, but the tensor is a "
                    "DTensor, which tells its own arrangement; let the rule rename or tie it only"
                )

    def in_group(self, of_global: Mapping[int, int]) -> Spec:
        """The same for the ranks of a process group; StateError where its axes are of others.

        `of_global` maps the global ranks of the group's members to their ranks in it.
        """
        ranks = self.axes.ranks
        if self._of_mesh:
            ranks = tuple(of_global.get(rank, -1) for rank in ranks)
        if sorted(ranks) != sorted(of_global.values()):
            raise StateError(
                f"the axes {self.axes} of the specification are for {len(ranks)} ranks "
                f"{_few(self.axes.ranks)}, but the process group of the call has {len(of_global)}, "
                f"{_few(of_global if self._of_mesh else of_global.values())}; give the sizes of "
                "this job, and the process group whose ranks lie on the axes"
            )
        if ranks == self.axes.ranks:
            return self
        moved = copy(self)
        moved.axes = Axes(self.axes.sizes, ranks)
        return moved

    def _rule(self, name: str) -> str:
        return self.rule(name) or "(none)"

    def _parts_for(self, name: str) -> tuple[Part, ...]:
        pattern = self._match(name)
        return () if pattern is None else self._rules[pattern]

    def _match(self, name: str) -> Pattern | None:
        if name not in self._matched:
            found = [each for expression, each in self._expressions if expression(name)]
            if len(found) > 1:
                raise StateError(
                    f"{name}: the rules {' and '.join(map(_shown, found))} both match; make one of "
                    "them narrower, or write one rule"
                )
            self._matched[name] = found[0] if found else None
        return self._matched[name]

    def explain(self, state: object, rank: int = 0) -> str:
        """A table of what `rank` holds: name, rule, own shape, array, its shape, and the pieces.

        `state` is as that rank has it for `save`, a dict of items, or has shapes instead of
        tensors, {"model": {"embed.weight": (16, 64)}}. Optimizers are left out: their states follow
        the parameters. No process group is needed, so a job can be looked at from anywhere.
        """
        return table(self, state, rank)

    def prove(self, states: Sequence[object]) -> None:
        """Prove that every element of every array is held, given what every rank of a job has.

        `states` are as in `explain`, one for each rank in rising order. Raises StateError, naming
        the array and the boxes, where there is a gap, an overlap, or a disagreement, as `save`
        would before it writes.
        """
        prove(self, states, self.axes.ranks)


def _default(what: str, axes: object) -> tuple[str, ...]:
    names = tuple(axes) if isinstance(axes, Sequence) and not isinstance(axes, str) else (axes,)
    if isinstance(axes, str) or not all(isinstance(name, str) and name for name in names):
        raise StateError(
            f"{what} of a Spec must be a list of names of axes, as {what}=('dp',), but it is "
            f"{axes!r}"
        )
    return names


def _from_mesh(mesh: DeviceMesh) -> tuple[dict[str, int], Sequence[int]]:
    if not hasattr(mesh, "mesh_dim_names"):
        raise StateError(
            "axes must be names with sizes, as {'dp': 2, 'tp': 4}, or a DeviceMesh, but they are "
            f"a {type(mesh).__name__}"
        )
    names = mesh.mesh_dim_names
    if not names:
        raise StateError(
            "axes: a DeviceMesh without names; give it some, "
            "init_device_mesh(..., mesh_dim_names=('dp', 'tp'))"
        )
    layout = mesh.mesh
    return dict(zip(names, map(int, layout.shape), strict=True)), layout.flatten().tolist()


def _parts(pattern: object, rule: Part | Sequence[Part]) -> tuple[Part, ...]:
    if not isinstance(pattern, (str, re.Pattern)):
        raise StateError(f"a rule's pattern is a glob or a compiled expression, not {pattern!r}")
    parts = tuple(rule) if isinstance(rule, (list, tuple)) else (rule,)
    for part in parts:
        if not isinstance(part, Part):
            raise StateError(
                f"rule {_shown(pattern)}: {part!r} is nothing that a rule can say; use shard, "
                "replicate, unique, padded, scaled, average, renamed, tied and stacked of "
                "ucpstore.spec"
            )
    naming = [type(part).__name__.lower() for part in parts if isinstance(part, _NAMES)]
    if "stacked" in naming and len(naming) > 1:
        raise StateError(
            f"rule {_shown(pattern)}: it says {' and '.join(naming)}; the function of stacked "
            "gives the name, and layers of a stack cannot be tied"
        )
    for kind in (Renamed, Tied):
        if sum(isinstance(part, kind) for part in parts) > 1:
            raise StateError(
                f"rule {_shown(pattern)}: it says {kind.__name__.lower()} twice; a tensor has one "
                "name"
            )
    return parts


def _expression(pattern: Pattern) -> Callable[[str], object]:
    return (re.compile(translate(pattern)) if isinstance(pattern, str) else pattern).fullmatch


def _besides(part: Part, axes: AxisNames) -> tuple[Part, ...]:
    """What a part says of other axes, where it replicates; else all of it."""
    if not isinstance(part, Replicate):
        return (part,)
    left = tuple(axis for axis in part.axes if axis not in axes)
    return (Replicate(left),) if left else ()


def _shown(pattern: Pattern) -> str:
    return repr(pattern if isinstance(pattern, str) else pattern.pattern)


def _few(ranks: Iterable[int]) -> str:
    """Ranks in order, the first of them where there are many."""
    ordered = sorted(ranks)
    return str(ordered) if len(ordered) <= 8 else f"[{', '.join(map(str, ordered[:8]))}, ...]"


def _near(pattern: Pattern, name: str) -> bool:
    text = pattern if isinstance(pattern, str) else pattern.pattern
    return text.rpartition(".")[2] == name.rpartition(".")[2]


def check_spec(spec: object) -> Spec | None:
    """The specification of a call; StateError for what is none."""
    if spec is None or isinstance(spec, Spec):
        return spec
    raise StateError(
        f"spec must be a ucpstore.Spec, but it is a {type(spec).__name__}; make one, "
        "ucpstore.Spec({'dp': 2, 'tp': 2}, {'model.*': ...})"
    )
