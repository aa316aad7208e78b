"""Many small arrays: 2,000 of 4 KiB, split by rows over 2 ranks, to local disk.

The bare loop here writes the very files of ucpstore's step, shared out over the ranks, by four
threads each, with an fsync for every file: what so many files cost by themselves.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import empty as dtensor_empty

from benchmarks.compare.ranks import Row, empty, finish
from benchmarks.compare.state import Tree
from benchmarks.compare.systems import Dcp, Ucpstore, timed

ARRAYS, ELEMENTS = 2000, 1024

_File = tuple[str, bytes]


def rank_main(rank: int, port: int, arguments: argparse.Namespace) -> None:
    """What every rank runs; rank 0 writes the rounds down."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=arguments.ranks
    )
    mesh = init_device_mesh("cpu", (arguments.ranks,))
    source, whole = build(mesh, fill=True), ARRAYS * ELEMENTS * 4
    rows: list[Row] = []
    files: list[_File] = []
    for number in range(-1, arguments.rounds):
        seconds: dict[tuple[str, str], float] = {}
        order = ["ucpstore", "DCP", "bare loop"]
        turn = number % len(order) if number >= 0 else 0
        for name in order[turn:] + order[:turn]:
            place = f"{arguments.url}/{number}-{name.partition(' ')[0]}"
            if name == "bare loop":
                seconds[name, "save"] = timed(lambda place=place, files=files: write(place, files))
            else:
                system = Ucpstore() if name == "ucpstore" else Dcp(1)
                target = build(mesh, fill=False)
                seconds[name, "save"] = timed(
                    lambda place=place, system=system: system.save(place, source)
                )
                seconds[name, "load"] = timed(
                    lambda place=place, system=system, target=target: system.load(place, target)
                )
                check(source, target)
            dist.barrier()
            if number < 0 and name == "ucpstore":
                files = own_files(Path(place), rank, arguments.ranks)
            dist.barrier()
            if rank == 0:
                empty(Path(place))
            dist.barrier()
        for (name, action), value in seconds.items():
            row: Row = {"round": number, "system": name, "action": action}
            rows.append({**row, "seconds": round(value, 4), "bytes": whole})
            if rank == 0:
                print(f"{number:3} {name:12} {action:5} {value:8.3f} s", flush=True)
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


def own_files(folder: Path, rank: int, ranks: int) -> list[_File]:
    """This rank's share of the files of a step: paths below the place, and contents."""
    found = sorted(path for path in folder.glob("steps/**/*") if path.is_file())
    return [(str(path.relative_to(folder)), path.read_bytes()) for path in found[rank::ranks]]


def write(place: str, files: list[_File]) -> None:
    """Write and sync each file, by four threads."""

    def one(file: _File) -> None:
        path = Path(place, file[0])
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        try:
            os.write(descriptor, file[1])
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, files))
    dist.barrier()
