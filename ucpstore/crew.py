"""Worker threads for requests, and the caller's own thread for those that are over at once.

Handing a small write to a local disk over to a thread costs more than the write: each system call
lets go of the interpreter, and with several threads every one then waits for its turn again. On an
object store the same write takes milliseconds, and threads are what hides them. Only the time that
it takes tells the two apart; a path may lie on a network file system.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from types import TracebackType

SMALL_BYTES = 64 * 1024
"""Tasks that move no more than this are worth to be run by the caller."""

_QUICK_S = 0.0003
_PROBE_EVERY = 32
_LOOKED_AT = 3


_Task = tuple[int, Callable[..., None], tuple[object, ...]]


class Crew:
    """Up to `threads` threads, for the life of a `with` block, which waits for all tasks.

    `clock` gives the time in seconds. Not an executor, whose futures cost more than a read of a
    chunk from the page cache does.
    """

    def __init__(
        self, threads: int, name: str, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._most = max(1, threads)
        self._name = name
        self._threads: list[Thread] = []
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._ends = 0
        self._begun = 0
        self._errors: list[tuple[int, BaseException]] = []
        self._clock = clock
        self._took_s = deque([0.0] * _LOOKED_AT, _LOOKED_AT)
        self._small = 0

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._join()

    def submit(self, action: Callable[..., None], *arguments: object, size: int) -> None:
        """Begin a task that moves `size` bytes; a small one may be over on return.

        Raises what a task that was run here raises. Small tasks are run here as long as they have
        been quick of late, and tried again now and then: one stall of a disk must not send all
        others to the threads.
        """
        if size > SMALL_BYTES or self._is_slow():
            self._begin(action, arguments)
            return
        began = self._clock()
        action(*arguments)
        self._took_s.append(self._clock() - began)

    def wait(self) -> None:
        """Wait for all tasks; raises the first error, in the order in which they were begun."""
        self._join()
        if self._errors:
            raise min(self._errors, key=lambda each: each[0])[1]

    def _begin(self, action: Callable[..., None], arguments: tuple[object, ...]) -> None:
        self._tasks.put((self._begun, action, arguments))
        self._begun += 1
        if len(self._threads) < self._most:
            thread = Thread(target=self._work, name=f"{self._name}_{len(self._threads)}")
            thread.start()
            self._threads.append(thread)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            number, action, arguments = task
            try:
                action(*arguments)
            except BaseException as error:
                self._errors.append((number, error))
            del task, action, arguments  # they may hold buffers

    def _join(self) -> None:
        """End the threads once all tasks are done; goes on where an interrupt stopped it."""
        while self._ends < len(self._threads):
            self._tasks.put(None)
            self._ends += 1  # after it: an interrupt in between may put one too many, never too few
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        self._ends = 0

    def _is_slow(self) -> bool:
        self._small += 1
        usual_s = sorted(self._took_s)[_LOOKED_AT // 2]  # the median
        return usual_s > _QUICK_S and self._small % _PROBE_EVERY != 0
