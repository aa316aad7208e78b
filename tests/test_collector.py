from __future__ import annotations

import gc
import threading

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


def test_it_decorates() -> None:
    @collector_paused()
    def plan() -> bool:
        return gc.isenabled()

    assert [plan(), plan(), gc.isenabled()] == [False, False, True]
