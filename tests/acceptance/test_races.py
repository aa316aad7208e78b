"""Jobs that save, overwrite, delete and read the same step at the same moment."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from acceptance.breaking import (
    SMALL,
    State,
    blank,
    check_whole,
    holder,
    leftovers,
    loaded,
    older,
    on,
    same,
    state_of,
)
from ranks.harness import threads, values
from services.faults import FaultyStorage, Operation
from services.seaweed import S3Service

from ucpstore import (
    CheckpointStore,
    CorruptError,
    InProgressError,
    StepExistsError,
    StepNotFoundError,
    StorageError,
    UcpstoreError,
    catalog,
)
from ucpstore.agree import Group, local_group
from ucpstore.format import layout
from ucpstore.saving import commit as committing
from ucpstore.saving import mark as marking
from ucpstore.saving import save as saving
from ucpstore.storage import Storage, open_storage

Errors = list[BaseException | None]


@dataclass(frozen=True)
class Place:
    """Where stores are made: `storage()` is a new client of the same place each time."""

    kind: str
    storage: Callable[[], Storage]


@pytest.fixture(params=["memory", "local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    kind = request.param
    if kind == "s3":
        service: S3Service = request.getfixturevalue("s3")
        url, options = f"s3://{request.getfixturevalue('s3_bucket')}/run", service.options("writer")
        yield Place(kind, lambda: open_storage(url, options))
    elif kind == "local":
        yield Place(kind, lambda: open_storage(tmp_path / "run"))
    else:
        name = f"memory://{tmp_path.name}-{random.random()}"
        yield Place(kind, lambda: open_storage(name))


class Meeting:
    """A storage that waits for another's job just before it puts a commit record."""

    def __init__(self, place: Place, barrier: threading.Barrier | None, before_s: float) -> None:
        self.storage = FaultyStorage(place.storage())
        self._barrier = barrier
        self._before_s = before_s
        self.storage.fail_when(self._wait)

    def _wait(self, operation: Operation) -> bool:
        if operation.kind == "put_if_absent" and operation.key.startswith("commits/0"):
            if self._barrier is not None:
                self._barrier.wait(30)
            time.sleep(self._before_s)
        return False


def race(
    place: Place,
    job: int,
    step: int,
    *,
    ranks: int = 1,
    overwrite: bool = False,
    alike: bool,
    meet: bool,
) -> dict[int, Errors]:
    """Two jobs save a step at once: the errors of each one's ranks, None where it saved."""
    draw = random.Random(job)
    barrier = threading.Barrier(2) if meet else None
    start = threading.Barrier(2 * ranks)
    outcomes: dict[int, Errors] = {}

    def save(me: int) -> None:
        storage = Meeting(place, barrier, draw.random() * 0.002).storage
        groups = local_group(ranks)

        def one(group: Group) -> None:
            rank = None if ranks == 1 else group.rank
            state = state_of(me, alike=alike, rank=rank)
            start.wait(30)
            on(storage).save(state, step=step, overwrite=overwrite, process_group=group)

        outcomes[me] = [outcome.error for outcome in threads(groups, one)]

    jobs = [threading.Thread(target=save, args=(me,)) for me in (job, job + 1)]
    for each in jobs:
        each.start()
    for each in jobs:
        each.join(60)
    return outcomes


def check_race(
    place: Place, job: int, step: int, outcomes: dict[int, Errors], *, alike: bool
) -> int:
    """One job saved and the other was told, on all ranks; the step is the winner's alone."""
    assert len(outcomes) == 2, f"a job hangs: {outcomes}"
    won = [me for me, errors in outcomes.items() if errors == [None] * len(errors)]
    assert len(won) == 1, outcomes
    for me, errors in outcomes.items():
        for error in errors if me not in won else ():
            assert type(error) is StepExistsError, error
            assert f"step {step} " in str(error)
    store = on(place.storage())
    ranks = len(outcomes[job])
    states = {me: state_of(me, alike=alike, rank=None if ranks == 1 else 0) for me in outcomes}
    for state in states.values():
        state.pop("seen", None)  # of rank 0 only
        state.pop("r", None)
    assert holder(store, step, states) == won[0]
    return won[0]


def check_store(place: Place, steps: list[int]) -> None:
    """Nothing but whole steps, each with one record."""
    storage = place.storage()
    assert on(storage).steps() == steps
    check_whole(storage)
    assert leftovers(storage) == []
    assert older(storage) == []


@pytest.mark.parametrize("alike", [True, False])
def test_two_jobs_that_save_one_step(place: Place, alike: bool) -> None:
    winners = []
    for step in range(25):
        outcomes = race(place, 10 * step, step, alike=alike, meet=step % 3 != 0)
        winners.append(check_race(place, 10 * step, step, outcomes, alike=alike) - 10 * step)
    assert set(winners) == {0, 1}, "one of the jobs always wins: no race"
    check_store(place, list(range(25)))


def test_two_jobs_that_overwrite_one_step(place: Place) -> None:
    on(place.storage()).save(state_of(1), step=1)
    for job in range(10, 110, 10):
        outcomes = race(place, job, 1, alike=True, overwrite=True, meet=True)
        check_race(place, job, 1, outcomes, alike=True)
    # Without meeting at the record, the one that comes later may replace the other's step.
    for job in range(500, 550, 10):
        outcomes = race(place, job, 1, alike=False, overwrite=True, meet=False)
        won = [me for me, errors in outcomes.items() if errors == [None]]
        assert won, outcomes
        states = {me: state_of(me, alike=False) for me in (job, job + 1)}
        assert holder(on(place.storage()), 1, states) in won
    check_store(place, [1])


def check_rank(place: Place, won: int, step: int, alike: bool, group: Group) -> None:
    """Both ranks' arrays are the winner's, and the rank's own value is this rank's."""
    expected = state_of(won, alike=alike, rank=group.rank)
    expected["r"] |= state_of(won, alike=alike, rank=1 - group.rank)["r"]
    assert loaded(on(place.storage()), expected, step, group)


def test_two_jobs_of_two_ranks(place: Place) -> None:
    steps = list(range(4 if place.kind == "s3" else 8))
    for step in steps:
        job = 10 * step
        alike, overwrite = step % 2 == 0, step % 4 > 1
        if overwrite:
            on(place.storage()).save(state_of(9), step=step)
        outcomes = race(place, job, step, ranks=2, alike=alike, overwrite=overwrite, meet=True)
        won = check_race(place, job, step, outcomes, alike=alike)
        values(threads(2, partial(check_rank, place, won, step, alike)))
    check_store(place, steps)


def paused_save(
    storage: Storage, state: State, *, overwrite: bool, key: str = "commits/0"
) -> tuple[threading.Thread, threading.Event, list[BaseException | None]]:
    """A save in a thread that stands still before its record until the event is set."""
    faulty = FaultyStorage(storage)
    reached, go = threading.Event(), threading.Event()
    outcome: list[BaseException | None] = []

    def wait(operation: Operation) -> bool:
        if operation.kind == "put_if_absent" and operation.key.startswith(key):
            reached.set()
            assert go.wait(30)
        return False

    faulty.fail_when(wait)

    def run() -> None:
        try:
            on(faulty).save(state, step=1, overwrite=overwrite)
            outcome.append(None)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert reached.wait(30)
    return thread, go, outcome


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_number_that_was_taken_and_freed_again(place: Place, overwrite: bool) -> None:
    """While a save runs, others commit its generation, replace it by the next and remove it."""
    storage = place.storage()
    if overwrite:
        on(storage).save(state_of(1), step=1)
    thread, go, outcome = paused_save(place.storage(), state_of(2), overwrite=overwrite)
    on(storage).save(state_of(3), step=1, overwrite=overwrite)
    on(storage).save(state_of(4), step=1, overwrite=True)
    go.set()
    thread.join(30)
    assert type(outcome[0]) is StepExistsError, outcome
    assert holder(on(storage), 1, {job: state_of(job) for job in (1, 2, 3, 4)}) == 4
    check_whole(storage)
    assert leftovers(storage) == []
    assert older(storage) == []


def test_a_step_that_is_deleted_while_it_is_overwritten(place: Place) -> None:
    storage = place.storage()
    on(storage).save(state_of(1), step=1)
    thread, go, outcome = paused_save(place.storage(), state_of(2), overwrite=True)
    with pytest.raises(InProgressError, match=r"step 1 .* is being saved"):
        on(storage).delete(1)
    assert holder(on(storage), None, {1: state_of(1), 2: state_of(2)}) == 1
    go.set()
    thread.join(30)
    assert outcome == [None]
    assert holder(on(storage), None, {1: state_of(1), 2: state_of(2)}) == 2
    on(storage).delete(1)
    assert on(storage).steps() == []
    assert leftovers(storage) == []


# -- readers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["get", "read_into"])
@pytest.mark.parametrize("change", ["delete", "overwrite"])
def test_a_reader_whose_step_goes(place: Place, change: str, kind: str) -> None:
    """At the n-th read, for all n: the whole old step, the whole new one, or a clear word."""
    told = 0
    for number in range(1, 30):
        storage = place.storage()
        on(storage).save(state_of(1), step=1, overwrite=True)
        faulty = FaultyStorage(place.storage())
        seen = 0

        def interfere(
            operation: Operation, number: int = number, storage: Storage = storage
        ) -> bool:
            nonlocal seen
            seen += operation.kind == kind
            if operation.kind == kind and seen == number:
                if change == "delete":
                    on(storage).delete(1)
                else:
                    on(storage).save(state_of(2), step=1, overwrite=True)
            return False

        faulty.fail_when(interfere)
        target = blank(state_of(1))
        try:
            on(faulty, replace(SMALL, threads=1)).load(target, step=1)
        except StepNotFoundError as error:
            assert not isinstance(error, CorruptError)
            assert "while it was read" in str(error)
            told += 1
        else:
            assert same(target, state_of(1)) or same(target, state_of(2))
        if seen < number:
            break
    else:
        raise AssertionError("reads never ended")
    assert told, "no read met the change"


def test_a_lazy_view_whose_step_goes(place: Place) -> None:
    storage = place.storage()
    on(storage).save(state_of(1), step=1)
    seen = on(storage).open(1)
    assert seen["m"]["b"].read().shape == (7,)
    on(storage).save(state_of(2), step=1, overwrite=True)
    with pytest.raises(StepNotFoundError, match="was deleted or overwritten"):
        seen["m"]["w"].read()


# -- deleting ----------------------------------------------------------------------------------


def test_delete_takes_records_lowest_first_and_data_last(place: Place) -> None:
    storage = FaultyStorage(place.storage())
    on(storage).save(state_of(1), step=7)
    # Two generations at once are what a job that died after its record leaves.
    storage.fail_when(lambda operation: operation.kind in ("delete", "delete_tree"))
    on(storage).save(state_of(2), step=7, overwrite=True)
    storage.heal()
    assert older(storage) == [(7, [1, 2])]
    storage.log.clear()
    on(storage).delete(7)
    gone = [each.key for each in storage.log if each.kind in ("delete", "delete_tree")]
    assert gone[:2] == ["commits/0000000007/zarr.json", "commits/0000000007.2/zarr.json"]
    assert [key.startswith("steps/0000000007-") for key in gone] == [False, False, True, True]
    assert on(storage).steps() == []


def test_a_deleted_step_is_not_called_unfinished(place: Place) -> None:
    """Servers may go on listing the folders that a delete has emptied."""
    store = on(place.storage())
    store.save(state_of(1), step=1)
    store.delete(1)
    with pytest.raises(StepNotFoundError, match=r"step 1 is not in .* no committed step"):
        store.load(blank(state_of(1)), step=1)
    with pytest.raises(StepNotFoundError, match="step 1 is not in "):
        store.delete(1)


def test_a_mark_that_a_committed_save_left_does_not_keep_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process lives on elsewhere, but the record says that the save is over."""
    storage = open_storage(tmp_path)
    store = on(storage)
    store.save(state_of(1), step=1)
    mark = replace(
        committing.new_mark(1), save_id=catalog.find_step(storage, 1).record.save_id, host="other"
    )
    storage.put(layout.work_key(mark.save_id), mark.to_bytes())
    monkeypatch.setattr(marking, "_ended", set())
    store.delete(1)
    assert store.steps() == []


def test_a_mark_of_a_dead_process_does_not_keep_a_step(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    store = on(storage)
    store.save(state_of(1), step=1)
    real = committing.new_mark(1)

    def put(**changes: object) -> None:
        mark = replace(real, **changes)
        storage.put(layout.work_key(real.save_id), mark.to_bytes())

    put()
    with pytest.raises(InProgressError, match=f"process {real.pid} on {real.host}"):
        store.delete(1)
    # Another host's process cannot be looked up, and its clock may run ahead or behind.
    for created in ("2099-01-01T00:00:00+00:00", real.created):
        put(host="elsewhere", created=created)
        with pytest.raises(InProgressError):
            store.delete(1)
    put(step=2)
    store.delete(1)
    for changes in (
        {"pid": 2**22 + 1},
        {"host": "elsewhere", "created": "2020-01-01T00:00:00+00:00"},
    ):
        store.save(state_of(1), step=1, overwrite=True)
        put(**changes)
        store.delete(1)
    assert store.steps() == []


# -- within one process ------------------------------------------------------------------------


def test_saves_that_overlap_in_one_process(place: Place) -> None:
    """More structures than plans are kept, and buffers for hardly more than one object."""
    store = on(place.storage(), replace(SMALL, budget_bytes=16 * 1024))
    count = saving.KEPT_PLANS + 4
    errors: list[BaseException] = []

    def work(me: int) -> None:
        try:
            for step in (100 + me, 200 + me):
                store.save(state_of(me, alike=False), step=step)
                assert loaded(store, state_of(me, alike=False), step)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(me,)) for me in range(count)]
    for each in workers:
        each.start()
    for each in workers:
        each.join(60)
    assert errors == []
    assert len(store.steps()) == 2 * count
    assert leftovers(place.storage()) == []


def test_a_plan_that_others_push_out_while_a_save_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore("memory://pushed-out")
    store.save(state_of(1), step=1)
    told = saving.Arrival.to_bytes

    def arrive(self: saving.Arrival) -> bytes:
        saving._plans.clear()
        return told(self)

    monkeypatch.setattr(saving.Arrival, "to_bytes", arrive)
    store.save(state_of(2), step=2)
    assert holder(store, 2, {1: state_of(1), 2: state_of(2)}) == 2


def test_one_step_from_two_threads_of_one_store(place: Place) -> None:
    store = on(place.storage())
    for number in range(5):
        outcomes: list[object] = []

        def work(me: int, step: int = number, outcomes: list[object] = outcomes) -> None:
            try:
                store.save(state_of(me), step=step)
                outcomes.append(me)
            except UcpstoreError as error:
                outcomes.append(type(error))

        workers = [threading.Thread(target=work, args=(me,)) for me in (1, 2)]
        for each in workers:
            each.start()
        for each in workers:
            each.join(60)
        assert StepExistsError in outcomes
        won = holder(store, number, {1: state_of(1), 2: state_of(2)})
        assert won in outcomes
    check_whole(place.storage())
    assert leftovers(place.storage()) == []


# -- ranks -------------------------------------------------------------------------------------


def test_a_rank_that_is_too_slow_can_add_nothing(tmp_path: Path) -> None:
    options = replace(SMALL, report_timeout_s=0.3)
    held = threading.Event()
    late: list[str] = []

    def save(group: Group) -> None:
        storage = FaultyStorage(open_storage(tmp_path))
        rank = group.rank
        if rank == 1:

            def wait(operation: Operation) -> bool:
                if operation.kind == "put" and "of_1" in operation.key:
                    assert held.wait(30)
                    late.append(operation.key)
                return False

            storage.fail_when(wait)
        try:
            on(storage, options).save(state_of(1, rank=rank), step=1, process_group=group)
        finally:
            held.set()

    outcomes = threads(2, save)
    for outcome in outcomes:
        assert isinstance(outcome.error, UcpstoreError), outcome
        assert "rank 1 did not reach" in str(outcome.error)
    assert late, "the rank wrote after the others gave up"
    storage = open_storage(tmp_path)
    store = on(storage)
    assert store.steps() == []
    with pytest.raises(StepNotFoundError):
        store.load(blank(state_of(1)), step=1)
    store.save(state_of(2), step=1)
    assert holder(store, 1, {1: state_of(1), 2: state_of(2)}) == 2
    check_whole(storage)


def test_large_replicas_are_compared_until_a_save_of_them_is_committed() -> None:
    store = CheckpointStore("memory://replicas")

    def save(group: Group) -> None:
        value = torch.zeros(600, 600)
        value[0, 0] = group.rank
        store.save({"m": {"w": value}}, step=1, process_group=group)

    for _ in range(2):
        for outcome in threads(2, save):
            assert "m/w: ranks 0 and 1 hold different values" in str(outcome.error)
    assert store.steps() == []


# -- rights ------------------------------------------------------------------------------------


def test_an_identity_that_may_not_list(s3: S3Service, s3_bucket: str) -> None:
    url = f"s3://{s3_bucket}/run"
    CheckpointStore(url, s3.options("writer")).save(state_of(1), step=1)
    store = CheckpointStore(url, s3.options("getter"))
    for action in (
        lambda: store.load(blank(state_of(1))),
        lambda: store.load(blank(state_of(1)), step=1),
        lambda: store.save(state_of(2), step=1, overwrite=True),
        lambda: store.save(state_of(2), step=2),
        lambda: store.delete(1),
        store.steps,
        store.latest,
    ):
        with pytest.raises(StorageError, match=r"cannot list .*access denied"):
            action()
    whole = CheckpointStore(url, s3.options("reader"))
    assert holder(whole, 1, {1: state_of(1), 2: state_of(2)}) == 1
    assert whole.steps() == [1]
