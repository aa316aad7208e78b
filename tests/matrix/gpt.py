"""The published matrix on the GPT of the example: `python tests/matrix/gpt.py` runs all pairs.

Writes a table with one line a pair, and exits with 1 where a pair fails. Every pair is real ranks:
bits after there and back with bfloat16 parameters and float32 masters, losses in float32.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from matrix.gpt_job import MORE, ROWS, SAVED, Pair, run_row
from ranks.harness import Ranks

RESULTS = Path(__file__).with_name("gpt.md")

HEADER = f"""# The GPT of the example under other arrangements

`python tests/matrix/gpt.py` writes this. Of each pair the first arrangement saves step {SAVED}.

- Bits: parameters (bfloat16), masters and moments (float32) after the second arrangement has loaded
  and saved them: arrays of both checkpoints, and all ranks of the first, which loads them back.
- Losses: {MORE} more steps in float32 under the second arrangement, against the first going on.

| from | to | arrays | bits | largest relative difference of a loss | |
|---|---|---|---|---|---|
"""


def line_of(pair: Pair) -> str:
    bits = "equal" if not pair.wrong else f"{len(pair.wrong)} differ: {pair.wrong[0]}"
    passed = "passed" if pair.passed else "FAILED"
    return (
        f"| {pair.source} | {pair.target} | {pair.arrays} | {bits} | {pair.difference:.1e} "
        f"| {passed} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--source", choices=ROWS, action="append", help="these only, no file")
    options, ranks, start = parser.parse_args(), Ranks(), time.monotonic()
    lines: list[str] = []
    failed = 0
    for source in options.source or ROWS:
        targets = ROWS[source]
        with tempfile.TemporaryDirectory() as folder:
            for pair in run_row(ranks, source, targets, Path(folder)):
                lines.append(line_of(pair))
                failed += not pair.passed
                print(lines[-1], flush=True)
    ranks.close()
    if not options.source:
        options.out.write_text(HEADER + "\n".join(lines) + "\n")
    print(f"{len(lines) - failed} of {len(lines)} pairs in {time.monotonic() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
