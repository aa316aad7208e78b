"""Name patterns: which values of a state an argument of `save` or `load` means."""

from __future__ import annotations

from collections.abc import Sequence

from ucpstore.errors import StateError


def check_patterns(argument: str, given: object) -> tuple[str, ...]:
    """The patterns (as in fnmatch, over names joined with dots) of one argument.

    None means none, a string is one pattern. Raises StateError, naming the argument, for anything
    but a sequence of strings.
    """
    if given is None:
        return ()
    if isinstance(given, str):
        return (given,)
    if isinstance(given, Sequence) and all(isinstance(each, str) for each in given):
        return tuple(given)
    raise StateError(
        f"{argument} must be a name pattern or a list of them, such as 'model.*', but it is "
        f"{given!r}"
    )
