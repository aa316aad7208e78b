"""Python's garbage collector, held back while plans are made.

A plan is many small objects that all live on, and every few hundred of them the collector looks
for cycles among everything that the process holds: with torch imported that took up to half of the
time of describing and planning.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_holding = 0
_was_enabled = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """No automatic collection in this process until the last of all such blocks is left.

    A collector that is off stays off. Also a decorator.
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
            _holding -= 1
            if _holding == 0 and _was_enabled:
                gc.enable()
