"""Differences of a target and a checkpoint: when they are refused, and what the error says."""

from __future__ import annotations

import pytest

from ucpstore.describe.reads.differences import Differences
from ucpstore.errors import CorruptError, MismatchError, StateError, UnsupportedError


def _raising(error: Exception) -> None:
    raise error


def test_what_does_not_fit_is_collected_and_damage_is_not() -> None:
    differences = Differences()
    differences.attempt(_raising, MismatchError("a: one"))
    differences.attempt(_raising, StateError("b: two"))
    differences.attempt(_raising, UnsupportedError("c: three"))
    assert differences.problems == ["a: one", "b: two"]
    assert differences.unsupported == ["c: three"]
    with pytest.raises(CorruptError):
        differences.attempt(_raising, CorruptError("d: four"))


def test_all_of_it_is_one_error() -> None:
    differences = Differences(
        ["m"], {"k": "k: kept"}, ["u"], [], ["p: problem"], ["x: unsupported"]
    )
    with pytest.raises(MismatchError) as caught:
        differences.refuse(strict=True, alone=True)
    assert str(caught.value).splitlines() == [
        "the target does not fit the checkpoint (5 differences); nothing was changed",
        "  not in the checkpoint: m",
        "  not in the target: u",
        "  x: unsupported",
        "  p: problem",
        "  k: kept",
        "  leave whole items out of the target to select, or pass strict=False to load what both "
        "have",
    ]


def test_what_is_unsupported_is_told_as_that_where_nothing_else_is_wrong() -> None:
    differences = Differences(unexpected=["u"], unsupported=["x: unsupported"])
    with pytest.raises(UnsupportedError, match=r"^x: unsupported$"):
        differences.refuse(strict=True, alone=True)


def test_names_of_one_side_count_in_a_strict_load_and_other_ranks_may_have_the_rest() -> None:
    Differences(missing=["m"], kept={"k": "k: kept"}).refuse(strict=False, alone=True)
    Differences(unexpected=["u"]).refuse(strict=True, alone=False)
    with pytest.raises(MismatchError, match="1 difference\\)"):
        Differences(unexpected=["u"]).refuse(strict=True, alone=True)
    with pytest.raises(MismatchError, match="p: problem"):
        Differences(problems=["p: problem"]).refuse(strict=False, alone=False)


@pytest.mark.parametrize(("count", "lines"), [(4, 4), (5, 1)])
def test_more_than_four_that_say_the_same_share_a_line(count: int, lines: int) -> None:
    problems = [f"m.w{at}: differs; allow it: cast='m.w{at}'" for at in range(count)]
    with pytest.raises(MismatchError) as caught:
        Differences(problems=problems).refuse(strict=True, alone=True)
    _, *found = str(caught.value).splitlines()
    assert len(found) == lines
    if lines == 1:
        assert found == ["  m.w0, m.w1, m.w2, m.w3, m.w4: differs; allow it: cast='m.w*'"]
