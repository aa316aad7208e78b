"""Python's garbage collector, held back while plans are made.

A plan is many small objects that all live on, and every few hundred of them the collector looks
for cycles among everything that the process holds, which with torch imported is much.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_holding = 0
_was_enabled = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """No automatic collection in this process until the last of all such blocks is left.

    A collector that is off stays off; one that is turned off meanwhile is on again afterwards. Also
    a decorator.
    """
    global _holding, _was_enabled  # the collector is the process's too
    with _lock:
        if _holding == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _holding += 1
    try:
        yield
    finally:
        with _lock:
            _holding = max(_holding - 1, 0)  # 0 in a child that was forked inside of a block
            if _holding == 0 and _was_enabled:
                gc.enable()


def _after_fork() -> None:
    """A child does not have the threads that would leave their blocks."""
    global _lock, _holding
    _lock = threading.Lock()
    if _holding and _was_enabled:
        gc.enable()
    _holding = 0


os.register_at_fork(after_in_child=_after_fork)
