"""Compare ucpstore with DeepSpeed's own checkpoints of a live engine, side by side in one run.

    python -m benchmarks.deepspeed            # ZeRO-2: 4 ranks save, 2 load, 50 M parameters
    python -m benchmarks.deepspeed --stage 3
    python -m benchmarks.deepspeed page       # the figures in docs/deepspeed.md, from all

needs the extra `deepspeed`. In every round each system saves the same engine into a fresh place and
loads it into a fresh engine on another number of ranks: ucpstore by `save` and `load`, DeepSpeed by
`save_checkpoint` and an fsync of its files, `ds_to_universal`, and `load_checkpoint` of the
universal checkpoint. The order changes from round to round, the first round is not counted, and
after each load everything that DeepSpeed reports of the engine is compared with what was saved.
Raw times go to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "deepspeed")]
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch  # noqa: E402
from ranks.harness import Ranks  # noqa: E402  # found there

import ucpstore  # noqa: E402
from benchmarks.compare.ranks import Row, empty  # noqa: E402
from benchmarks.deepspeed import job  # noqa: E402
from benchmarks.deepspeed.page import OURS, THEIRS, table_of, write_page  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
LIMIT_S = 300.0

# The tool's own work, without the start of its process.
CONVERT = """
import time
from deepspeed.checkpoint import ds_to_universal as tool

arguments = tool.parse_arguments()
begun = time.perf_counter()
tool.main(arguments)
print("took", time.perf_counter() - begun)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="?", choices=("run", "page"), default="run")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds")
    parser.add_argument("--savers", type=int, default=4, help="ranks that save")
    parser.add_argument("--loaders", type=int, default=2, help="ranks that load")
    parser.add_argument("--folder", default="build/deepspeed", help="where rounds write")
    parser.add_argument("--out", default=str(RESULTS), help="where raw times go")
    arguments = parser.parse_args()
    if arguments.what == "page":
        write_page(Path(arguments.out))
        return
    folder = Path(arguments.folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    ranks, rows = Ranks(), []
    try:
        with tempfile.TemporaryDirectory(prefix="run-", dir=folder) as place:
            rows = rounds(arguments, ranks, Path(place))
    finally:
        ranks.close()
    counted = [row for row in rows if int(str(row["round"])) >= 0]
    store(arguments, counted)
    print(table_of(counted, arguments.loaders))


def rounds(arguments: argparse.Namespace, ranks: Ranks, folder: Path) -> list[Row]:
    """All rounds; every part of what a system does is a row."""
    stage, rows = arguments.stage, []
    expected = ranks.run(arguments.savers, job.train, stage, timeout_s=LIMIT_S)[0]
    with torch.device("meta"):
        count = sum(each.numel() for each in job.Transformer().parameters())
    size = 14 * count  # bf16 parameters, fp32 masters and two moments
    for number in range(-1, arguments.rounds):
        order = (OURS, THEIRS) if number % 2 else (THEIRS, OURS)
        for system in order:
            place = folder / f"{number}-{system}"
            ours = system == OURS
            save = job.save_ours if ours else job.save_theirs
            load = job.load_ours if ours else job.load_theirs
            seconds = ranks.run(arguments.savers, save, str(place), timeout_s=LIMIT_S)[0]
            if not ours:
                seconds |= convert(place)
            told = ranks.run(arguments.loaders, load, str(place), stage, timeout_s=LIMIT_S)
            seconds["load"] = told[0][0]
            for _, found in told:
                check(system, expected, found)
            for action, taken in seconds.items():
                row: Row = {"round": number, "system": system, "action": action}
                rows.append({**row, "seconds": round(taken, 4), "bytes": size})
                print(f"{number:3} {system:10} {action:16} {taken:8.3f} s", flush=True)
            empty(place)
    return rows


def convert(place: Path) -> dict[str, float]:
    """Run DeepSpeed's converter with its defaults; seconds of its work, and of its start."""
    command = [sys.executable, "-c", CONVERT, "--input_folder", str(place / job.TAG)]
    command += ["--output_folder", str(place / job.UNIVERSAL)]
    # What Megatron-DeepSpeed puts into its checkpoints and others have to ask for.
    command.append("--inject_missing_state")
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    whole = time.perf_counter() - begun
    if done.returncode:
        raise RuntimeError(f"ds_to_universal failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    took = float(done.stdout.rsplit("took ", 1)[1])
    return {"convert": took, "start of convert": whole - took}


def check(system: str, expected: dict[str, str], found: dict[str, str]) -> None:
    """Raise where anything that was loaded is not what was saved, bit for bit."""
    wrong = sorted(key for key in expected | found if expected.get(key) != found.get(key))
    if wrong:
        raise AssertionError(f"{system}: {len(wrong)} of {len(expected)} differ: {wrong[:5]}")


def store(arguments: argparse.Namespace, rows: list[Row]) -> None:
    """Write the counted rounds down."""
    facts = {
        "stage": arguments.stage,
        "savers": arguments.savers,
        "loaders": arguments.loaders,
        "rounds": arguments.rounds,
        "cores": os.cpu_count(),
        "torch": metadata.version("torch"),
        "deepspeed": metadata.version("deepspeed"),
        "ucpstore": ucpstore.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    lines = ",\n".join(json.dumps(row) for row in rows)
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    name = f"deepspeed-zero{arguments.stage}.json"
    (folder / name).write_text(f'{json.dumps(facts)[:-1]}, "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
