"""What every rank of a comparison runs: all systems, in every round, in turn."""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ucpstore
from benchmarks.compare.report import table
from benchmarks.compare.state import Tree, build, check, first_rows, local_bytes
from benchmarks.compare.systems import System, all_systems, timed
from ucpstore.options import MIB

Row = dict[str, object]


def join(rank: int, port: int, ranks: int) -> DeviceMesh:
    """The mesh of all ranks of this run, once they have met."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    return init_device_mesh("cpu", (ranks,))


def rank_main(rank: int, port: int, arguments: argparse.Namespace) -> None:
    """What every rank runs; rank 0 writes the rounds down."""
    mesh = join(rank, port, arguments.ranks)
    rows: list[Row] = []
    total, local = arguments.mib * MIB, arguments.what == "local"
    systems = all_systems(arguments.url)

    def note(number: int, system: System, action: str, seconds: float, size: int) -> None:
        whole = torch.tensor([float(size)], dtype=torch.float64)
        dist.all_reduce(whole)
        row: Row = {"round": number, "system": system.name, "action": action}
        rows.append({**row, "seconds": round(seconds, 4), "bytes": int(whole)})
        if rank == 0:
            print(f"{number:3} {system.name:18} {action:24} {seconds:8.3f} s", flush=True)

    for number, system in turns(systems, range(-1, arguments.rounds)):
        place = f"{arguments.url}/{number}-{systems.index(system)}"
        source = build(total, mesh, columns=False, fill=True)
        save = timed(lambda place=place, system=system, source=source: system.save(place, source))
        note(number, system, "save", save, local_bytes(source))
        for action, seconds, size in loads(system, place, total, mesh, cold=False):
            note(number, system, action, seconds, size)
        if system.reshards:
            note(number, system, "one slice", *slice_of(system, place, source))
        dist.barrier()
        if rank == 0 and local:
            empty(Path(place))
        dist.barrier()
    if local:
        # Apart, since memory that was just freed is slow to use again, above all in a virtual
        # machine: whatever came next would pay for the dropped cache.
        for number, system in turns(systems, range(-1, arguments.rounds)):
            place = f"{arguments.url}/cold-{systems.index(system)}"
            if number < 0:
                system.save(place, build(total, mesh, columns=False, fill=True))
                continue
            for action, seconds, size in loads(system, place, total, mesh, cold=True):
                note(number, system, f"{action}, cold", seconds, size)
    finish(rank, arguments, rows)


def turns(systems: list[System], rounds: range) -> Iterator[tuple[int, System]]:
    """Round and system: all systems in each round, from another one on in each."""
    for number in rounds:
        first = number % len(systems)
        for system in systems[first:] + systems[:first]:
            yield number, system


def finish(rank: int, arguments: argparse.Namespace, rows: list[Row]) -> None:
    """Remove what local rounds left; store and print the counted ones."""
    if rank == 0:
        if arguments.what != "s3":
            shutil.rmtree(arguments.url)
        counted = [row for row in rows if int(str(row["round"])) >= 0]
        store_rows(arguments, counted)
        print(table(counted))
    dist.destroy_process_group()


def loads(
    system: System, place: str, total: int, mesh: DeviceMesh, *, cold: bool
) -> Iterator[tuple[str, float, int]]:
    """Load in every way that the system knows: (action, seconds of the slowest rank, own bytes)."""
    for action, columns, items in (
        ("load", False, ("model", "exp_avg", "exp_avg_sq")),
        ("load, rows to columns", True, ("model", "exp_avg", "exp_avg_sq")),
        ("weights only", False, ("model",)),
    ):
        if columns and not system.reshards:
            continue
        whole = build(total, mesh, columns=columns, fill=False)
        target = {item: whole[item] for item in items}
        if cold:
            drop_cache()
        seconds = timed(lambda target=target: system.load(place, target))
        check(target, total, mesh, columns=columns)
        yield action, seconds, local_bytes(target)
        del whole, target
        gc.collect()


def slice_of(system: System, place: str, source: Tree) -> tuple[float, int]:
    """One rank reads 64 rows of one weight, as a person who looks into a checkpoint does."""
    found: list[torch.Tensor] = []
    alone = dist.get_rank() == 0
    seconds = timed(lambda: found.append(system.read_slice(place)) if alone else None)
    if alone and not torch.equal(found[0], first_rows(source)):
        raise AssertionError(f"{system.name}: the slice differs")
    return seconds, found[0].nbytes if alone else 0


def empty(folder: Path) -> None:
    """Give back the space of all files below, but keep the files until the end.

    For minutes after a deletion ext4 looks at each freed inode before it makes a file, which would
    make every system slower, and most those that write many files.
    """
    for path in folder.rglob("*"):
        if path.is_file():
            os.truncate(path, 0)
    os.sync()


def drop_cache() -> None:
    """Empty the page cache, so that the next read comes from the disk."""
    dist.barrier()
    if dist.get_rank() == 0:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
    dist.barrier()


def store_rows(arguments: argparse.Namespace, rows: list[Row]) -> None:
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "what": arguments.what,
        "ranks": arguments.ranks,
        "mib": arguments.mib,
        "rounds": arguments.rounds,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "ucpstore": ucpstore.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    lines = ",\n".join(json.dumps(row) for row in rows)
    head = json.dumps(facts)[:-1]
    (folder / f"{arguments.what}.json").write_text(f'{head}, "rows": [\n{lines}\n]}}\n')
