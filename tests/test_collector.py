from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable

import pytest

from ucpstore.collector import collector_paused


def test_blocks_may_overlap_and_nest() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with collector_paused():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            pass
        thread.start()
        inside.wait(10)
    assert not gc.isenabled()  # the other thread is still inside
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_an_error_gives_the_collector_back() -> None:
    with pytest.raises(ValueError, match="inside"), collector_paused():
        raise ValueError("inside")
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def in_child(action: Callable[[], bool]) -> bool:
    """Whether `action` is true in a forked child, within 10 s."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)
        try:
            os._exit(0 if action() else 1)
        finally:
            os._exit(2)
    return os.waitpid(pid, 0)[1] == 0


def test_a_child_forked_meanwhile_collects_again() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with collector_paused():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(10)

    def child() -> bool:
        before = gc.isenabled()
        with collector_paused():
            within = gc.isenabled()
        return before and not within and gc.isenabled()

    assert in_child(child)
    leave.set()
    thread.join()


def test_a_child_forked_inside_of_a_block_leaves_it() -> None:
    pid = -1
    with collector_paused():
        pid = os.fork()
        if pid == 0:
            signal.alarm(10)
    if pid == 0:
        with collector_paused():
            off = not gc.isenabled()
        os._exit(0 if off and gc.isenabled() else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert gc.isenabled()


def test_it_decorates() -> None:
    @collector_paused()
    def plan() -> bool:
        return gc.isenabled()

    assert [plan(), plan(), gc.isenabled()] == [False, False, True]
