"""Every arrangement loads what every arrangement saved, bit for bit; and it shows where not."""

from __future__ import annotations

from pathlib import Path

import pytest
from matrix.cells import run_row
from matrix.job import ARRANGEMENTS, load_job_with_shifted_reads, save_job
from ranks.harness import Ranks


@pytest.mark.parametrize("source", ARRANGEMENTS)
def test_saved_here_loads_everywhere(ranks: Ranks, tmp_path: Path, source: str) -> None:
    row = run_row(ranks, source, tmp_path)
    assert len(row) == 8
    assert {target: names for target, names in row.items() if names} == {}


def test_an_offset_shifted_by_one_in_the_planner_makes_cells_fail(
    ranks: Ranks, tmp_path: Path
) -> None:
    url, reference = str(tmp_path / "store"), str(tmp_path / "reference")
    ranks.run(2, save_job, "fsdp2", url, reference)
    for target in ("fsdp4", "tp2", "fsdp2xtp2"):
        count = ARRANGEMENTS[target].ranks
        found = ranks.run(count, load_job_with_shifted_reads, target, url, reference)
        bad = {name for names in found for name in names}
        assert bad >= {"parameter wide.weight", "exp_avg wide.weight", "exp_avg embed.weight"}
