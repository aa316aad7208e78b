"""Every pair of ZeRO stage and number of ranks, saved by the one and loaded by the other.

    python tests/deepspeed/cells.py [--sample SEED COUNT] [result.json]

Masters, moments, parameters and buffers of the target, as DeepSpeed reports them, must be those of
the source bit for bit. The result has, for each pair, the names that are not.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from ranks.harness import Ranks  # noqa: E402  # found there
from zero_job import Kind, differences, load_run, save_run  # noqa: E402  # found there

CELLS = [(stage, count) for count in (1, 2, 3, 4) for stage in (0, 1, 2, 3)]
Cell = tuple[int, int]
ALL = [(source, target) for source in CELLS for target in CELLS]


def run(ranks: Ranks, pairs: Iterable[tuple[Cell, Cell]], folder: Path) -> dict[str, list[str]]:
    """What is wrong, by pair. Each source trains and saves once."""
    found: dict[str, list[str]] = {}
    saved: dict[Cell, object] = {}
    for source, target in pairs:
        url = str(folder / shown(source))
        if source not in saved:
            saved[source] = ranks.run(source[1], save_run, url, Kind(source[0]))[0]
        wrong: list[str] = []
        for told, itself in ranks.run(target[1], load_run, url, Kind(target[0])):
            wrong += [*differences(saved[source], told), *itself]
        found[f"{shown(source)} -> {shown(target)}"] = sorted(set(wrong))
    return found


def shown(cell: Cell) -> str:
    return f"zero{cell[0]} x {cell[1]}"


def sample(seed: int, count: int) -> list[tuple[Cell, Cell]]:
    """Some of the pairs, the same for a seed."""
    return sorted(random.Random(seed).sample(ALL, count))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", nargs=2, type=int, metavar=("SEED", "COUNT"))
    parser.add_argument("result", nargs="?", type=Path, default=HERE / "cells.json")
    given = parser.parse_args()
    pairs = sample(*given.sample) if given.sample else ALL
    ranks, begun = Ranks(), time.monotonic()
    found: dict[str, list[str]] = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for source in dict.fromkeys(source for source, _ in pairs):
                row = [pair for pair in pairs if pair[0] == source]
                found.update(run(ranks, row, Path(folder)))
                _write(given.result, found, len(pairs), time.monotonic() - begun)
    finally:
        ranks.close()
    bad = [pair for pair, wrong in found.items() if wrong]
    print(f"{len(found) - len(bad)} of {len(found)} pairs bit-equal; {given.result}")
    return 1 if bad else 0


def _write(path: Path, found: dict[str, list[str]], pairs: int, seconds: float) -> None:
    result = {
        "deepspeed": metadata.version("deepspeed"),
        "torch": metadata.version("torch"),
        "dtype": "bf16 parameters, fp32 masters and moments",
        "pairs": pairs,
        "tried": len(found),
        "bit_equal": sum(not wrong for wrong in found.values()),
        "seconds": round(seconds, 1),
        "differing": found,
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
