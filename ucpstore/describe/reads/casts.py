"""Conversions: which stored dtypes may be read into which."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from ucpstore import dtypes

Cast = str | Sequence[str] | None
"""Name patterns (as in fnmatch, over names joined with dots) of tensors that may be converted."""

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
    return f"{text}; make the target {stored}, or allow the conversion: {cast_of(shown)}"


def cast_of(pattern: str) -> str:
    """The argument that allows the conversion of what a pattern names, for messages."""
    return f"cast={pattern!r}"
