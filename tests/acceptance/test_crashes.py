"""Saves and deletes that fail or die anywhere: a listed step is whole, and the next save works."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from acceptance.breaking import (
    SMALL,
    Death,
    blank,
    check_unlisted,
    check_whole,
    dying,
    holder,
    large_state,
    leftovers,
    loaded,
    older,
    on,
    save_in_process,
    state_of,
)
from ranks.harness import PRELOAD, threads
from services.faults import WRITES, FaultyStorage, Operation
from services.proxy import S3Proxy
from services.seaweed import S3Service

from ucpstore import (
    CheckpointStore,
    OutcomeUnknownError,
    StepExistsError,
    StepNotFoundError,
    StorageError,
    UcpstoreError,
)
from ucpstore.agree import Group
from ucpstore.storage import open_storage
from ucpstore.storage.memory import MemoryStorage

EVERY = WRITES | {"get", "read_into", "size", "list", "folders", "check_writable"}
RECORD = "commits/0000000001"
BEFORE, AFTER, LATER = 1, 2, 3
"""Jobs: whose step was there, who saves while something fails, who saves afterwards."""


# -- the Nth operation fails -------------------------------------------------------------------


def save_alone(storage: FaultyStorage, *, overwrite: bool) -> BaseException | None:
    """Save step 1 from one process; what it raises."""
    try:
        on(storage).save(state_of(AFTER), step=1, overwrite=overwrite)
    except BaseException as error:
        return error
    return None


def save_on_two(storage: FaultyStorage, *, overwrite: bool) -> BaseException | None:
    """Save step 1 from two ranks; what rank 0 raises. Both raise, or both return."""

    def save(group: Group) -> None:
        state = state_of(AFTER)
        state["r"] = {f"of_{group.rank}": torch.full((3, 3), float(group.rank))}
        on(storage).save(state, step=1, overwrite=overwrite, process_group=group)

    first, second = threads(2, save)
    assert (first.error is None) == (second.error is None), (first, second)
    return first.error


def fail_once(storage: FaultyStorage, number: int) -> None:
    storage.fail_at(number, EVERY)


def fail_from_on(storage: FaultyStorage, number: int) -> None:
    seen = 0

    def hit(operation: Operation) -> bool:
        nonlocal seen
        seen += 1
        return seen >= number

    storage.fail_when(hit, StorageError("injected: the server is gone"))


def die(storage: FaultyStorage, number: int) -> None:
    dying(storage, number, Death())


def lie_once(storage: FaultyStorage, number: int) -> None:
    """An object that is there is not found, once."""
    storage.fail_at(number, ["get"], FileNotFoundError("injected: no such object"))


Save = Callable[..., BaseException | None]
Break = Callable[[FaultyStorage, int], None]


def check_after(
    storage: FaultyStorage, error: BaseException | None, break_at: Break, *, existed: bool
) -> None:
    """The step is whole, and the old one or the new one; then saving and deleting work."""
    store = on(storage)
    states = {job: state_of(job) for job in (BEFORE, AFTER, LATER)}
    if store.steps():
        assert store.steps() == [1]
        check_whole(storage)
        held = holder(store, None, states)
        assert held in ((BEFORE, AFTER) if existed else (AFTER,))
        if error is None:
            assert held == AFTER
        elif type(error) is StorageError:
            assert held != AFTER, f"saved, but it raised {error!r}"
    else:
        assert not existed
        assert error is not None
        check_unlisted(store, 1)
    if isinstance(error, StorageError) and break_at is fail_once:
        assert leftovers(storage) == [], error
    store.save(states[LATER], step=1, overwrite=True)
    assert holder(store, 1, states) == LATER
    check_whole(storage)
    assert older(storage) == []
    store.delete(1)
    check_unlisted(store, 1)


@pytest.mark.parametrize("break_at", [fail_once, fail_from_on, die, lie_once])
@pytest.mark.parametrize("save", [save_alone, save_on_two])
@pytest.mark.parametrize("existed", [False, True], ids=["first", "overwrite"])
def test_every_operation_of_a_save_fails_in_turn(
    save: Save, break_at: Break, existed: bool
) -> None:
    raised = 0
    for number in range(1, 200):
        storage = FaultyStorage(MemoryStorage())
        if existed:
            on(storage).save(state_of(BEFORE), step=1)
        begun = len(storage.log)
        break_at(storage, number)
        error = save(storage, overwrite=existed)
        kinds = ["get"] if break_at is lie_once else EVERY
        done = sum(each.kind in kinds for each in storage.log[begun:])
        storage.heal()
        check_after(storage, error, break_at, existed=existed)
        raised += error is not None
        if done < number:
            break
    else:
        raise AssertionError("the save never came through")
    assert number > (2 if break_at is lie_once else 25)
    assert raised >= (1 if break_at is lie_once else 20)


@pytest.mark.parametrize("break_at", [fail_once, fail_from_on, die, lie_once])
@pytest.mark.parametrize("generations", [1, 2])
def test_every_operation_of_a_delete_fails_in_turn(break_at: Break, generations: int) -> None:
    states = {job: state_of(job) for job in (BEFORE, AFTER)}
    for number in range(1, 50):
        storage = FaultyStorage(MemoryStorage())
        store = on(storage)
        store.save(states[BEFORE], step=1)
        if generations == 2:
            storage.fail_when(lambda operation: operation.kind == "delete")
            store.save(states[AFTER], step=1, overwrite=True)
            storage.heal()
            assert older(storage) == [(1, [1, 2])]
        begun = len(storage.log)
        break_at(storage, number)
        error: BaseException | None = None
        try:
            store.delete(1)
        except BaseException as found:
            error = found
        kinds = ["get"] if break_at is lie_once else EVERY
        done = sum(each.kind in kinds for each in storage.log[begun:])
        storage.heal()
        if store.steps():
            check_whole(storage)
            assert error is not None or break_at is lie_once
            # The newest generation goes last, so that an older one never comes back.
            assert holder(store, 1, states) == (AFTER if generations == 2 else BEFORE)
            store.delete(1)
        check_unlisted(store, 1)
        store.save(states[AFTER], step=1)
        assert holder(store, None, states) == AFTER
        if done < number:
            assert error is None
            break
    else:
        raise AssertionError("the delete never came through")
    assert number > 1


def test_every_read_of_a_load_fails_in_turn() -> None:
    storage = FaultyStorage(MemoryStorage())
    state = state_of(AFTER)
    on(storage).save(state, step=1)
    for error in (None, FileNotFoundError("injected"), Death()):
        for number in range(1, 50):
            begun = len(storage.log)
            kinds = ["get", "read_into"] if isinstance(error, FileNotFoundError) else EVERY
            storage.fail_at(number, kinds, error)
            expected: tuple[type[BaseException], ...] = (UcpstoreError, Death)
            with contextlib.suppress(*expected):
                assert loaded(on(storage), state, None)
            done = sum(each.kind in kinds for each in storage.log[begun:])
            storage.heal()
            if done < number:
                break
        assert number > 5


# -- lost answers ------------------------------------------------------------------------------


@pytest.mark.parametrize("existed", [False, True], ids=["first", "overwrite"])
@pytest.mark.parametrize("save", [save_alone, save_on_two])
def test_a_lost_answer_to_the_record_that_is_there(save: Save, existed: bool) -> None:
    storage = FaultyStorage(MemoryStorage())
    if existed:
        on(storage).save(state_of(BEFORE), step=1)
    storage.lose_answer(RECORD, applied=True)
    assert save(storage, overwrite=existed) is None
    assert holder(on(storage), 1, {job: state_of(job) for job in (BEFORE, AFTER)}) == AFTER
    check_whole(storage)
    assert leftovers(storage) == []
    assert older(storage) == []


@pytest.mark.parametrize("existed", [False, True], ids=["first", "overwrite"])
@pytest.mark.parametrize("save", [save_alone, save_on_two])
def test_a_lost_answer_to_the_record_that_comes_later(save: Save, existed: bool) -> None:
    """The put is still on its way when the save gives up: what it names has to stay."""
    storage = FaultyStorage(MemoryStorage())
    states = {job: state_of(job) for job in (BEFORE, AFTER, LATER)}
    if existed:
        on(storage).save(states[BEFORE], step=1)
    late: list[tuple[str, bytes]] = []
    put = storage.inner.put_if_absent

    def lose(key: str, data: bytes) -> None:
        if not key.startswith("commits/0"):
            put(key, data)
            return
        late.append((key, data))
        raise OutcomeUnknownError("injected: no answer")

    storage.inner.put_if_absent = lose  # type: ignore[method-assign]
    error = save(storage, overwrite=existed)
    storage.inner.put_if_absent = put  # type: ignore[method-assign]
    assert type(error) is OutcomeUnknownError
    assert "whether step 1 was committed to memory:// is not known" in str(error)
    assert "look with `ucpstore ls memory://`" in str(error)
    check_whole(storage)
    assert on(storage).steps() == ([1] if existed else [])
    [(key, data)] = late
    put(key, data)
    assert holder(on(storage), 1, states) == AFTER
    check_whole(storage)
    on(storage).save(states[LATER], step=1, overwrite=True)
    assert older(storage) == []
    on(storage).delete(1)


def test_a_lost_answer_that_cannot_be_read_back() -> None:
    """The network goes just after the record: nobody may say that the save failed, or tidy."""
    storage = FaultyStorage(MemoryStorage())
    gone = False

    def fail(operation: Operation) -> bool:
        nonlocal gone
        gone = gone or (operation.kind == "get" and operation.key.startswith("commits/0"))
        return gone

    storage.lose_answer(RECORD, applied=True)
    storage.fail_when(fail, StorageError("injected: no network"))
    error = save_alone(storage, overwrite=False)
    storage.heal()
    assert type(error) is OutcomeUnknownError
    assert loaded(on(storage), state_of(AFTER), 1)
    check_whole(storage)
    on(storage).delete(1)


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("key", ["zarr.json", "commits/zarr.json", "steps/0000000001-"])
def test_a_lost_answer_before_the_record(key: str, applied: bool) -> None:
    """Nothing is committed yet, so the save goes on or fails plainly, leaving nothing."""
    storage = FaultyStorage(MemoryStorage())
    storage.lose_answer(key, applied=applied)
    error = save_alone(storage, overwrite=False)
    if applied:
        assert error is None
        assert loaded(on(storage), state_of(AFTER), 1)
    else:
        assert type(error) is StorageError
        assert "try again" in str(error)
        assert on(storage).steps() == []
    assert leftovers(storage) == []
    assert save_alone(storage, overwrite=applied) is None


def test_a_record_that_another_job_put_and_deleted_meanwhile() -> None:
    """The put is refused because of a record that is gone when it is read."""
    storage = FaultyStorage(MemoryStorage())

    def interfere(operation: Operation) -> bool:
        if operation.kind == "put_if_absent" and operation.key.startswith("commits/0"):
            on(storage.inner).save(state_of(LATER), step=1)
        if operation.kind == "get" and operation.key.startswith("commits/0"):
            storage.inner.delete([operation.key])
        return False

    storage.fail_when(interfere)
    error = save_alone(storage, overwrite=False)
    assert type(error) is StepExistsError


def test_a_record_whose_folder_could_not_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer is read back, and its name made durable after all."""
    synced: list[str] = []
    real = os.fsync

    def sync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_dir():
            synced.append(str(path))
            if "commits/0" in str(path) and sum("commits/0" in each for each in synced) == 1:
                raise OSError(errno.EIO, "injected")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    store = CheckpointStore(tmp_path)
    store.save(state_of(AFTER), step=1)
    assert sum("commits/0" in each for each in synced) == 2
    assert loaded(store, state_of(AFTER), 1)


@pytest.mark.parametrize("lost", [f"/{RECORD}", "/steps/zarr.json", "/m/zarr.json"])
def test_a_dropped_answer_on_s3(s3: S3Service, s3_bucket: str, proxy: S3Proxy, lost: str) -> None:
    url = f"s3://{s3_bucket}/run"
    store = CheckpointStore(url, s3.options("writer", proxy.endpoint))
    proxy.drop_answer("PUT", lost)
    store.save(state_of(AFTER), step=1)
    assert [each.status for each in proxy.requests("PUT", lost)].count(0) == 1
    assert loaded(store, state_of(AFTER), 1)
    check_whole(open_storage(url, s3.options("writer")))
    assert leftovers(open_storage(url, s3.options("writer"))) == []


def test_a_record_that_never_reaches_s3(s3: S3Service, s3_bucket: str, proxy: S3Proxy) -> None:
    url = f"s3://{s3_bucket}/run"
    store = CheckpointStore(url, s3.options("writer", proxy.endpoint))
    # A gateway that answers in the server's place: whether the server has seen it is not known.
    gateway = (504, b"<Error><Code>GatewayTimeout</Code></Error>")
    proxy.answer(lambda method, path: gateway if method == "PUT" and RECORD in path else None)
    with pytest.raises(OutcomeUnknownError, match=f"look with `ucpstore ls {url}`"):
        store.save(state_of(AFTER), step=1)
    assert proxy.count("PUT", RECORD) == 1, "sent once"
    proxy.heal()
    check_unlisted(store, 1)
    store.save(state_of(LATER), step=1)
    assert holder(store, None, {job: state_of(job) for job in (AFTER, LATER)}) == LATER
    # A refusal is not lost: the step is not there, and nothing is kept for it.
    denied = (403, b"<Error><Code>AccessDenied</Code></Error>")
    proxy.answer(lambda method, path: denied if method == "PUT" and "commits/" in path else None)
    before = len(leftovers(open_storage(url, s3.options("writer"))))
    with pytest.raises(StorageError, match="access denied") as caught:
        store.save(state_of(LATER), step=2)
    assert not isinstance(caught.value, OutcomeUnknownError)
    assert len(leftovers(open_storage(url, s3.options("writer")))) == before


# -- interrupts --------------------------------------------------------------------------------


@pytest.mark.parametrize("applied", [False, True])
def test_an_interrupt_of_rank_0_in_its_commit(applied: bool) -> None:
    storage = FaultyStorage(MemoryStorage())

    def interrupt(operation: Operation) -> bool:
        if operation.kind != "put_if_absent" or not operation.key.startswith("commits/0"):
            return False
        if applied:
            put = storage.inner.put_if_absent
            put(operation.key, raw[0])
        return True

    raw: list[bytes] = []
    storage.fail_when(interrupt, KeyboardInterrupt())
    put = storage.put_if_absent

    def remember(key: str, data: bytes) -> None:
        raw[:] = [data]
        put(key, data)

    storage.put_if_absent = remember  # type: ignore[method-assign]

    def save(group: Group) -> None:
        on(storage).save(state_of(AFTER), step=1, process_group=group)

    first, second = threads(2, save, timeout_s=20)
    storage.heal()
    assert type(first.error) is KeyboardInterrupt
    # The others look for the record.
    if applied:
        assert second.error is None
    else:
        assert isinstance(second.error, OutcomeUnknownError)
        assert "rank 0 was interrupted" in str(second.error)
    store = on(storage)
    assert store.steps() == ([1] if applied else [])
    check_whole(storage)
    if applied:
        assert loaded(store, state_of(AFTER), 1)
    store.save(state_of(LATER), step=1, overwrite=applied)
    assert holder(store, 1, {job: state_of(job) for job in (AFTER, LATER)}) == LATER
    assert older(storage) == []


def begin_process(
    url: str, job: int, step: int, slow_s: float = 0.0
) -> tuple[BaseProcess, Connection]:
    """A process that saves, just before it does."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ours, theirs = context.Pipe()
    process = context.Process(target=save_in_process, args=(url, job, step, theirs, slow_s))
    process.start()
    theirs.close()
    assert ours.poll(60), "the process did not start"
    assert ours.recv() == "begin"
    return process, ours


def end_process(process: BaseProcess, pipe: Connection, timeout_s: float) -> list[str]:
    """What the process said until it ended."""
    said = []
    with contextlib.suppress(EOFError, ConnectionResetError):
        while pipe.poll(timeout_s):
            said.append(pipe.recv())
    process.join(timeout_s)
    assert process.exitcode is not None, "it does not end"
    pipe.close()
    process.close()
    return said


def test_a_killed_save(tmp_path: Path) -> None:
    """SIGKILL at 20 moments spread over a save of step 2 over a complete step 1."""
    url = str(tmp_path)
    store = CheckpointStore(url)
    states = {job: large_state(job) for job in (BEFORE, AFTER, LATER)}
    store.save(states[BEFORE], step=1)
    process, pipe = begin_process(url, AFTER, 9)
    begun = time.monotonic()
    assert pipe.poll(60)
    takes_s = time.monotonic() - begun
    assert end_process(process, pipe, 60) == ["done"]
    store.delete(9)
    draw = random.Random(5)
    came_through = unfinished = 0
    for number in range(20):
        process, pipe = begin_process(url, AFTER, 2)
        after_s = (number + draw.random()) / 20 * takes_s
        time.sleep(after_s)
        process.kill()
        end_process(process, pipe, 60)
        if store.latest() == 2:
            came_through += 1
            takes_s = min(takes_s, after_s)  # the save that was timed may have met a stall
            assert loaded(store, states[AFTER], None)
            assert loaded(store, states[AFTER], 2)
        else:
            assert store.latest() == 1
            assert loaded(store, states[BEFORE], None)
            with pytest.raises(StepNotFoundError, match="step 2 is not ") as caught:
                store.load(blank(states[AFTER]), step=2)
            unfinished += "is not committed" in str(caught.value)
        assert loaded(store, states[BEFORE], 1)
        if number % 3:
            if store.latest() == 2:
                store.delete(2)
            continue
        # No cleaning: the first try had more rows, and a name of its own.
        store.save(states[LATER], step=2, overwrite=store.latest() == 2)
        assert holder(store, None, {job: states[job] for job in (AFTER, LATER)}) == LATER
        assert "extra" not in store.open(2)["m"]
        store.delete(2)
    assert unfinished >= 5, (came_through, unfinished)
    check_whole(open_storage(url))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_an_interrupted_save(tmp_path: Path, number: signal.Signals) -> None:
    url = str(tmp_path)
    store = CheckpointStore(url)
    process, pipe = begin_process(url, AFTER, 1, slow_s=0.05)
    while not leftovers(open_storage(url)) or len(leftovers(open_storage(url))) < 5:
        time.sleep(0.01)
    assert process.pid is not None
    begun = time.monotonic()
    os.kill(process.pid, number)
    said = end_process(process, pipe, 20)
    assert time.monotonic() - begun < 10
    assert said == (["interrupted"] if number == signal.SIGINT else [])
    check_unlisted(store, 1)
    if number == signal.SIGINT:
        assert leftovers(open_storage(url)) == []
    store.save(large_state(LATER), step=1)
    assert loaded(store, large_state(LATER), None)
    store.delete(1)


# -- a full disk -------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def used_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


@pytest.mark.parametrize("size", [2, 1])
def test_a_full_disk(small_disk: Path, size: int) -> None:
    store = CheckpointStore(small_disk / "run", options=SMALL)
    first = {"m": {f"w{n}": torch.randn(256, 256) for n in range(4)}}
    large = {"m": {f"w{n}": torch.randn(256, 256) for n in range(40)}}
    store.save(first, step=1)
    used = used_bytes(small_disk)

    def save(group: Group) -> None:
        store.save(large, step=2, process_group=group)

    for outcome in threads(size, save):
        assert isinstance(outcome.error, StorageError), outcome
        assert "no space left" in str(outcome.error).lower()
        assert "free some space" in str(outcome.error)
    chain, error = [], threads(1, save)[0].error
    while error is not None:
        chain.append(getattr(error, "errno", None))
        error = error.__cause__
    assert errno.ENOSPC in chain
    assert used_bytes(small_disk) == used, "what the failed save wrote is freed"
    assert leftovers(open_storage(small_disk / "run")) == []
    assert store.steps() == [1]
    assert loaded(store, first, None)
    check_whole(open_storage(small_disk / "run"))
    # As above, but the disk gets full at each of the last files of a save: documents, record.
    hog = small_disk / "hog"
    saved = []
    for pages in range(0, 60, 2):
        found = os.statvfs(small_disk)
        hog.write_bytes(bytes(max(found.f_bfree - pages, 0) * found.f_frsize))
        with contextlib.suppress(StorageError):
            store.save(state_of(1), step=2)
            saved.append(pages)
        hog.unlink()
        assert store.steps() == [1, 2][: 1 + (pages in saved)]
        check_whole(open_storage(small_disk / "run"))
        assert leftovers(open_storage(small_disk / "run")) == []
        if pages in saved:
            store.delete(2)
    assert 2 < len(saved) < 28, saved
    store.save(first, step=2)
    assert loaded(store, first, 2)
