from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.compare.report import best_of, table
from benchmarks.compare.state import shapes


def row(system: str, number: int, seconds: float) -> dict[str, object]:
    return {
        "action": "save",
        "system": system,
        "round": number,
        "seconds": seconds,
        "bytes": 2_000_000_000,
    }


def test_ratios_are_taken_round_by_round() -> None:
    rows = [row("ucpstore", n, s) for n, s in enumerate((1.0, 2.0, 4.0))]
    rows += [row("DCP, 1 thread", n, s) for n, s in enumerate((3.0, 4.0, 6.0))]
    lines = table(rows).splitlines()
    assert lines[2] == "| save | ucpstore | 2.000 | 1.00 |  |  |"
    assert lines[3] == "| save | DCP, 1 thread | 4.000 | 0.50 | 2.00 | 1.50 to 3.00 |"


def test_of_each_kind_the_best_is_compared() -> None:
    by_system = {
        "ucpstore": {0: 2.0},
        "DCP, 1 thread": {0: 3.0},
        "DCP, 4 threads": {0: 2.5},
        "bare loop, 4 MiB": {0: 1.0},
        "bare loop, 8 MiB": {0: 1.5},
    }
    assert list(best_of(by_system)) == ["ucpstore", "DCP, 4 threads", "bare loop, 4 MiB"]


def test_the_state_has_the_size_that_was_asked_for() -> None:
    total = 2**30
    used = 0
    for _, shape in shapes(total):
        size = 10
        for extent in shape:
            size *= extent
        used += size
    assert 0.9 * total < used <= total
