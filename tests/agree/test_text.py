"""How messages name ranks."""

from __future__ import annotations

import pytest

from ucpstore.agree.text import ranks_text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([3, 2], "ranks 2, 3"),
        ([0, 2, 5, 6, 7, 9, 8], "ranks 0, 2, 5-9"),
        ([1, 2, 3], "ranks 1-3"),
    ],
)
def test_runs_of_ranks_are_shortened(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text
