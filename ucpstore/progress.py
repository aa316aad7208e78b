"""Progress: what a save, a load or a verification tells a function of the user while it runs.

The function is called on a thread of the call's own, one call after the other, so neither a slow
bar nor a metrics system holds up the threads that move the bytes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ucpstore.errors import StateError

Action = Literal["save", "load", "verify"]

INTERVAL_S = 0.1
"""Least time between two events, but for the first and the last one of a phase."""


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """Where a save, a load or a verification is, on this rank.

    A save goes through the phases `describe`, `begin`, `plan`, `write` and `commit`; a load through
    `resolve`, `plan`, `read`, `apply` and `agree`; a verification through `records`, and then
    `documents` and `objects` for each step.

    Only `write`, `read` and `objects` have totals (None elsewhere, but `records` counts steps).
    `done_bytes` never falls within a phase and ends at `total_bytes`, which are this rank's own: of
    the objects that it puts, or of the chunks that it reads, checksums included, as they are
    without compression. Objects count once all of them that the rank needs is there; a verification
    counts documents of arrays among them. `seconds` is the time since the phase began, `step` None
    until it is known, `rank` the rank in the process group of the call.
    """

    action: Action
    phase: str
    step: int | None
    rank: int
    done_bytes: int
    total_bytes: int | None
    done_objects: int
    total_objects: int | None
    seconds: float


ProgressCallback = Callable[[ProgressEvent], object]
"""A function that is told events; what it returns is ignored."""


def check_progress(given: object) -> ProgressCallback | None:
    """Raise StateError for what cannot be called."""
    if given is None or callable(given):
        return given
    raise StateError(
        f"progress must be a function that takes a ucpstore.ProgressEvent, but it is {given!r}"
    )


class Progress:
    """The progress of one call on one rank; until `follow` every method returns at once.

    The first event of a phase tells that it began, the last one all that it did; in between there
    is one every `INTERVAL_S` at most, and none while nothing is counted.

    After the callback has raised it is not called again, and its error is raised from the next
    `phase`, `add` or `flush`. Whoever made one closes it.
    """

    def __init__(self, action: Action, rank: int = 0) -> None:
        self._action: Action = action
        self._rank = rank
        self._callback: ProgressCallback | None = None
        self._phase = ""
        self._step: int | None = None
        self._total_bytes: int | None = None
        self._total_objects: int | None = None
        self._since = 0.0
        self._bytes = 0
        self._objects = 0
        self._untold = False
        self._queue: deque[ProgressEvent] = deque()
        self._telling = False
        self._over = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def follow(self, callback: ProgressCallback | None) -> None:
        """Tell `callback` from now on; before the first phase."""
        self._callback = callback

    @property
    def followed(self) -> bool:
        """Whether there is anybody to tell."""
        return self._callback is not None

    def phase(
        self,
        name: str,
        *,
        step: int | None = None,
        total_bytes: int | None = None,
        total_objects: int | None = None,
    ) -> None:
        """End the phase before, begin this one; `step` where it is not that of the phase before."""
        if self._callback is None:
            return
        with self._changed:
            self._raise_failure()
            self._queue_last()
            self._phase, self._since = name, time.perf_counter()
            self._step = self._step if step is None else step
            self._total_bytes, self._total_objects = total_bytes, total_objects
            self._bytes = self._objects = 0
            self._untold = True
            self._queue_last()
            self._changed.notify_all()
        if self._thread is None:
            # Not waited for at the end of the process, which a callback that hangs could prevent.
            self._thread = threading.Thread(
                target=self._run, args=(self._callback,), name="ucpstore-progress", daemon=True
            )
            self._thread.start()

    def add(self, done_bytes: int, done_objects: int = 1) -> None:
        """Count what a thread has done; tells nobody by itself."""
        if self._callback is None:
            return
        with self._changed:
            self._raise_failure()
            self._bytes += done_bytes
            self._objects += done_objects
            self._untold = True

    def flush(self) -> None:
        """Wait until everything is told."""
        if self._callback is None:
            return
        with self._changed:
            self._queue_last()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._failure or not (self._queue or self._telling))
            self._raise_failure()

    def close(self) -> None:
        """Tell nothing more; returns once the callback has, and may be repeated.

        What was not told is dropped: the call has failed, or has flushed.
        """
        if self._thread is None:
            return
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._thread.join()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _queue_last(self) -> None:
        """With the lock held: what there is to tell of the phase."""
        if not self._untold:
            return
        self._untold = False
        self._queue.append(
            ProgressEvent(
                self._action,
                self._phase,
                self._step,
                self._rank,
                self._bytes,
                self._total_bytes,
                self._objects,
                self._total_objects,
                time.perf_counter() - self._since,
            )
        )

    def _run(self, callback: ProgressCallback) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._over, INTERVAL_S)
                if self._over:
                    return
                if not self._queue:
                    self._queue_last()
                if not self._queue:
                    continue
                event = self._queue.popleft()
                self._telling = True
            failure: BaseException | None = None
            try:
                callback(event)
            except BaseException as error:
                error.add_note(f"raised by the progress callback of this {self._action}")
                failure = error
            with self._changed:
                self._telling = False
                self._failure = failure
                self._changed.notify_all()
                if failure is not None:
                    return
