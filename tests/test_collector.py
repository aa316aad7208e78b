from __future__ import annotations

import gc

import pytest
from services.forking import held_by_a_thread, in_child

from ucpstore.collector import collector_paused


def test_blocks_may_overlap_and_nest() -> None:
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            pass
        assert not gc.isenabled()
        overlapping = held_by_a_thread(collector_paused())
        overlapping.__enter__()
    assert not gc.isenabled()  # the other thread is still inside
    overlapping.__exit__(None, None, None)
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


def test_a_child_forked_meanwhile_collects_again() -> None:
    def check() -> None:
        assert gc.isenabled()
        with collector_paused():
            assert not gc.isenabled()
        assert gc.isenabled()

    with held_by_a_thread(collector_paused()):
        assert in_child(check) == 0


def test_a_child_forked_inside_of_a_block_leaves_it() -> None:
    block = collector_paused()

    def check() -> None:
        block.__exit__(None, None, None)
        with collector_paused():
            assert not gc.isenabled()
        assert gc.isenabled()

    with block:
        assert in_child(check) == 0
    assert gc.isenabled()


def test_it_decorates() -> None:
    @collector_paused()
    def plan() -> bool:
        return gc.isenabled()

    assert [plan(), plan(), gc.isenabled()] == [False, False, True]
