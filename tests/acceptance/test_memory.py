"""Saving and loading take little memory beside the state itself."""

from __future__ import annotations

from pathlib import Path

from acceptance.memory import measure, measure_full_tensor
from ranks.harness import Ranks

from ucpstore.options import MIB, Options


def test_peak_memory_stays_below_the_budget(ranks: Ranks, tmp_path: Path) -> None:
    budget = Options().budget_bytes
    assert budget == 256 * MIB
    with ranks.fresh(2) as pool:  # no buffers are there yet
        for peaks in pool.run(measure, str(tmp_path / "store"), timeout_s=240):
            assert peaks["state"] >= 4 * budget
            for name in ("first save", "second save", "load", "load resharded"):
                assert peaks[name] < budget, (name, peaks)


def test_it_would_show_if_a_tensor_were_gathered(ranks: Ranks, tmp_path: Path) -> None:
    with ranks.fresh(2) as pool:
        for peak in pool.run(measure_full_tensor, str(tmp_path / "store"), timeout_s=240):
            assert peak > Options().budget_bytes
