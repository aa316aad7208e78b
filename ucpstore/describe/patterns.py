"""Name patterns: which values of a state an argument of `save` or `load` means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from ucpstore import dtypes
from ucpstore.errors import StateError, UnsupportedError

if TYPE_CHECKING:
    import torch

SaveCast: TypeAlias = "Mapping[str, torch.dtype] | Iterable[tuple[str, torch.dtype]] | None"
"""Name patterns and the dtypes in which tensors of these names are stored."""


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


def check_casts(given: SaveCast) -> tuple[tuple[str, str], ...]:
    """The `cast` of a save as pairs of a name pattern and the name of a dtype.

    Raises StateError for anything but a dict or pairs of these, UnsupportedError for a dtype that
    cannot be stored.
    """
    pairs = given.items() if isinstance(given, Mapping) else given or ()
    found = []
    try:
        for pattern, dtype in pairs:
            if not isinstance(pattern, str):
                raise TypeError(f"{pattern!r} is no name pattern")
            found.append((pattern, dtypes.to_name(dtype)))
    except UnsupportedError as error:
        raise type(error)(f"cast: {error}") from None
    except (TypeError, ValueError) as error:
        raise StateError(
            "cast must be a dict from name patterns to dtypes, such as "
            f"{{'optim.exp_avg.*': torch.bfloat16}}, but it is {given!r} ({error})"
        ) from None
    return tuple(found)
