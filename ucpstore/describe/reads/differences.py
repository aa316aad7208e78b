"""Everything in which a target does not fit a checkpoint, and the error that says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from posixpath import commonprefix
from typing import ParamSpec

from ucpstore.describe.reads.casts import cast_of
from ucpstore.errors import MismatchError, StateError, UnsupportedError

_P = ParamSpec("_P")

_FOLD = 4


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


def _folded(problems: Sequence[str]) -> Iterator[str]:
    """The lines, more than `_FOLD` that say the same of different names as one with all names."""
    alike: dict[str, list[str]] = {}
    for problem in problems:
        name, _, text = problem.partition(": ")
        alike.setdefault(text.replace(cast_of(name), ""), []).append(problem)
    for lines in alike.values():
        if len(lines) <= _FOLD:
            yield from lines
            continue
        names = [line.partition(": ")[0] for line in lines]
        text = lines[0].partition(": ")[2]
        together = cast_of(f"{commonprefix(names)}*")
        yield f"{', '.join(names)}: {text.replace(cast_of(names[0]), together)}"
