"""Objects in a dict, for tests: the least that keeps every promise of a storage."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from ucpstore.errors import CorruptError
from ucpstore.storage.base import (
    CACHED_BYTES,
    CACHED_REQUESTS,
    Buffer,
    Entry,
    Fill,
    byte_view,
    check_key,
    check_prefix,
)


class MemoryStorage:
    """Objects that live as long as this object."""

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._objects: dict[str, tuple[bytes, float]] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    @property
    def one_process(self) -> bool:
        return True

    @property
    def read_bytes(self) -> int:
        return CACHED_BYTES

    @property
    def requests(self) -> int:
        return CACHED_REQUESTS

    @property
    def case_insensitive(self) -> bool:
        return False

    def put(self, key: str, data: Buffer) -> None:
        self._objects[check_key(key)] = (bytes(byte_view(data)), time.time())

    def put_if_absent(self, key: str, data: bytes) -> None:
        with self._lock:
            if check_key(key) in self._objects:
                raise FileExistsError(f"{self.url}/{key} exists already")
            self.put(key, data)

    def get(self, key: str) -> bytes:
        try:
            return self._objects[check_key(key)][0]
        except KeyError:
            raise FileNotFoundError(f"no object {self.url}/{key}") from None

    def reading(self, key: str) -> AbstractContextManager[Fill]:
        return nullcontext(partial(self._fill, key))

    def _fill(self, key: str, start: int, out: memoryview) -> None:
        view = byte_view(out)
        found = memoryview(self.get(key))[start : start + len(view)]
        if len(found) < len(view):
            raise CorruptError(
                f"{self.url}/{key} is too short: expected {len(view)} bytes from byte {start} on, "
                f"found {len(found)}"
            )
        if view:
            view[:] = found

    def size(self, key: str) -> int:
        return len(self.get(key))

    def list(self, prefix: str) -> Iterator[Entry]:
        check_prefix(prefix)
        for key, (data, modified) in self._objects.copy().items():
            if key.startswith(prefix):
                yield Entry(key, len(data), modified)

    def folders(self, prefix: str) -> tuple[str, ...]:
        below = (entry.key.removeprefix(prefix) for entry in self.list(prefix))
        return tuple(sorted({key.split("/")[0] for key in below if "/" in key}))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._objects.pop(check_key(key), None)

    def delete_tree(self, prefix: str) -> None:
        if not check_prefix(prefix):
            raise ValueError("the whole storage is not deleted through delete_tree")
        self.delete(entry.key for entry in self.list(prefix))

    def copy(self, source: str, target: str) -> None:
        self.put(target, self.get(source))

    def sync(self, prefix: str) -> None:
        check_prefix(prefix)

    def check_writable(self) -> None:
        pass

    def close(self) -> None:
        pass
