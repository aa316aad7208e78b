"""Spec: rules by name pattern, matched, lowered, explained and proved."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import copy
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from ucpstore.errors import StateError
from ucpstore.geometry import ArraySpec, Flat, Index, RankClass, fragments, merge
from ucpstore.spec.axes import Axes
from ucpstore.spec.lower import Lowered, key_of, lower
from ucpstore.spec.parts import AxisNames, Part, Renamed, Replicate, Scaled, Shard, Tied, Unique

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Pattern = str | re.Pattern[str]
Rules = Mapping[Pattern, Part | Sequence[Part]]

_PLACES = (Shard, Replicate, Unique, Scaled)


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
        of_mesh = not isinstance(axes, Mapping)
        if not isinstance(axes, Mapping):
            axes, ranks = _from_mesh(axes)
        self.axes = Axes(axes, ranks)
        both = sorted({*replicate} & {*unique})
        if isinstance(replicate, str) or isinstance(unique, str) or both:
            raise StateError(
                f"replicate={replicate!r} and unique={unique!r} must be lists of names of axes, "
                "and have none in common"
            )
        self._replicate, self._unique = tuple(replicate), tuple(unique)
        self._of_mesh = ranks is not None and of_mesh
        self._rules = {pattern: _parts(pattern, rule) for pattern, rule in rules.items()}

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
        coordinates = self.axes.coordinates(rank)
        pattern = self._match(name)
        if pattern is None and any(size > 1 for size in self.axes.sizes.values()):
            near = [p for p in self._rules if isinstance(p, str) and _near(p, name)]
            hint = f"; near are {', '.join(map(_shown, near[:5]))}" if near else ""
            raise StateError(
                f"{name}: none of the {len(self._rules)} rules of the specification matches, and "
                f"nothing is guessed over {self.axes}; add a rule, e.g. "
                f"{{{name!r}: replicate({next(iter(self.axes.sizes))!r})}} for a tensor that all "
                f"ranks hold{hint}"
            )
        own = () if pattern is None else self._rules[pattern]
        taken = {axis for part in own if isinstance(part, _PLACES) for axis in part.axes}
        taken.update(flat[0] if flat else ())
        parts = (
            *own,
            *(Replicate((axis,)) for axis in self._replicate if axis not in taken),
            *(Unique((axis,)) for axis in self._unique if axis not in taken),
        )
        shown = "(none)" if pattern is None else _shown(pattern)
        return lower(name, shape, shown, parts, self.axes, coordinates, flat)

    def key(self, name: str, rank: int) -> str:
        """The name in the tree of what has the full name `name` on `rank`."""
        return key_of(name, self._parts_for(name), self.axes.coordinates(rank))

    def stored(self, name: str, rank: int) -> str:
        """The name of its array: that of the tensor that it is tied to, or else its key."""
        ties = (part.name for part in self._parts_for(name) if isinstance(part, Tied))
        return next(ties, self.key(name, rank))

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
                f"the axes {self.axes} of the specification are for {len(ranks)} ranks, but the "
                f"process group of the call has {len(of_global)}; give the sizes of this job"
            )
        if ranks == self.axes.ranks:
            return self
        moved = copy(self)
        moved.axes = Axes(self.axes.sizes, ranks)
        return moved

    def _parts_for(self, name: str) -> tuple[Part, ...]:
        pattern = self._match(name)
        return () if pattern is None else self._rules[pattern]

    def _match(self, name: str) -> Pattern | None:
        found = [pattern for pattern in self._rules if _matches(pattern, name)]
        if len(found) > 1:
            raise StateError(
                f"{name}: the rules {' and '.join(map(_shown, found))} both match; make one of "
                "them narrower, or write one rule"
            )
        return found[0] if found else None

    def explain(self, state: object, rank: int = 0) -> str:
        """A table of what `rank` holds: name, rule, own shape, array, and its pieces.

        `state` is a module (on any device, meta too) or a dict of tensors or shapes, as that rank
        has it; no process group is needed, so a job can be looked at from anywhere.
        """
        rows = [("name", "rule", "own shape", "array", "shape", "pieces")]
        for name, shape in _shapes(state).items():
            found = self.lower(name, shape, rank)
            pieces = fragments(found.partition, found.shape).get(rank, ())
            shown = ", ".join(
                "[" + ", ".join(f"{o}:{e}" for o, e in zip(b.offset, b.stop, strict=True)) + "]"
                for b in (piece.box for piece in pieces)
            )
            rows.append((name, found.rule, str(shape), found.name, str(found.shape), shown))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        return "\n".join(
            "  ".join([*(t.ljust(w) for t, w in zip(row, widths, strict=False)), row[5]]).rstrip()
            for row in rows
        )

    def prove(self, states: Sequence[object]) -> None:
        """Prove that every element of every array is held, given what every rank of a job has.

        `states` are as in `explain`, one for each rank. Raises StateError, naming the array and
        the boxes, where there is a gap, an overlap, or a disagreement.
        """
        classes = []
        for rank, state in enumerate(states):
            specs = []
            for name, shape in _shapes(state).items():
                found = self.lower(name, shape, rank)
                names = tuple(f"{found.name}:{dim}" for dim in range(len(found.shape)))
                specs.append(ArraySpec(found.name, found.shape, "float32", names, found.partition))
            classes.append(RankClass((rank,), tuple(specs)))
        merge(classes)


def _from_mesh(mesh: DeviceMesh) -> tuple[dict[str, int], Sequence[int]]:
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
    parts = tuple(rule) if isinstance(rule, Sequence) else (rule,)
    for part in parts:
        if not isinstance(part, Part):
            raise StateError(
                f"rule {_shown(pattern)}: {part!r} is nothing that a rule can say; use shard, "
                "replicate, unique, padded, scaled, renamed and tied of ucpstore.spec"
            )
    return parts


def _matches(pattern: Pattern, name: str) -> bool:
    if isinstance(pattern, str):
        return fnmatchcase(name, pattern)
    return pattern.fullmatch(name) is not None


def _shown(pattern: Pattern) -> str:
    return repr(pattern if isinstance(pattern, str) else pattern.pattern)


def _near(pattern: str, name: str) -> bool:
    return pattern.rpartition(".")[2] == name.rpartition(".")[2]


def _shapes(state: object) -> dict[str, Index]:
    found: Any = state
    if hasattr(found, "state_dict"):
        found = found.state_dict(keep_vars=True)
    if not isinstance(found, Mapping):
        raise StateError(
            f"give a module or a dict of tensors or shapes, not a {type(state).__name__}"
        )
    shapes = {str(name): getattr(value, "shape", value) for name, value in found.items()}
    return {name: tuple(map(int, shape)) for name, shape in shapes.items()}


def check_spec(spec: object) -> Spec | None:
    """The specification of a call; StateError for what is none."""
    if spec is None or isinstance(spec, Spec):
        return spec
    raise StateError(
        f"spec must be a ucpstore.Spec, but it is a {type(spec).__name__}; make one, "
        "ucpstore.Spec({'dp': 2, 'tp': 2}, {'model.*': ...})"
    )
