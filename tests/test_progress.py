"""What a callback is told, when, and on which thread."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from ucpstore import progress
from ucpstore.errors import StateError
from ucpstore.progress import Progress, ProgressEvent, check_progress

WAIT_S = 30.0


def counts(told: list[ProgressEvent]) -> list[tuple[str, int | None, int, int]]:
    return [(each.phase, each.step, each.done_bytes, each.done_objects) for each in told]


def followed(callback: progress.ProgressCallback) -> Progress:
    made = Progress("save", 3)
    made.follow(callback)
    return made


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is told between the first and the last event of a phase."""
    monkeypatch.setattr(progress, "INTERVAL_S", 3600.0)


@pytest.mark.usefixtures("slowly")
def test_a_phase_is_told_when_it_begins_and_when_it_ends() -> None:
    told: list[ProgressEvent] = []
    made = followed(told.append)
    made.phase("begin", step=7)
    made.phase("write", total_bytes=30, total_objects=2)
    for size in (10, 20):
        made.add(size)
    made.phase("commit")
    made.flush()
    made.close()
    assert counts(told) == [
        ("begin", 7, 0, 0),
        ("write", 7, 0, 0),
        ("write", 7, 30, 2),
        ("commit", 7, 0, 0),
    ]
    assert {(each.action, each.rank) for each in told} == {("save", 3)}
    assert [(each.total_bytes, each.total_objects) for each in told] == [
        (None, None),
        (30, 2),
        (30, 2),
        (None, None),
    ]
    assert 0 <= told[1].seconds <= told[2].seconds < WAIT_S


@pytest.mark.usefixtures("slowly")
def test_an_empty_phase_is_told_once() -> None:
    told: list[ProgressEvent] = []
    made = followed(told.append)
    made.phase("write", total_bytes=0, total_objects=0)
    made.flush()
    made.flush()
    made.close()
    assert counts(told) == [("write", None, 0, 0)]


def test_a_callback_that_hangs_holds_up_nobody_who_counts() -> None:
    told: list[ProgressEvent] = []
    free = threading.Event()

    def callback(event: ProgressEvent) -> None:
        assert free.wait(WAIT_S)
        told.append(event)

    made = followed(callback)
    made.phase("read", total_bytes=4000)
    workers = [
        threading.Thread(target=lambda: [made.add(1) for _ in range(1000)]) for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(WAIT_S)
    assert told == []
    free.set()
    made.flush()
    made.close()
    assert (counts(told)[0], counts(told)[-1]) == (("read", None, 0, 0), ("read", None, 4000, 4000))


def test_calls_are_on_one_thread_apart_in_time_and_rising() -> None:
    told: list[tuple[float, str, int]] = []
    made = followed(
        lambda event: told.append(
            (time.monotonic(), threading.current_thread().name, event.done_bytes)
        )
    )
    made.phase("read")
    began = time.monotonic()
    stop = began + 3.5 * progress.INTERVAL_S

    def work() -> None:
        # A machine that stands still meanwhile gets the time that it needs for two calls.
        while (now := time.monotonic()) < stop or (len(told) < 2 and now < began + WAIT_S):
            made.add(5)
            time.sleep(0.001)

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(WAIT_S)
    made.flush()
    made.close()
    assert {name for _, name, _ in told} == {"ucpstore-progress"}
    assert 3 <= len(told) <= 5  # the first, one for each interval, the last
    done = [each for _, _, each in told]
    assert done == sorted(set(done))
    gaps = [after[0] - before[0] for before, after in itertools.pairwise(told[:-1])]
    assert all(gap > 0.9 * progress.INTERVAL_S for gap in gaps), gaps


@pytest.mark.usefixtures("slowly")
@pytest.mark.parametrize("where", ["flush", "phase", "add"])
def test_an_error_of_the_callback_is_raised_by_what_follows_and_it_is_not_called_again(
    where: str,
) -> None:
    told: list[ProgressEvent] = []
    queued = threading.Event()

    def callback(event: ProgressEvent) -> None:
        told.append(event)
        assert queued.wait(WAIT_S)
        raise KeyError("bar")

    made = followed(callback)
    made.phase("plan")
    made.phase("read")
    queued.set()
    with pytest.raises(KeyError, match="bar"):
        made.flush()
    with pytest.raises(KeyError, match="bar") as raised:
        {"flush": made.flush, "phase": lambda: made.phase("x"), "add": lambda: made.add(1)}[where]()
    assert raised.value.__notes__ == ["raised by the progress callback of this save"]
    made.close()
    assert len(told) == 1


def test_close_waits_for_the_callback_and_drops_the_rest() -> None:
    told: list[str] = []
    begun, free = threading.Event(), threading.Event()

    def callback(event: ProgressEvent) -> None:
        begun.set()
        assert free.wait(WAIT_S)
        told.append(event.phase)

    made = followed(callback)
    made.phase("begin")
    made.phase("write")
    assert begun.wait(WAIT_S)
    threading.Timer(0.05, free.set).start()
    made.close()
    assert told == ["begin"]
    made.close()
    assert "ucpstore-progress" not in {each.name for each in threading.enumerate()}


def test_without_a_callback_there_is_no_thread_and_nothing_to_wait_for() -> None:
    made = Progress("load")
    made.follow(None)
    made.phase("read", total_bytes=5)
    made.add(5)
    made.flush()
    assert not made.followed
    assert "ucpstore-progress" not in {each.name for each in threading.enumerate()}
    made.close()


def test_a_callback_must_be_callable() -> None:
    assert check_progress(None) is None
    assert check_progress(print) is print
    with pytest.raises(StateError, match=r"takes a ucpstore\.ProgressEvent, but it is True"):
        check_progress(True)
