"""The key-value stores that an agreement can use: torch's c10d stores, and a dict for threads.

Nothing here blocks on a key: callers look, pause and look again. A blocking wait of the c10d store
holds its client against every other thread and cannot be interrupted, and one that times out
prints two warnings each time (torch 2.13).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

PART_BYTES = 4 * 1024 * 1024
"""Most bytes under one key: torch's TCPStore drops the connection above 8 MiB."""

_ABSENT = "-"
_MANY = 64


class StoreGoneError(Exception):
    """The key-value store itself stopped answering; its host is gone or unreachable."""


class KeyValue(Protocol):
    """What an agreement asks of a store. All methods are thread-safe and return at once.

    Every method but `pause` raises `StoreGoneError` where the store does not answer. Values start
    with an upper-case letter or are written by `add` only.
    """

    def set(self, key: str, value: bytes) -> None:
        """Put a value of at most `PART_BYTES`, replacing what is there."""

    def get(self, key: str) -> bytes | None:
        """The value, or None where there is none now."""

    def get_many(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys that are known to exist."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0, and return its new value; `get` gives decimals."""

    def delete(self, keys: Iterable[str]) -> None:
        """Remove keys; absent ones are fine."""

    def pause(self, seconds: float) -> None:
        """Wait for at most that long, less where a change is noticed."""


class DictStore:
    """A dict behind the protocol, for threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes | None:
        with self._changed:
            return self._values.get(key)

    def get_many(self, keys: Sequence[str]) -> list[bytes]:
        with self._changed:
            return [self._values[key] for key in keys]

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            self._changed.notify_all()
            return total

    def delete(self, keys: Iterable[str]) -> None:
        with self._changed:
            for key in keys:
                self._values.pop(key, None)
            self._changed.notify_all()

    def pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait(seconds)

    def num_keys(self) -> int:
        with self._changed:
            return len(self._values)


class C10dStore:
    """A c10d store under a prefix, through a client of its own.

    The clone keeps the caller's client free, and does not keep a store that this process hosts
    alive after the caller has let go of it.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        from torch._C._distributed_c10d import PrefixStore

        self.client: Store = PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]

    def set(self, key: str, value: bytes) -> None:
        # The stub says str, the binding takes bytes too.
        _answer(lambda: self.client.set(key, value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes | None:
        # `get` would wait for an absent key. Comparing with a value that no key has changes
        # nothing, and answers with that value where the key is absent.
        value = _answer(lambda: self.client.compare_set(key, _ABSENT, _ABSENT))
        return None if value == _ABSENT.encode() else value

    def get_many(self, keys: Sequence[str]) -> list[bytes]:
        values: list[bytes] = []
        for start in range(0, len(keys), _MANY):
            some = list(keys[start : start + _MANY])
            values += _answer(lambda some=some: self.client.multi_get(some))  # type: ignore[misc]
        return values

    def add(self, key: str, amount: int) -> int:
        return _answer(lambda: self.client.add(key, amount))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            _answer(lambda key=key: self.client.delete_key(key))  # type: ignore[misc]

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)


def _answer(operation: Callable[[], T]) -> T:
    try:
        return operation()
    except RuntimeError as error:  # torch's DistError and its kinds
        raise StoreGoneError(str(error).split("\n", 1)[0]) from error
