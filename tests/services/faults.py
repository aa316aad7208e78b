"""A storage around another that fails, loses answers, slows down and records, for tests."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ucpstore.errors import OutcomeUnknownError, StorageError
from ucpstore.storage.base import Buffer, Entry, Fill, Storage, byte_view, read_into

WRITES = frozenset({"put", "put_if_absent", "delete", "delete_tree", "copy", "sync"})


@dataclass(frozen=True, slots=True)
class Operation:
    """One call: its kind (the method's name), its key or prefix, and the bytes it moved."""

    kind: str
    key: str
    bytes: int = 0


class FaultyStorage:
    """Does what `inner` does, and what it is told on top. All settings may change at any time.

    `log` holds the operations in the order they began, failed ones too.
    """

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.log: list[Operation] = []
        self.delay_s = 0.0
        self._lock = threading.Lock()
        self._fail: Callable[[int, Operation], BaseException | None] | None = None
        self._lost: Callable[[str], bool] | None = None
        self._applied = True

    # -- what to do ------------------------------------------------------------------------------

    def fail_at(
        self,
        number: int,
        kinds: Iterable[str] = WRITES,
        error: BaseException | None = None,
    ) -> None:
        """Fail operation `number`, counted from 1 and from now on over `kinds`, before it acts."""
        chosen = frozenset(kinds)
        seen = 0

        def fail(_: int, operation: Operation) -> BaseException | None:
            nonlocal seen
            seen += operation.kind in chosen
            hit = operation.kind in chosen and seen == number
            return (error or injected(operation)) if hit else None

        self._fail = fail

    def fail_when(
        self, condition: Callable[[Operation], bool], error: BaseException | None = None
    ) -> None:
        """Fail each operation for which `condition` holds, before it acts."""
        self._fail = lambda _, operation: (
            (error or injected(operation)) if condition(operation) else None
        )

    def lose_answer(self, key_part: str = "", *, applied: bool = True) -> None:
        """Raise OutcomeUnknownError for the next put_if_absent of a key that holds `key_part`.

        It has taken effect if `applied`, else not.
        """
        self._lost = lambda key: key_part in key
        self._applied = applied

    def heal(self) -> None:
        """Stop failing, losing and slowing down."""
        self._fail = self._lost = None
        self.delay_s = 0.0

    # -- what happened ---------------------------------------------------------------------------

    def count(self, kind: str, key_part: str = "") -> int:
        return sum(each.kind == kind and key_part in each.key for each in self.log)

    def bytes(self, kind: str, key_part: str = "") -> int:
        return sum(each.bytes for each in self.log if each.kind == kind and key_part in each.key)

    def keys(self, kind: str) -> list[str]:
        return [each.key for each in self.log if each.kind == kind]

    def _begin(self, kind: str, key: str, count: int = 0) -> int:
        """Record the operation, fail if told so; its place in the log."""
        operation = Operation(kind, key, count)
        with self._lock:
            place = len(self.log)
            self.log.append(operation)
            error = self._fail(len(self.log), operation) if self._fail else None
        if self.delay_s:
            time.sleep(self.delay_s)
        if error is not None:
            raise error
        return place

    # -- the storage -----------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def one_process(self) -> bool:
        return self.inner.one_process

    @property
    def read_bytes(self) -> int:
        return self.inner.read_bytes

    @property
    def requests(self) -> int:
        return self.inner.requests

    @property
    def case_insensitive(self) -> bool:
        return self.inner.case_insensitive

    def put(self, key: str, data: Buffer) -> None:
        self._begin("put", key, byte_view(data).nbytes)
        self.inner.put(key, data)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._begin("put_if_absent", key, len(data))
        with self._lock:
            lost = self._lost is not None and self._lost(key)
            if lost:
                self._lost = None
        if not lost or self._applied:
            self.inner.put_if_absent(key, data)
        if lost:
            raise OutcomeUnknownError(f"injected: the answer to put_if_absent of {key} was lost")

    def get(self, key: str) -> bytes:
        place = self._begin("get", key)
        data = self.inner.get(key)
        self.log[place] = Operation("get", key, len(data))  # the size is known only now
        return data

    @contextmanager
    def reading(self, key: str) -> Iterator[Fill]:
        def fill(start: int, out: memoryview) -> None:
            self._begin("read_into", key, out.nbytes)
            read_into(self.inner, key, start, out)

        yield fill

    def size(self, key: str) -> int:
        self._begin("size", key)
        return self.inner.size(key)

    def list(self, prefix: str) -> Iterator[Entry]:
        self._begin("list", prefix)
        return self.inner.list(prefix)

    def folders(self, prefix: str) -> tuple[str, ...]:
        self._begin("folders", prefix)
        return self.inner.folders(prefix)

    def delete(self, keys: Iterable[str]) -> None:
        chosen = list(keys)
        for key in chosen:
            self._begin("delete", key)
        self.inner.delete(chosen)

    def delete_tree(self, prefix: str) -> None:
        self._begin("delete_tree", prefix)
        self.inner.delete_tree(prefix)

    def copy(self, source: str, target: str) -> None:
        self._begin("copy", target)
        self.inner.copy(source, target)

    def sync(self, prefix: str) -> None:
        self._begin("sync", prefix)
        self.inner.sync(prefix)

    def check_writable(self) -> None:
        self._begin("check_writable", "")
        self.inner.check_writable()

    def close(self) -> None:
        self.inner.close()


def injected(operation: Operation) -> StorageError:
    """A full disk."""
    error = StorageError(f"injected: cannot {operation.kind} {operation.key}: no space left")
    error.errno = errno.ENOSPC
    return error
