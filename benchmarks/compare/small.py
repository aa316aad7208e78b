"""Many small arrays: 2,000 of 4 KiB, split by rows over 2 ranks, to local disk.

The bare loop here writes the very files of ucpstore's step, shared out over the ranks, by four
threads each, with an fsync for every file: what so many files cost by themselves. Once
more they are written as ucpstore does it, begun one by one and synced together at the end.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import empty as dtensor_empty

from benchmarks.compare.ranks import Row, empty, finish, join, turns
from benchmarks.compare.state import Tree
from benchmarks.compare.systems import SYNCED_TOGETHER, Dcp, System, Ucpstore, timed
from ucpstore.storage.files import start_writing, sync_files

ARRAYS, ELEMENTS = 2000, 1024


def rank_main(rank: int, port: int, arguments: argparse.Namespace) -> None:
    """What every rank runs; rank 0 writes the rounds down."""
    mesh = join(rank, port, arguments.ranks)
    source = build(mesh, fill=True)
    rows: list[Row] = []

    def note(number: int, system: System, action: str, seconds: float) -> None:
        row: Row = {"round": number, "system": system.name, "action": action}
        rows.append({**row, "seconds": round(seconds, 4), "bytes": ARRAYS * ELEMENTS * 4})
        if rank == 0:
            print(f"{number:3} {system.name:26} {action:5} {seconds:8.3f} s", flush=True)

    same = [SameFiles(arguments.url, together=False), SameFiles(arguments.url, together=True)]
    systems: list[System] = [Ucpstore(), Dcp(1), *same]
    # First a save whose files the loops write again.
    systems[0].save(f"{arguments.url}/files", source)
    for number, system in turns(systems, range(-1, arguments.rounds)):
        place = f"{arguments.url}/{number}-{systems.index(system)}"
        save = timed(lambda place=place, system=system: system.save(place, source))
        note(number, system, "save", save)
        if system.reshards:
            target = build(mesh, fill=False)
            load = timed(
                lambda place=place, system=system, target=target: system.load(place, target)
            )
            note(number, system, "load", load)
            check(source, target)
        dist.barrier()
        if rank == 0:
            empty(Path(place))
        dist.barrier()
    finish(rank, arguments, rows)


def build(mesh: DeviceMesh, *, fill: bool) -> Tree:
    """The arrays, with values that tell array and place, or -1."""
    tree: Tree = {"model": {}}
    for number in range(ARRAYS):
        tensor = dtensor_empty(ELEMENTS, device_mesh=mesh, placements=[Shard(0)])
        local = tensor.to_local()
        first = mesh.get_local_rank() * local.numel() + number
        local.copy_(torch.arange(first, first + local.numel())) if fill else local.fill_(-1)
        tree["model"][f"layers.{number}.weight"] = tensor
    return tree


def check(source: Tree, target: Tree) -> None:
    """Raise where a loaded array differs."""
    pairs: list[tuple[DTensor, DTensor]] = [
        (source["model"][name], target["model"][name]) for name in source["model"]
    ]
    if not all(torch.equal(one.to_local(), other.to_local()) for one, other in pairs):
        raise AssertionError("a loaded array differs from the saved one")


class SameFiles:
    """The files of ucpstore's step, this rank's share of them, and nothing else."""

    reshards = False

    def __init__(self, url: str, *, together: bool) -> None:
        self.name = SYNCED_TOGETHER if together else "bare loop"
        self._folder = Path(url, "files")
        self._together = together
        self._files: list[tuple[str, bytes]] = []

    def save(self, place: str, tree: Tree) -> None:
        with ThreadPoolExecutor(4) as pool:
            paths = list(
                pool.map(lambda file: self._write(Path(place, file[0]), file[1]), self._own())
            )
        if self._together:
            sync_files(paths)
        dist.barrier()

    def load(self, place: str, tree: Tree) -> None:
        raise AssertionError("a loop knows no arrays")

    def read_slice(self, place: str) -> torch.Tensor:
        raise AssertionError("a loop knows no slices")

    def _own(self) -> list[tuple[str, bytes]]:
        """Paths below the place, and contents; read in the round that is not counted."""
        if not self._files:
            found = sorted(path for path in self._folder.glob("steps/**/*") if path.is_file())
            mine = found[dist.get_rank() :: dist.get_world_size()]
            self._files = [(str(p.relative_to(self._folder)), p.read_bytes()) for p in mine]
        return self._files

    def _write(self, path: Path, data: bytes) -> str:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        try:
            os.write(descriptor, data)
            start_writing(descriptor) if self._together else os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return str(path)
