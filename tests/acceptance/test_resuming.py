"""A resumed run goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
from acceptance.resuming import AFTER, resumed, uninterrupted
from ranks.harness import Ranks

BOUND = 1e-5
"""Largest relative difference of losses where the order of sums differs."""


def largest_difference(left: list[float], right: list[float]) -> float:
    assert len(left) == len(right) == AFTER
    return max(abs(a - b) / abs(a) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize(("fsdp", "tp"), [(2, 1), (1, 2), (2, 2)])
def test_the_same_arrangement_goes_on_bit_for_bit(
    ranks: Ranks, tmp_path: Path, fsdp: int, tp: int
) -> None:
    url = str(tmp_path)
    first = ranks.run(fsdp * tp, uninterrupted, url, fsdp, tp, 0.2)[0]
    second = ranks.run(fsdp * tp, resumed, url, fsdp, tp, 0.2)[0]
    assert second == first
    assert first[-1] < first[0]


def test_one_process_goes_on_bit_for_bit(tmp_path: Path) -> None:
    url = str(tmp_path)
    first = uninterrupted(url, 1, 1, 0.2)
    assert resumed(url, 1, 1, 0.2) == first


def test_other_arrangements_go_on_within_rounding(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path)
    first = ranks.run(4, uninterrupted, url, 2, 2, 0.0)[0]
    for fsdp, tp in ((2, 1), (4, 1), (3, 1), (1, 4), (1, 2)):
        second = ranks.run(fsdp * tp, resumed, url, fsdp, tp, 0.0)[0]
        assert largest_difference(first, second) <= BOUND, (fsdp, tp)
    assert largest_difference(first, resumed(url, 1, 1, 0.0)) <= BOUND


@pytest.mark.parametrize("state", ["exp_avg_sq", "exp_avg", "step"])
def test_it_would_show_if_a_state_were_lost(tmp_path: Path, state: str) -> None:
    url = str(tmp_path)
    first = uninterrupted(url, 1, 1, 0.0)
    assert largest_difference(first, resumed(url, 1, 1, 0.0)) <= BOUND
    assert largest_difference(first, resumed(url, 1, 1, 0.0, reset=state)) > 1e3 * BOUND
