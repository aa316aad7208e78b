"""Run something in a forked child, as a data loader's workers are."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Event, Thread

import pytest


def in_child(check: Callable[[], None]) -> int:
    """The exit status of a forked child that runs `check`."""
    pid = os.fork()
    if pid == 0:
        try:
            check()
            os._exit(0)
        finally:
            os._exit(1)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    pytest.fail("the child hangs")


@contextmanager
def held_by_a_thread(context: AbstractContextManager[object]) -> Iterator[None]:
    """Another thread is inside of `context` for as long as this one is open."""
    inside, leave = Event(), Event()

    def hold() -> None:
        with context:
            inside.set()
            leave.wait(20)

    thread = Thread(target=hold)
    thread.start()
    try:
        assert inside.wait(20)
        yield
    finally:
        leave.set()
        thread.join()
