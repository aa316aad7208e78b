"""What a load has to do, and everything in which a target does not fit a checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from posixpath import commonprefix
from typing import ParamSpec

from ucpstore import dtypes
from ucpstore.describe.tensors.held import View
from ucpstore.errors import MismatchError, StateError, UnsupportedError
from ucpstore.geometry import Index

Cast = str | Sequence[str] | None
"""Name patterns (as in fnmatch, over names joined with dots) of tensors that may be converted."""


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """Shape and dtype name of a stored array."""

    shape: Index
    dtype: str


Arrays = Mapping[str, ArrayInfo]
_P = ParamSpec("_P")


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """Fill the boxes of the views with those of the stored array at `path`.

    Tensors are not necessarily of the stored `dtype`: values are converted as `torch.Tensor.to`
    does.
    """

    path: str
    views: tuple[View, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """Number of elements to fill."""
        return sum(piece.box.size for view in self.views for piece in view.pieces)


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A checked target. Nothing in it has changed yet.

    Carry out `reads` in any order, then call `finish` once. `items` are the names of the items
    that are loaded, `skipped` of those that the target leaves out. `missing` and `unexpected` are
    names, joined with dots, that only the target, or only the checkpoint has: where the process
    group has several ranks, `unexpected` may be filled in a strict load too, since other ranks may
    have the rest; see `settle_unexpected`.
    """

    reads: tuple[Read, ...]
    items: tuple[str, ...]
    skipped: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    finish: Callable[[], None]


@dataclass(slots=True, eq=False)
class Differences:
    """Collects all differences, so that one error can list them. Each is one line of text.

    `kept` are values that are in the checkpoint, but not for this target, by name: a load that is
    not strict keeps the target's, as of missing ones.
    """

    missing: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)

    def refuse(self, *, strict: bool, alone: bool) -> None:
        """Raise one error that lists everything that keeps the load from going on.

        `alone`: no other rank can hold what this one's target has no place for.
        """
        missing = self.missing if strict else []
        unexpected = self.unexpected if strict else []
        kept = self.kept.values() if strict else ()
        if self.unsupported and not (self.problems or missing or kept):
            raise UnsupportedError("\n".join(_folded(self.unsupported)))
        problems = [*self.unsupported, *self.problems, *kept]
        if problems or missing or (unexpected and alone):
            raise MismatchError(_message(missing, unexpected, problems, self.hints))

    def attempt(self, action: Callable[_P, None], *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Run a check; what it refuses becomes one of the differences."""
        try:
            action(*args, **kwargs)
        except UnsupportedError as error:
            self.unsupported.append(str(error))
        except StateError as error:
            self.problems.append(str(error))


def warn_unmatched(
    unmatched: Mapping[str, Sequence[str]], items: Collection[str], skipped: Collection[str]
) -> None:
    """Say, where a load is not strict, that it has nothing to load where something is meant."""
    for item, missing in unmatched.items():
        if missing:
            text = f"none of its {len(missing)} names is in the checkpoint, such as {missing[0]}"
        else:
            text = f"the checkpoint has the items {', '.join((*items, *skipped)) or 'of nothing'}"
        warnings.warn(
            f"{item}: strict=False, and nothing of it is loaded: {text}; is this the right "
            "checkpoint, and do its names have another prefix?",
            stacklevel=3,
        )


def settle_unexpected(
    ranks: Iterable[tuple[Collection[str], Collection[str]]],
) -> tuple[str, ...]:
    """Names that no rank of a process group has a place for, of each rank's (items, unexpected).

    Ranks may hold different parts of an item, as pipeline stages do: what one of them has a place
    for is expected on all. A rank whose target leaves the item out does not count.
    """
    reports = [(frozenset(items), frozenset(names)) for items, names in ranks]
    everywhere = []
    for name in sorted(frozenset().union(*(names for _, names in reports))):
        selecting = [
            names
            for items, names in reports
            if any(name == item or name.startswith(f"{item}.") for item in items)
        ]
        if all(name in names for names in selecting):
            everywhere.append(name)
    return tuple(everywhere)


def refuse_unexpected(names: Sequence[str]) -> None:
    """Raise the error of a strict load for names that no target has a place for, if any."""
    if names:
        raise MismatchError(_message([], names, [], []))


def _message(
    missing: Sequence[str],
    unexpected: Sequence[str],
    problems: Sequence[str],
    hints: Sequence[str],
) -> str:
    count = len(missing) + len(unexpected) + len(problems)
    lines = [
        f"the target does not fit the checkpoint ({count} "
        f"difference{'' if count == 1 else 's'}); nothing was changed"
    ]
    if missing:
        lines.append(f"  not in the checkpoint: {', '.join(missing)}")
    if unexpected:
        lines.append(f"  not in the target: {', '.join(unexpected)}")
    lines.extend(f"  {problem}" for problem in _folded(problems))
    lines.extend(f"  {hint}" for hint in hints)
    if (missing or unexpected) and not hints:
        lines.append(
            "  leave whole items out of the target to select, or pass strict=False to load what "
            "both have"
        )
    return "\n".join(lines)


_FOLD = 4


def _folded(problems: Sequence[str]) -> Iterator[str]:
    """The lines, more than `_FOLD` that say the same of different names as one with all names."""
    alike: dict[str, list[str]] = {}
    for problem in problems:
        name, _, text = problem.partition(": ")
        alike.setdefault(text.replace(_cast_of(name), ""), []).append(problem)
    for lines in alike.values():
        if len(lines) <= _FOLD:
            yield from lines
            continue
        names = [line.partition(": ")[0] for line in lines]
        text = lines[0].partition(": ")[2]
        together = _cast_of(f"{commonprefix(names)}*")
        yield f"{', '.join(names)}: {text.replace(_cast_of(names[0]), together)}"


def _cast_of(pattern: str) -> str:
    return f"cast={pattern!r}"


_RANK = {"bool": 0, "int": 1, "float": 2, "complex": 3}


def dtype_problem(shown: str, stored: str, wanted: str, cast: Sequence[str]) -> str | None:
    """Why an array of dtype `stored` cannot fill a target of dtype `wanted`; None where it can.

    Conversions that `cast` names are allowed within a kind of numbers and to a wider one (bool,
    int, float, complex), never to a narrower.
    """
    if stored == wanted:
        return None
    text = f"{shown}: stored as {stored}, the target is {wanted}"
    if _RANK[dtypes.kind(stored)] > _RANK[dtypes.kind(wanted)]:
        return (
            f"{text}; {dtypes.kind(stored)} is never converted to {dtypes.kind(wanted)}, "
            f"make the target {stored}"
        )
    if any(fnmatchcase(shown, pattern) for pattern in cast):
        return None
    return f"{text}; make the target {stored}, or allow the conversion: {_cast_of(shown)}"


_PREFIXES = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def prefix_hint(missing: Collection[str], unexpected: Collection[str], shown: str) -> str | None:
    """What to say where names differ only by the prefixes that wrappers add, nested ones too."""
    stored = {_bare(name): name for name in unexpected}
    for name in missing:
        other = stored.get(_bare(name))
        if other is not None:
            ours, theirs = name.split("."), other.split(".")
            added = [repr(f"{p}.") for p in _PREFIXES if ours.count(p) != theirs.count(p)]
            return (
                f"{shown}: names differ by {' and '.join(added) or 'the order'} of the prefixes "
                "that wrappers (DistributedDataParallel, torch.compile) add in a state_dict: the "
                f"target has {name!r}, the checkpoint {other!r}; pass the module itself instead "
                "of its state_dict(), wrappers are seen through"
            )
    return None


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _PREFIXES)
