from __future__ import annotations

import threading
import time

import pytest

from ucpstore.crew import SMALL_BYTES, Crew


class Clock:
    """Moves on when it is told to, so that no stall of the machine is taken for a slow disk."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def names(
    crew: Crew, sizes: list[int], clock: Clock | None = None, seconds: float = 0.0
) -> list[str]:
    """The threads that ran tasks of these sizes, each of which took `seconds` by the clock."""
    found = [""] * len(sizes)

    def task(number: int) -> None:
        if clock:
            clock.now += seconds
        found[number] = threading.current_thread().name

    for number, size in enumerate(sizes):
        crew.submit(task, number, size=size)
    crew.wait()
    return found


def test_quick_small_tasks_are_run_by_the_caller_and_large_ones_by_threads() -> None:
    own = threading.current_thread().name
    with Crew(2, "crew", Clock()) as crew:
        found = names(crew, [1, SMALL_BYTES, SMALL_BYTES + 1, 0])
    assert found[:2] == [own, own]
    assert found[2].startswith("crew")
    assert found[3] == own


def test_slow_small_tasks_go_to_threads_but_for_a_few() -> None:
    own = threading.current_thread().name
    clock = Clock()
    with Crew(8, "crew", clock) as crew:
        found = names(crew, [1] * 64, clock, 0.02)
    assert found[:2] == [own, own]
    assert found.count(own) == 4, "two to see that they are slow, and every 32nd to see it again"


def test_one_stall_does_not_send_all_others_to_threads() -> None:
    own = threading.current_thread().name
    clock = Clock()
    with Crew(2, "crew", clock) as crew:
        names(crew, [1], clock, 5.0)
        assert set(names(crew, [1] * 100, clock)) == {own}


def test_a_place_that_becomes_quick_is_found_out() -> None:
    own = threading.current_thread().name
    clock = Clock()
    with Crew(2, "crew", clock) as crew:
        names(crew, [1] * 4, clock, 0.02)
        found = names(crew, [1] * 200, clock)
    assert found[0] != own
    assert set(found[-100:]) == {own}


def fail() -> None:
    raise KeyboardInterrupt


def test_errors_of_threads_come_when_they_are_waited_for() -> None:
    done = []
    with Crew(1, "crew") as crew:
        crew.submit(fail, size=SMALL_BYTES + 1)
        crew.submit(lambda: done.append(time.sleep(0.1)), size=SMALL_BYTES + 1)
        with pytest.raises(KeyboardInterrupt):
            crew.wait()
    assert done == [None], "the end of the block waits for all"


def test_errors_of_what_the_caller_runs_come_at_once() -> None:
    with Crew(1, "crew") as crew, pytest.raises(KeyboardInterrupt):
        crew.submit(fail, size=1)


def test_of_several_errors_the_first_begun_is_raised() -> None:
    begun = threading.Event()

    def first() -> None:
        assert begun.wait(10)
        raise KeyError("first")

    def second() -> None:
        begun.set()
        raise ValueError("second")

    with Crew(2, "crew") as crew:
        crew.submit(first, size=SMALL_BYTES + 1)
        crew.submit(second, size=SMALL_BYTES + 1)
        with pytest.raises(KeyError, match="first"):
            crew.wait()


def test_no_more_threads_than_asked_for_run_at_once() -> None:
    running, most, lock = 0, 0, threading.Lock()

    def task() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1

    with Crew(3, "crew") as crew:
        for _ in range(12):
            crew.submit(task, size=SMALL_BYTES + 1)
        crew.wait()
    assert most == 3


def test_a_crew_works_on_after_a_wait_and_leaves_no_threads() -> None:
    done: list[int] = []
    before = set(threading.enumerate())
    with Crew(2, "crew") as crew:
        for number in range(6):
            crew.submit(done.append, number, size=SMALL_BYTES + 1)
            crew.wait()
            assert done == list(range(number + 1))
    assert set(threading.enumerate()) == before


def test_an_interrupt_while_threads_are_told_to_end_loses_none() -> None:
    crew = Crew(2, "crew")
    put, told = crew._tasks.put, []

    class Interrupted:
        get = crew._tasks.get

        def put(self, task: object) -> None:
            if task is None and not told:
                told.append(task)
                raise KeyboardInterrupt
            put(task)  # type: ignore[arg-type]

    with pytest.raises(KeyboardInterrupt), crew:
        for _ in range(2):
            crew.submit(time.sleep, 0.01, size=SMALL_BYTES + 1)
        crew._tasks = Interrupted()  # type: ignore[assignment]
        crew.wait()
