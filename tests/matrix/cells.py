"""Run the matrix: `python tests/matrix/cells.py` prints all 64 cells. `--source NAME` runs a row.

Exits with 1 where a cell fails. Every cell is a real save by the ranks of its row and a real load
by the ranks of its column.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from matrix.job import ARRANGEMENTS, load_job, save_job
from ranks.harness import Ranks


def run_row(ranks: Ranks, source: str, folder: Path) -> dict[str, list[str]]:
    """Save under one arrangement, load under every one; the differences by target."""
    url, reference = str(folder / source), str(folder / f"{source}.reference")
    _on(ranks, source, save_job, url, reference)
    return {
        target: sorted({n for names in _on(ranks, target, load_job, url, reference) for n in names})
        for target in ARRANGEMENTS
    }


def _on(
    ranks: Ranks, name: str, job: Callable[..., list[str]], url: str, reference: str
) -> list[list[str]]:
    """Run a job under an arrangement; one process is this one, without a process group."""
    count = ARRANGEMENTS[name].ranks
    if count == 1:
        return [job(name, url, reference)]
    return ranks.run(count, job, name, url, reference)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--source", choices=ARRANGEMENTS, action="append")
    sources = parser.parse_args().source or list(ARRANGEMENTS)
    width = max(map(len, ARRANGEMENTS)) + 2
    print("saved under \\ loaded under".ljust(28) + "".join(n.ljust(width) for n in ARRANGEMENTS))
    failed = cells = 0
    start = time.monotonic()
    ranks = Ranks()
    with tempfile.TemporaryDirectory() as folder:
        for source in sources:
            row = run_row(ranks, source, Path(folder))
            marks = ["equal" if not names else f"{len(names)} BAD" for names in row.values()]
            print(source.ljust(28) + "".join(mark.ljust(width) for mark in marks), flush=True)
            cells += len(row)
            failed += sum(bool(names) for names in row.values())
    ranks.close()
    print(f"{cells - failed} of {cells} cells bit-equal in {time.monotonic() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
