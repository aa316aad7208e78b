from __future__ import annotations

import pytest

from ucpstore.cli import text


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, "-"), (-3.0, "0 s"), (119.0, "119 s"), (120.0, "2 min"), (7200.0, "2 h"), (2e5, "2 d")],
)
def test_age(seconds: float | None, shown: str) -> None:
    assert text.age(seconds) == shown


def test_small_things() -> None:
    assert text.moment("2025-06-01T12:00:05+00:00") == "2025-06-01 12:00:05"
    assert (text.shape(()), text.shape((4, 5))) == ("scalar", "4 x 5")
    assert (text.counted(1, "step"), text.counted(2, "step")) == ("1 step", "2 steps")
    assert text.json_short({"a": [1, None]}) == '{"a":[1,null]}'
    assert text.json_short(None) == text.json_short({}) == ""
    assert text.cut("abcdefgh", 6) == "abc..."


def test_what_would_move_the_cursor_is_escaped() -> None:
    assert text.printable("a\x1b[2Jb\nc\té") == r"a\x1b[2Jb\nc\té"


def test_columns_align_and_short_rows_run_on() -> None:
    rows = [("a", "1", "x"), ("long name", "10", "y"), ("b", "a value that runs on")]
    assert list(text.columns(rows, frozenset((1,)))) == [
        "a           1  x",
        "long name  10  y",
        "b          a value that runs on",
    ]
    assert list(text.columns([])) == []
