"""Rank functions of the tests about process groups, threads and event loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist
from acceptance.failing import ODD, OPTIONS, Tried, attempt
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ucpstore


def rows(mesh: DeviceMesh, start: int) -> DTensor:
    """Rows split over a mesh of one dimension; every element tells its place."""
    whole = torch.arange(start, start + ODD[0] * ODD[1], dtype=torch.float32).reshape(ODD)
    return distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)


def round_trip(
    url: str, mesh: DeviceMesh, step: int, group: dist.ProcessGroup | None = None
) -> int:
    """Save and load on the ranks of a mesh; the bytes that this rank sent to others."""
    store = ucpstore.CheckpointStore(url, options=OPTIONS)
    state = {"w": rows(mesh, step)}
    report = store.save(state, step=step, process_group=group).result()
    target = {"w": rows(mesh, 0)}
    store.load(target, step=step, process_group=group)
    assert torch.equal(target["w"].to_local(), state["w"].to_local())
    return report.exchanged_bytes


def in_a_subgroup(url: str) -> int:
    """Ranks 1 and 2 save and load; rank 0 goes its own way, and may save alone meanwhile."""
    group = dist.new_group([1, 2])
    mesh = DeviceMesh("cpu", [1, 2])
    sent = 0
    if dist.get_rank():
        sent = sum(round_trip(url, mesh, step, group) for step in (1, 2))
    else:
        torch.ones(200, 200) @ torch.ones(200, 200)
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [3, 3, 3]
    return sent


def in_no_group(url: str) -> Tried:
    """Rank 0 calls with a group that it is no member of, the others with a mesh outside of it."""
    group = dist.new_group([1, 2])
    state = {"w": rows(init_device_mesh("cpu", (3,)), 0)}
    store = ucpstore.CheckpointStore(url, options=OPTIONS)
    return attempt(lambda: store.save(state, step=1, process_group=group))


def along_a_mesh(url: str) -> int:
    """Each of the two groups along `tp` saves and loads in a store of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    place = f"{url}/{mesh.get_local_rank('dp')}"
    return round_trip(place, mesh["tp"], 1, mesh.get_group("tp"))


def alone(url: str) -> list[int]:
    """Each rank loads by itself, its own part of another step than the others."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    store = ucpstore.CheckpointStore(url, options=OPTIONS)
    for step in range(mesh.size()):
        store.save({"w": rows(mesh, step)}, step=step)
    dist.barrier()
    loaded = []
    # Not the same number of loads on each rank: nobody waits for anybody.
    for turn in range(mesh.get_rank() + 1):
        target = {"w": rows(mesh, 1000)}
        report = store.load(target, step=(mesh.get_rank() + turn) % mesh.size(), collective=False)
        assert torch.equal(target["w"].to_local(), rows(mesh, report.step).to_local())
        loaded.append(report.step)
    return loaded


def in_a_thread(url: str) -> list[float]:
    """A save and a load in another thread, while this one runs collectives."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    errors: list[BaseException] = []

    def work() -> None:
        try:
            round_trip(url, mesh, 1)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    sums = []
    for number in range(30):
        total = torch.tensor(float(number))
        dist.all_reduce(total)
        sums.append(total.item())
    thread.join()
    assert not errors
    return sums


def in_an_event_loop(url: str) -> list[int]:
    """From inside of a running loop, in two loops one after the other."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    async def main(step: int) -> int:
        ticks = asyncio.create_task(asyncio.sleep(0.01, step))
        round_trip(url, mesh, step)
        return await ticks

    return [asyncio.run(main(step)) for step in (1, 2)]


def in_four_threads(url: str) -> list[int]:
    """Four threads at once, each with a process group and a store of its own."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    groups = [dist.new_group() for _ in range(4)]
    sent = run_in_threads([(f"{url}/{n}", mesh, n, group) for n, group in enumerate(groups)])
    for group in groups:
        dist.destroy_process_group(group)
    return sent


def run_in_threads(calls: Sequence[tuple[str, DeviceMesh, int, dist.ProcessGroup]]) -> list[int]:
    sent = [-1] * len(calls)
    start = threading.Barrier(len(calls))

    def work(number: int) -> None:
        start.wait()
        sent[number] = round_trip(*calls[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sent


def count_keys(url: str, times: int) -> list[int]:
    """Keys in the group's key-value store after each round of saves, loads and refused saves."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    store = ucpstore.CheckpointStore(url, options=OPTIONS)
    state = {"w": rows(mesh, 1), "seen": 1, "own": ucpstore.PerRank([dist.get_rank()])}
    # The store that the harness made for the default group.
    keys = dist.distributed_c10d._get_default_store()
    counts = []
    for step in range(times):
        store.save(state, step=7, overwrite=True)
        store.load(state)
        if step % 10 == 0:
            dist.barrier()
            counts.append(keys.num_keys())
            dist.barrier()
    return counts


def count_keys_of_failures(url: str, times: int) -> list[int]:
    """The same with saves that are refused in between."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    store = ucpstore.CheckpointStore(url, options=OPTIONS)
    state = {"w": rows(mesh, 1)}
    keys = dist.distributed_c10d._get_default_store()
    counts = []
    for step in range(times):
        store.save(state, step=step)
        assert attempt(lambda step=step: store.save(state, step=step)).error == "StepExistsError"
        dist.barrier()
        counts.append(keys.num_keys())
        dist.barrier()
    return counts
