"""Rank functions of the failure tests: calls that go wrong on some ranks, and what comes after.

Each case is one call of save or load that the ranks do not make alike, or in which one of them
fails. Around it run the user's own collectives, and after it everything has to work again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from services.faults import FaultyStorage
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ucpstore
from ucpstore import exchange

KIB = 1024
OPTIONS = ucpstore.Options(
    arrive_timeout_s=30.0,
    silence_timeout_s=30.0,
    report_timeout_s=60.0,
    # Small, so that small arrays make many objects and chunks.
    chunk_bytes=32 * KIB,
    least_bytes=64 * KIB,
    target_bytes=128 * KIB,
)
QUICK = replace(OPTIONS, arrive_timeout_s=1.5)
"""For calls that some ranks do not make."""
IMPATIENT = replace(OPTIONS, silence_timeout_s=3.0, report_timeout_s=5.0)
"""For calls in which a rank falls silent."""

ODD = (1051, 257)
"""Ranks hold 526 or 263 rows, which no chunk divides: objects are shared, there is an exchange."""
EVEN = (2048, 256)
"""Objects end where the ranks' rows do: there is none."""


@dataclass(frozen=True)
class Tried:
    """What one rank met: the error's class and text with notes, or nothing, and the seconds."""

    error: str
    text: str
    seconds: float


def attempt(action: Callable[[], object]) -> Tried:
    """Run it, and tell what it raised."""
    since = time.monotonic()
    error, text = "", ""
    try:
        action()
    except Exception as met:
        error = type(met).__name__
        text = "\n".join([str(met), *getattr(met, "__notes__", ())])
    return Tried(error, text, time.monotonic() - since)


def values(shape: tuple[int, ...], start: int = 0, dtype: torch.dtype = torch.float32) -> DTensor:
    """Rows split over all ranks; every element tells its place."""
    whole = torch.arange(start, start + shape[0] * shape[1]).reshape(shape).to(dtype)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)


class Bad:
    """An object that raises when it gives or takes its state."""

    def __init__(self, giving: Exception | None = None, taking: Exception | None = None) -> None:
        self.giving, self.taking = giving, taking

    def state_dict(self) -> dict[str, object]:
        if self.giving is not None:
            raise self.giving
        return {"position": 7}

    def load_state_dict(self, state: object) -> None:
        if self.taking is not None:
            raise self.taking


@dataclass
class Job:
    """One rank and its state. Step 1 is saved before anything goes wrong."""

    url: str
    shape: tuple[int, ...]
    state: dict[str, object] = field(default_factory=dict)
    rank: int = field(default_factory=lambda: dist.get_rank())
    size: int = field(default_factory=lambda: dist.get_world_size())

    def __post_init__(self) -> None:
        self.store = ucpstore.CheckpointStore(self.url, options=OPTIONS)
        self.faults = FaultyStorage(self.store._storage)
        self.store._storage = self.faults
        if not self.state:
            self.state = {"m": {"w": values(self.shape)}, "progress": {"seen": 3}}
        self.guilty = self.rank == self.size - 1

    def save(self, state: object = None, step: int = 2, **arguments: object) -> None:
        self.store.save(self.state if state is None else state, step=step, **arguments)  # type: ignore[arg-type]

    def load(self, state: object = None, step: int = 1, **arguments: object) -> None:
        self.store.load(self.state if state is None else state, step=step, **arguments)  # type: ignore[arg-type]


CASES: dict[str, Callable[[Job], None]] = {}


def case(function: Callable[[Job], None]) -> Callable[[Job], None]:
    CASES[function.__name__] = function
    return function


# -- ranks that call something else, or nothing --------------------------------------------------


@case
def rank_0_alone(job: Job) -> None:
    if job.rank == 0:
        job.save(options=QUICK)


@case
def all_but_rank_0(job: Job) -> None:
    if job.rank != 0:
        job.save(options=QUICK)


@case
def all_but_the_last(job: Job) -> None:
    if not job.guilty:
        job.load(options=QUICK)


@case
def one_loads(job: Job) -> None:
    if job.guilty:
        job.load()
    else:
        job.save()


@case
def rank_0_loads(job: Job) -> None:
    if job.rank == 0:
        job.load()
    else:
        job.save()


@case
def other_step(job: Job) -> None:
    job.save(step=3 if job.guilty else 2)


@case
def other_step_to_load(job: Job) -> None:
    job.load(step=3 if job.guilty else 1)


@case
def other_names(job: Job) -> None:
    job.save({"m": {"v" if job.guilty else "w": job.state["m"]["w"]}})


@case
def other_shapes(job: Job) -> None:
    rows, columns = job.shape
    job.save({"m": {"w": values((rows, columns + job.guilty))}})


@case
def other_plain_shapes(job: Job) -> None:
    job.save({"m": {"w": torch.zeros(3 + job.guilty, 5)}})


@case
def other_dtypes(job: Job) -> None:
    dtype = torch.bfloat16 if job.guilty else torch.float32
    job.save({"m": {"w": values(job.shape, dtype=dtype)}})


@case
def other_values(job: Job) -> None:
    job.save({"m": {"w": torch.full((300, 1000), float(job.guilty))}})


@case
def other_leaves(job: Job) -> None:
    job.save({**job.state, "progress": {"seen": 4 if job.guilty else 3}})


@case
def other_placements(job: Job) -> None:
    mesh = init_device_mesh("cpu", (job.size,))
    placement = Shard(1) if job.guilty else Shard(0)
    whole = torch.zeros(job.shape)
    job.save({"m": {"w": distribute_tensor(whole, mesh, [placement], src_data_rank=None)}})


@case
def other_options(job: Job) -> None:
    job.save(options=replace(OPTIONS, threads=4 + job.guilty))


@case
def other_overwrite(job: Job) -> None:
    job.save(overwrite=bool(job.guilty))


@case
def other_metadata(job: Job) -> None:
    job.save(metadata={"loss": job.rank})


@case
def other_stores(job: Job) -> None:
    ucpstore.save(f"{job.url}-{int(job.guilty)}", job.state, step=2, options=OPTIONS)


@case
def wrong_environment(job: Job) -> None:
    """A variable that one machine sets wrongly."""
    if job.guilty:
        os.environ["UCPSTORE_THREADS"] = "many"
    os.environ["UCPSTORE_ARRIVE_TIMEOUT_S"] = "30"
    try:
        ucpstore.save(job.url, job.state, step=2)
    finally:
        del os.environ["UCPSTORE_ARRIVE_TIMEOUT_S"]
        os.environ.pop("UCPSTORE_THREADS", None)


# -- one rank that fails -------------------------------------------------------------------------


@case
def describing(job: Job) -> None:
    loader = Bad(giving=ZeroDivisionError("no epoch")) if job.guilty else Bad()
    job.save({**job.state, "loader": loader})


@case
def describing_on_rank_0(job: Job) -> None:
    loader = Bad(giving=ZeroDivisionError("no epoch")) if job.rank == 0 else Bad()
    job.save({**job.state, "loader": loader})


@case
def describing_the_unsupported(job: Job) -> None:
    job.save({**job.state, "odd": (lambda: 0) if job.guilty else 0})


@case
def writing(job: Job) -> None:
    if job.guilty:
        job.faults.fail_when(lambda each: each.kind in ("put", "sync"))
    job.save()


@case
def writing_on_rank_0(job: Job) -> None:
    if job.rank == 0:
        job.faults.fail_when(lambda each: each.kind == "put" and "/m/w/" in each.key)
    job.save()


@case
def writing_with_another_error(job: Job) -> None:
    if job.guilty:
        job.faults.fail_when(lambda each: each.kind == "put", MemoryError("no memory"))
    job.save()


@case
def committing(job: Job) -> None:
    if job.rank == 0:
        job.faults.fail_when(lambda each: each.kind == "put_if_absent" and "steps/0" in each.key)
    job.save()


@case
def exchanging(job: Job) -> None:
    """The others wait in the exchange for one that fails on its way into it."""

    def fail(*_: object) -> None:
        raise MemoryError("no buffer")

    kept = exchange._Gloo.exchange
    if job.guilty:
        exchange._Gloo.exchange = fail  # type: ignore[method-assign]
    try:
        job.save(options=IMPATIENT)
    finally:
        exchange._Gloo.exchange = kept  # type: ignore[method-assign]


@case
def reading(job: Job) -> None:
    """A bit of the last chunk is flipped meanwhile, which only the last rank needs."""
    job.load()


@case
def reading_with_another_error(job: Job) -> None:
    if job.guilty:
        job.faults.fail_when(lambda each: each.kind == "read_into", MemoryError("no memory"))
    job.load()


@case
def applying(job: Job) -> None:
    taking = KeyError("position") if job.guilty else None
    job.load({**job.state, "loader": Bad(taking=taking)})


@case
def matching(job: Job) -> None:
    """The targets of the ranks that fit keep every bit too."""
    rows, columns = job.shape
    target = torch.zeros(rows, columns + 1) if job.guilty else values(job.shape, 7)
    try:
        job.load({"m": {"w": target}})
    finally:
        if isinstance(target, DTensor):
            assert torch.equal(target.to_local(), values(job.shape, 7).to_local())


@case
def resolving(job: Job) -> None:
    job.load(step=77)


def flip_last_chunk(store: Path) -> None:
    """Flip one bit of data in the last object of the array; again puts it back."""
    folder = next(store.glob("steps/0000000001-*/m/w"))
    last = max(folder.glob("c.*"), key=lambda path: tuple(map(int, path.name.split(".")[1:])))
    data = bytearray(last.read_bytes())
    data[len(data) // 2] ^= 4
    last.write_bytes(data)


# -- around the call -----------------------------------------------------------------------------


@contextmanager
def collectives(count: int) -> Iterator[list[float]]:
    """The user's own collectives in another thread meanwhile; their results."""
    sums: list[float] = []
    group = dist.group.WORLD

    def run() -> None:
        for number in range(count):
            total = torch.full((1000,), float(number))
            dist.all_reduce(total, group=group)
            sums.append(total[17].item())
            time.sleep(0.01)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield sums
    finally:
        thread.join()


def check_collectives(size: int) -> None:
    """What the user does with torch.distributed works; groups made now too."""
    total = torch.ones(10)
    dist.all_reduce(total)
    assert total.tolist() == [size] * 10
    group = dist.new_group()
    dist.all_reduce(total, group=group)
    assert total.tolist() == [size * size] * 10
    dist.destroy_process_group(group)


def check_store(job: Job, step: int) -> None:
    """The next save and load of the same processes work, bit for bit; then the step goes."""
    job.faults.heal()
    state = {"m": {"w": values(job.shape, step)}, "progress": {"seen": step}}
    report = job.store.save(state, step=step).result()
    assert report.step == step
    target = {"m": {"w": values(job.shape)}, "progress": {"seen": 0}}
    target["m"]["w"].to_local().zero_()
    job.store.load(target)
    assert target["progress"]["seen"] == step
    assert torch.equal(target["m"]["w"].to_local(), state["m"]["w"].to_local())
    exchanged = torch.tensor(report.exchanged_bytes)
    dist.all_reduce(exchanged)
    assert (exchanged.item() > 0) == (job.shape == ODD)
    if job.rank == 0:
        job.store.delete(step)
    dist.barrier()


def prepare(url: str, shape: tuple[int, ...]) -> None:
    """Step 1, which every case loads or leaves alone."""
    job = Job(url, shape)
    job.save({**job.state, "loader": Bad()}, step=1)


def go_wrong(name: str, url: str, shape: tuple[int, ...], step: int) -> Tried:
    """One case: what this rank met. Everything around it works, and no step appears."""
    job = Job(url, shape)
    before = job.store.steps()
    check_collectives(job.size)
    damaged = name == "reading" and job.rank == 0
    if damaged:
        flip_last_chunk(Path(url))
    dist.barrier()
    with collectives(10) as sums:
        tried = attempt(lambda: CASES[name](job))
    assert sums == [float(number * job.size) for number in range(10)]
    dist.barrier()
    if damaged:
        flip_last_chunk(Path(url))
    assert job.store.steps() == before
    check_collectives(job.size)
    check_store(replace(job), step)
    return tried
