"""Heartbeats: counters that a daemon thread moves while a call lasts, and how to watch them.

A rank whose counter stands still is dead or hangs. Calls that end within the first second write
nothing: the thread looks once a second, and ends when there has been nothing to do for a while.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

from ucpstore.agree.keyvalue import KeyValue, StoreGoneError

_IDLE_S = 5.0
_TICK_S = 1.0
_EVERY_S = 5.0


def interval_s(silence_timeout_s: float) -> float:
    """Seconds between beats: several fit into the time after which silence counts as death."""
    return min(_EVERY_S, silence_timeout_s / 6)


@dataclass(slots=True)
class _Pulse:
    due: float
    every_s: float
    beats: int = 0


class Heart:
    """Moves the counters of the calls under way on one group, in one thread."""

    def __init__(self, store: KeyValue) -> None:
        self._store = store
        self._changed = threading.Condition()
        self._pulses: dict[str, _Pulse] = {}
        self._beating: str | None = None
        self._tick_s = _TICK_S
        self._thread: threading.Thread | None = None
        self._ended = False
        _hearts.add(self)

    def start(self, key: str, silence_timeout_s: float) -> None:
        """Move the counter `key` from about a second on until `stop`."""
        every_s = interval_s(silence_timeout_s)
        with self._changed:
            self._pulses[key] = _Pulse(time.monotonic() + min(_TICK_S, every_s), every_s)
            if every_s < self._tick_s:
                self._tick_s = every_s
                self._changed.notify_all()
            if self._thread is None and not self._ended:
                self._thread = threading.Thread(
                    target=self._run, name="ucpstore-heartbeat", daemon=True
                )
                self._thread.start()

    def stop(self, key: str) -> None:
        """Stop moving `key` and delete it. Safe to call twice."""
        with self._changed:
            pulse = self._pulses.pop(key, None)
            # A beat in flight would bring the deleted key back.
            self._changed.wait_for(lambda: self._beating != key, timeout=1.0)
        if pulse is not None and pulse.beats:
            with contextlib.suppress(StoreGoneError):
                self._store.delete([key])

    def _run(self) -> None:
        idle_since = time.monotonic()
        while True:
            with self._changed:
                now = time.monotonic()
                if self._pulses:
                    idle_since = now
                if self._ended or now - idle_since > _IDLE_S:
                    self._thread = None
                    return
                due = [key for key, pulse in self._pulses.items() if pulse.due <= now]
                if not due:
                    self._changed.wait(self._tick_s)
                    continue
                pulse = self._pulses[due[0]]
                pulse.due = now + pulse.every_s
                pulse.beats += 1
                self._beating = due[0]
            # Outside of the lock: the store may take long to answer.
            try:
                self._store.add(due[0], 1)
            except StoreGoneError:
                with self._changed:
                    self._pulses.pop(due[0], None)
            finally:
                with self._changed:
                    self._beating = None
                    self._changed.notify_all()

    def end(self) -> None:
        """Stop the thread before the interpreter goes: it must not be inside torch then."""
        with self._changed:
            self._ended = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join(timeout=1.0)


@dataclass(slots=True)
class Watch:
    """Tells which of other ranks' counters have stood still for too long, looking now and then."""

    store: KeyValue
    silence_timeout_s: float
    _next: float = field(default_factory=time.monotonic)
    _seen: dict[str, tuple[bytes | None, float]] = field(default_factory=dict)

    def due(self) -> bool:
        """Whether it is time to look again."""
        return time.monotonic() >= self._next

    def silent(self, keys: Iterable[str]) -> list[str]:
        """The keys whose counters have not moved for the time limit, over all looks so far."""
        self._next = time.monotonic() + interval_s(self.silence_timeout_s) / 2
        silent = []
        for key in keys:
            value, now = self.store.get(key), time.monotonic()
            before = self._seen.get(key)
            if before is None or before[0] != value:
                self._seen[key] = (value, now)
            elif now - before[1] > self.silence_timeout_s:
                silent.append(key)
        return silent


_hearts: weakref.WeakSet[Heart] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for heart in list(_hearts):
        heart.end()
