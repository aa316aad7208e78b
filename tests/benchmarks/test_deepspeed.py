from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.deepspeed.page import BEGIN, END, PAGE, section, sections, table_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def rows() -> list[dict[str, object]]:
    """Two rounds in which DeepSpeed takes 1, 2 and 3 s, and 2, 4 and 6 s, ucpstore 1 s for each."""
    found = []
    for number, times in enumerate((1.0, 2.0)):
        parts = {"save_checkpoint": 0.75, "fsync": 0.25, "save": 1, "convert": 2, "load": 3}
        parts["start of convert"] = 9
        for action, seconds in parts.items():
            found.append(("DeepSpeed", number, action, seconds * times))
        found += [("ucpstore", number, action, 1.0) for action in ("save", "load")]
    return [
        {"system": s, "round": n, "action": a, "seconds": t, "bytes": 10**9} for s, n, a, t in found
    ]


def test_the_conversion_is_a_part_of_the_load_elsewhere() -> None:
    assert table_of(rows(), 2).splitlines()[2:] == [
        "| save | ucpstore | 1.000 | 1.00 |  |  |",
        "| save | DeepSpeed | 1.500 | 0.67 | 1.50 | 1.00 to 2.00 |",
        "| load on 2 ranks | ucpstore | 1.000 | 1.00 |  |  |",
        "| load on 2 ranks | DeepSpeed | 7.500 | 0.13 | 7.50 | 5.00 to 10.00 |",
        "| save, load on 2 ranks | ucpstore | 2.000 | 0.50 |  |  |",
        "| save, load on 2 ranks | DeepSpeed | 9.000 | 0.11 | 4.50 | 3.00 to 6.00 |",
    ]


def test_the_parts_of_the_other_system_are_named() -> None:
    facts = dict.fromkeys(("rounds", "cores", "deepspeed", "torch", "ucpstore", "date"), "?")
    text = section({**facts, "stage": 2, "savers": 4, "loaders": 2, "rows": rows()})
    assert "1.12 are `save_checkpoint`, 0.38 the fsync, 3.00 `ds_to_universal`" in text
    assert "4.50 `load_checkpoint`" in text
    assert "process, 13.50, is not counted" in text


def test_the_page_has_the_kept_figures() -> None:
    written = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert written == f"\n\n{sections(RESULTS)}\n", "run python -m benchmarks.deepspeed page"
