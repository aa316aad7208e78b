"""What rules can say: the values that the constructors give, and arguments that they refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ucpstore import StateError
from ucpstore.spec import (
    Average,
    Padded,
    Part,
    Renamed,
    Replicate,
    Scaled,
    Shard,
    Tied,
    Unique,
    average,
    padded,
    renamed,
    replicate,
    scaled,
    shard,
    tied,
    unique,
)


def layer(name: str, at: object) -> str:
    return name


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (shard(0, "tp"), Shard(0, ("tp",), None, (), (), 1)),
        (shard(-1, ["dp", "tp"], size=7), Shard(-1, ("dp", "tp"), 7, (), (), 1)),
        (shard(1, "tp", sizes=[3, 0, 4]), Shard(1, ("tp",), None, (3, 0, 4), (), 1)),
        (shard(0, "tp", sections=[8, 2, 2], unit=2), Shard(0, ("tp",), None, (), (8, 2, 2), 2)),
        (replicate("tp", "cp"), Replicate(("tp", "cp"))),
        (unique("pp"), Unique(("pp",))),
        (padded(0, 7), Padded(0, 7)),
        (scaled("tp"), Scaled(("tp",))),
        (average("dp"), Average(("dp",))),
        (renamed(layer), Renamed(layer)),
        (tied("model.w"), Tied("model.w")),
    ],
)
def test_constructors_keep_what_they_are_told(made: Part, expected: Part) -> None:
    assert made == expected


REFUSED: list[tuple[Callable[[], object], str]] = [
    (
        lambda: shard(0, "tp", size=8, sizes=(4, 4)),
        "shard(0, 'tp'): give at most one of size, sizes and sections; they all say how long the "
        "whole dimension is",
    ),
    (
        lambda: shard(0, "tp", sizes=(n for n in (4, 4))),  # type: ignore[arg-type]
        "sizes must be a list of numbers of elements",
    ),
    (lambda: shard(0, "tp", sections=8), "sections must be a list of numbers"),  # type: ignore[arg-type]
    (lambda: shard(0, "tp", unit=0), "unit=0): all but the axis are whole numbers"),
    (lambda: shard(0, "tp", size=-1), "size=-1"),
    (lambda: shard(0, "tp", size=8.0), "size=8.0"),  # type: ignore[arg-type]
    (lambda: shard(0, "tp", sections=(4, -4)), "sections=(4, -4)"),
    (lambda: shard("tp", 0), "shard('tp', 0, size=None"),  # type: ignore[arg-type]
    (lambda: shard(0, 0), "shard: name at least one axis"),  # type: ignore[arg-type]
    (lambda: shard(True, "tp"), "shard(True, 'tp'"),
    (lambda: shard(0, ()), "shard: name at least one axis, e.g. shard(0, 'tp'); got ()"),
    (lambda: shard(0, ("tp", "tp")), "the axes ('tp', 'tp') are not all different"),
    (
        lambda: replicate(),
        "replicate: name at least one axis, e.g. replicate('tp'); got (); a rule that leaves all "
        "axes to the defaults of the Spec is []",
    ),
    (lambda: unique(), "a rule that leaves all axes to the defaults of the Spec is []"),
    (lambda: replicate(["tp"]), "replicate: name at least one axis"),  # type: ignore[arg-type]
    (lambda: unique(""), "unique: name at least one axis"),
    (lambda: average(), "average: name at least one axis"),
    (lambda: scaled(), "scaled: name at least one axis"),
    (lambda: padded(0, 0), "padded(0, 0): dim and the real size are whole numbers"),
    (lambda: padded("0", 1), "padded('0', 1)"),  # type: ignore[arg-type]
    (lambda: renamed("w"), "renamed('w'): give a function"),  # type: ignore[arg-type]
    (lambda: tied(""), "tied(''): give the name"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_arguments_that_make_no_sense_are_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(StateError) as caught:
        make()
    assert words in str(caught.value)
