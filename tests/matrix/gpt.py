"""The published matrix on the GPT of the example: `python tests/matrix/gpt.py` runs all pairs.

Writes tests/matrix/gpt.md and the table in docs/parallelism.md, and exits with 1 where a pair
fails. Every pair is real ranks: bits after there and back with bfloat16 parameters and float32
masters, losses in float32.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from matrix import gpt_table
from matrix.gpt_job import ROWS, Pair, run_row
from ranks.harness import Ranks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="write this file, and no docs")
    sources = list(dict.fromkeys(row.source for row in ROWS))
    parser.add_argument("--source", choices=sources, action="append", help="these only, no file")
    parser.add_argument("--docs", action="store_true", help="only the table from the last results")
    options = parser.parse_args()
    if options.docs:
        write_docs()
        return 0
    ranks, start = Ranks(), time.monotonic()
    pairs: list[Pair] = []
    for row in (row for row in ROWS if row.source in (options.source or sources)):
        with tempfile.TemporaryDirectory() as folder:
            for pair in run_row(ranks, row, Path(folder)):
                pairs.append(pair)
                print(gpt_table.line_of(pair), flush=True)
    ranks.close()
    if not options.source:
        (options.out or gpt_table.RESULTS).write_text(gpt_table.results(pairs))
        if options.out is None:
            write_docs()
    failed = sum(not pair.passed for pair in pairs)
    print(f"{len(pairs) - failed} of {len(pairs)} pairs in {time.monotonic() - start:.0f} s")
    return 1 if failed else 0


def write_docs() -> None:
    """Make the table of the docs from the file of results."""
    docs = gpt_table.with_table(gpt_table.DOCS.read_text(), gpt_table.RESULTS.read_text())
    gpt_table.DOCS.write_text(docs)


if __name__ == "__main__":
    sys.exit(main())
