"""Count the system calls of one save: was every file synced before the step was committed?

Runs a save by several ranks under strace and reads what it wrote: each file that was created below
the store, each fsync, and the link(2) that makes the commit record appear.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CALLS = "openat,fsync,link,linkat,rename,renameat,renameat2"
_CREATED = re.compile(r'openat\(.*?"(?P<path>[^"]+)".*O_CREAT')
_SYNCED = re.compile(r"fsync\(\d+<(?P<path>[^>]+)>")
_LINKED = re.compile(r'link(?:at)?\(.*?"(?P<source>[^"]+)".*?"(?P<target>[^"]+)"')

SAVE = """
import sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
import ucpstore
from benchmarks.compare.state import build
from torch.distributed.device_mesh import init_device_mesh

def main(rank, folder, ranks, mib):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    tree = build(mib * 2**20, mesh, columns=False, fill=True)
    ucpstore.save(f"{folder}/store", tree, step=1)
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(
        main, (sys.argv[1], int(sys.argv[2]), int(sys.argv[3])),
        nprocs=int(sys.argv[2]), start_method="fork",
    )
"""


@dataclass(frozen=True, slots=True)
class Syncs:
    """What one save did until its commit, in numbers of files and calls."""

    ranks: int
    data_files: int
    metadata_files: int
    fsync_calls: int
    not_synced_before_the_commit: int


def count(lines: Iterable[str], store: str, ranks: int) -> Syncs:
    """From the lines of strace, in order, up to the link of the commit record.

    Raises ValueError where there is no such link.
    """
    created: set[str] = set()
    synced: set[str] = set()
    calls = 0
    for line in lines:
        if (found := _CREATED.search(line)) and found["path"].startswith(f"{store}/"):
            created.add(found["path"])
            synced.discard(found["path"])
        elif found := _SYNCED.search(line):
            synced.add(found["path"])
            calls += found["path"].startswith(store)
        elif (found := _LINKED.search(line)) and found["target"].startswith(f"{store}/commits/0"):
            # Temporary files are synced under their own names, before they are linked.
            files = {path for path in created if f"{store}/steps/" in path}
            data = {path for path in files if not path.endswith(".json") and ".tmp-" not in path}
            return Syncs(ranks, len(data), len(files - data), calls, len(created - synced))
    raise ValueError(f"no commit to {store} in what strace wrote")


def measure(ranks: int, mib: int) -> Syncs:
    """Save `mib` MiB with `ranks` ranks under strace, and count."""
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        log = Path(folder, "strace.txt")
        script = Path(folder, "save.py")
        script.write_text(SAVE)
        command = ["strace", "-f", "-y", "-qq", "-s", "4096", "-e", f"trace={CALLS}", "-o", log]
        save = [sys.executable, script, folder, str(ranks), str(mib)]
        subprocess.run([*command, *save], check=True, cwd=ROOT, env=_environment())
        return count(log.read_text().splitlines(), f"{folder}/store", ranks)


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT)}


def available() -> bool:
    """Whether strace is installed."""
    return shutil.which("strace") is not None


def write_results(results: Path, ranks: int, mib: int) -> None:
    """Measure, print and store."""
    found = asdict(measure(ranks, mib))
    results.mkdir(parents=True, exist_ok=True)
    (results / "syncs.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))
