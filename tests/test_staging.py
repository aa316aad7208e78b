"""Buffers: reuse, the byte budget, and who is served next."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from ucpstore import staging
from ucpstore.staging import BufferPool

UNIT = 4096


def started(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    time.sleep(0.05)
    return thread


def test_a_buffer_that_came_back_is_used_again() -> None:
    pool = BufferPool(10 * UNIT)
    first = pool.acquire(UNIT)
    pool.release(first)
    assert pool.acquire(UNIT - 1) is first


def test_what_is_larger_than_the_budget_goes_alone() -> None:
    pool = BufferPool(UNIT)
    with pool.take(8 * UNIT) as buffer:
        assert buffer.size == 8 * UNIT
    with pool.take(1) as buffer:
        assert buffer.size == 1


def test_buffers_are_given_in_the_order_in_which_they_were_asked_for() -> None:
    pool = BufferPool(2 * UNIT)
    out = pool.acquire(UNIT)
    order: list[str] = []

    def ask(name: str, size: int) -> None:
        with pool.take(size):
            order.append(name)

    large = started(lambda: ask("large, first", 2 * UNIT))
    small = started(lambda: ask("small, fits now", UNIT))
    assert order == []
    pool.release(out)
    for thread in (large, small):
        thread.join(timeout=10)
    assert order == ["large, first", "small, fits now"]


def test_memory_that_the_system_refuses_does_not_count_as_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = BufferPool(UNIT)

    class NoMemory:
        uint8 = np.uint8

        @staticmethod
        def empty(*_: object) -> None:
            raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(staging, "np", NoMemory)
        with pytest.raises(MemoryError):
            pool.acquire(UNIT)
    served: list[int] = []

    def ask() -> None:
        with pool.take(UNIT) as buffer:
            served.append(buffer.size)

    started(ask).join(timeout=10)
    started(ask).join(timeout=10)
    assert served == [UNIT, UNIT]
