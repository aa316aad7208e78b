"""What the tests that try to break the store share: states that tell whose they are, and checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from services.faults import FaultyStorage, Operation

from ucpstore import CheckpointStore, MismatchError, PerRank, StepNotFoundError, catalog
from ucpstore.agree import Group
from ucpstore.manage.verify import verify
from ucpstore.options import Options
from ucpstore.storage import Storage

State = dict[str, dict[str, Any]]

SMALL = Options(threads=4)


class Death(BaseException):
    """The process is gone: nothing after this operation happens."""


def state_of(job: int, *, alike: bool = True, rank: int | None = None) -> State:
    """A state whose every value tells the job.

    Arrays of all jobs have the same shapes if `alike`, else shapes and names of their own. With a
    `rank` it is one of several ranks': an array that all hold, one that only this rank holds, and
    a value per rank.
    """
    draw = torch.Generator().manual_seed(job)

    def array(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    grown = 0 if alike else job % 7 + 1
    state: State = {
        "m": {"w": array(40 + grown, 30), "b": array(7 + grown)},
        "o": {"e": {"w": array(40 + grown, 30)}, "step": torch.tensor(float(job))},
        "progress": {"job": job, "text": f"of job {job}"},
    }
    if not alike:
        state["m"][f"own_{job}"] = array(3, 5)
    if rank is not None:
        state["r"] = {f"of_{rank}": array(5, 5) + rank}
        state["seen"] = {"at": PerRank(1000 * job + rank)}
    return state


def blank(state: State) -> State:
    """The same structure with other values."""
    found = _blank(state)
    assert isinstance(found, dict)
    return found


def _blank(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, -77.0)
    if isinstance(value, PerRank):
        return PerRank(-1)
    if isinstance(value, Mapping):
        return {key: _blank(inner) for key, inner in value.items()}
    return -1


def same(left: object, right: object) -> bool:
    """Whether two states are equal bit for bit."""
    if isinstance(left, torch.Tensor):
        return (
            isinstance(right, torch.Tensor)
            and left.shape == right.shape
            and left.numpy().tobytes() == right.numpy().tobytes()
        )
    if isinstance(left, PerRank):
        return isinstance(right, PerRank) and left.value == right.value
    if isinstance(left, Mapping):
        return (
            isinstance(right, Mapping)
            and list(left) == list(right)
            and all(same(left[key], right[key]) for key in left)
        )
    return left == right


def on(storage: Storage, options: Options = SMALL) -> CheckpointStore:
    """A store on a storage of one's own making."""
    store = CheckpointStore("memory://replaced", options=options)
    store._storage = storage
    return store


def loaded(
    store: CheckpointStore, state: State, step: int | None, process_group: Group | None = None
) -> bool | None:
    """Whether loading gives exactly `state`; None where it does not fit."""
    target = blank(state)
    try:
        store.load(target, step=step, process_group=process_group)
    except MismatchError:
        return None
    return same(target, state)


def holder(store: CheckpointStore, step: int | None, states: Mapping[int, State]) -> int:
    """Which of the jobs' states a step holds; all of it, bit for bit, and of no other job."""
    found = {job: loaded(store, state, step) for job, state in states.items()}
    (job,) = [job for job, equal in found.items() if equal]
    return job


def check_whole(storage: Storage) -> None:
    """Every byte of every step is as it was written."""
    report = verify(storage, data=True)
    assert report.problems == (), report.problems


def leftovers(storage: Storage) -> list[str]:
    """Objects that belong to no committed generation: data without a record, and marks."""
    paths = []
    for step, numbers in catalog.generations(storage).items():
        for number in numbers:
            ref = catalog.find_step(storage, step)
            assert ref.record.generation == numbers[-1]
            if number == numbers[-1]:
                paths.append(f"{ref.path}/")
    return sorted(
        entry.key
        for prefix in ("steps/", "work/")
        for entry in storage.list(prefix)
        if entry.key.count("/") > 1 and not entry.key.startswith(tuple(paths))
    )


def older(storage: Storage) -> list[tuple[int, list[int]]]:
    """Steps that have more than one record."""
    return [(step, many) for step, many in catalog.generations(storage).items() if len(many) > 1]


def check_unlisted(store: CheckpointStore, step: int) -> None:
    """A step that is not committed is refused by name."""
    assert step not in store.steps()
    try:
        store.load({"m": {}}, step=step)
    except StepNotFoundError as error:
        assert f"step {step} is not" in str(error)  # nothing else may be raised
    else:
        raise AssertionError(f"step {step} was loaded without being listed")


def from_on(number: int, error: BaseException) -> Callable[[Operation], bool]:
    """For `fail_when`: every operation from `number` on, counted from 1."""
    seen = 0

    def hit(operation: Operation) -> bool:
        nonlocal seen
        seen += 1
        return seen >= number

    return hit


def dying(storage: FaultyStorage, number: int, error: BaseException) -> None:
    """Have operation `number` and all after it fail."""
    storage.fail_when(from_on(number, error), error)


def save_in_process(url: str, job: int, step: int, ready: object, slow_s: float = 0.0) -> None:
    """Save from a process of its own: tells through `ready` when it begins and when it is done."""
    torch.set_num_threads(1)
    store = CheckpointStore(url)
    if slow_s:
        faulty = FaultyStorage(store._storage)
        faulty.delay_s = slow_s
        store._storage = faulty
    state = large_state(job)
    ready.send("begin")  # type: ignore[attr-defined]
    try:
        store.save(state, step=step)
    except KeyboardInterrupt:
        ready.send("interrupted")  # type: ignore[attr-defined]
    else:
        ready.send("done")  # type: ignore[attr-defined]


def large_state(job: int) -> State:
    """Thirty files and more, one of them with an index; job 2 has an extra name and more rows."""
    draw = torch.Generator().manual_seed(job)
    rows = 64 if job != 2 else 96
    state: State = {
        "m": {f"w{n}": torch.randn(rows, 64, generator=draw) for n in range(12)},
        "t": {"table": torch.randn(640, 512, generator=draw)},
        "progress": {"job": job},
    }
    if job == 2:
        state["m"]["extra"] = torch.randn(9, generator=draw)
    return state
