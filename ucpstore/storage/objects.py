"""S3 and what speaks its protocol.

Every object is put in one request, since none is larger than a few tens of MiB: a multipart upload
would cost three round trips and leave parts behind when it fails. The requests themselves go
through obstore, or through s3fs where the user asks for it.
"""

from __future__ import annotations

import re
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from ucpstore.errors import CorruptError, OutcomeUnknownError, StateError, StorageError
from ucpstore.storage.base import (
    PROBE,
    ROUND_TRIP_BYTES,
    ROUND_TRIP_REQUESTS,
    Buffer,
    Entry,
    Fill,
    byte_view,
    check_key,
    check_prefix,
)
from ucpstore.storage.s3_calls import S3Calls
from ucpstore.storage.s3_errors import Failure
from ucpstore.storage.s3_options import S3Options
from ucpstore.storage.s3_requests import Listed

MAX_PUT_BYTES = 5 * 1024**3
_FIRST_BYTES = 1024 * 1024
_LIST_PAGE = 1000
_CONFLICT_TRIES = 3
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}\Z")

_Page = tuple[Sequence[Listed], object | None]


class S3Storage:
    """Objects below a prefix of a bucket; the prefix may be empty."""

    def __init__(self, bucket: str, prefix: str = "", options: S3Options | None = None) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._calls = S3Calls(bucket, self.url, options or S3Options())
        self._checked = False
        self._conditional = True

    @classmethod
    def from_url(cls, url: str, options: Mapping[str, object]) -> S3Storage:
        """From `s3://bucket/prefix`; empty segments mean nothing, `%` is a literal `%`."""
        bucket, *segments = [each for each in url.partition("://")[2].split("/") if each] or [""]
        if "@" in bucket:
            raise StateError("credentials do not belong into an s3:// URL; see storage_options")
        if not _BUCKET.match(bucket) or not {".", ".."}.isdisjoint(segments):
            raise StateError(f"{url!r} is not of the form s3://bucket/prefix")
        return cls(bucket, "/".join(segments), S3Options.parse(options))

    def __repr__(self) -> str:
        return f"S3Storage({self.url!r})"

    @property
    def url(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    @property
    def one_process(self) -> bool:
        return False

    @property
    def read_bytes(self) -> int:
        return ROUND_TRIP_BYTES

    @property
    def requests(self) -> int:
        return ROUND_TRIP_REQUESTS

    @property
    def case_insensitive(self) -> bool:
        return False

    def put(self, key: str, data: Buffer) -> None:
        view = self._sendable(key, data)
        path = self._path(key)
        self._calls.send(
            "write",
            key,
            lambda requests: requests.put(path, view),
            quick=len(view) <= _FIRST_BYTES,
        )

    def put_if_absent(self, key: str, data: bytes) -> None:
        view = self._sendable(key, data)
        if not self._conditional and self._exists(key):
            raise self._present(key)
        for _ in range(_CONFLICT_TRIES):
            status = self._create(key, view)
            if status is None:
                return
            # 409: the server refused this put because another write of the same key was under
            # way, which may have been a delete. Only then it is safe, and needed, to ask again.
            if status != 409 or self._exists(key):
                raise self._present(key)
        raise StorageError(
            f"cannot write {self._calls.where(key)}: other writers kept changing it; try again"
        )

    def get(self, key: str) -> bytes:
        path = self._path(key)
        return self._calls.send("read", key, lambda requests: requests.get(path))

    def reading(self, key: str) -> AbstractContextManager[Fill]:
        return nullcontext(partial(self._fill, key))

    def _fill(self, key: str, start: int, out: memoryview) -> None:
        view = byte_view(out)
        if not view:
            self.size(key)
            return
        path = self._path(key)
        found = self._calls.send("read", key, lambda requests: requests.get_into(path, start, view))
        if found != len(view):
            raise CorruptError(
                f"{self._calls.where(key)} is too short: expected {len(view)} bytes from byte "
                f"{start} on, found {found}. The object is damaged; load another step"
            )

    def size(self, key: str) -> int:
        path = self._path(key)
        return self._calls.send("read", key, lambda requests: requests.head(path))

    def list(self, prefix: str) -> Iterator[Entry]:
        path = self._prefix + check_prefix(prefix)
        after: object | None = None
        while True:
            found, after = self._page(path, prefix, after)
            for each in found:
                # A folder marker that some other tool made is listed under the prefix's own name.
                if each.path.startswith(path) and each.path not in (path, self._prefix + PROBE):
                    yield Entry(each.path[len(self._prefix) :], each.size, each.modified)
            if after is None:
                return

    def _page(self, path: str, prefix: str, after: object | None) -> _Page:
        return self._calls.send(
            "list", prefix, lambda requests: requests.page(path, after, _LIST_PAGE)
        )

    def folders(self, prefix: str) -> tuple[str, ...]:
        path = self._prefix + check_prefix(prefix)
        found = self._calls.send("list", prefix, lambda requests: list(requests.folders(path)))
        return tuple(sorted(each[len(path) :].rstrip("/") for each in found))

    def delete(self, keys: Iterable[str]) -> None:
        paths = [self._path(key) for key in keys]
        if paths:
            self._calls.send("delete", "", lambda requests: requests.delete(paths))

    def delete_tree(self, prefix: str) -> None:
        if not check_prefix(prefix):
            raise ValueError("the whole storage is not deleted through delete_tree")
        self.delete([entry.key for entry in self.list(prefix)])

    def copy(self, source: str, target: str) -> None:
        paths = (self._path(source), self._path(target))
        if source == target:
            self.size(source)
        else:
            self._calls.send("copy", source, lambda requests: requests.copy(*paths))

    def sync(self, prefix: str) -> None:
        check_prefix(prefix)

    def check_writable(self) -> None:
        """Lists, so that no server makes a bucket; then puts a probe twice, if absent.

        The second put must be refused. A server that takes it has no conditional puts: two jobs
        that commit the same step at the same moment could then both believe that they did.
        """
        if self._checked:
            return
        self.folders("")
        probe = byte_view(b"ucpstore\n")
        # A fixed name, so that credentials that may not delete leave one object at most.
        if self._create(PROBE, probe) is None:
            self._conditional = self._create(PROBE, probe) is not None
            self.delete([PROBE])
        self._checked = True
        if not self._conditional:
            warnings.warn(
                f"the server of {self.url} ignores conditional puts: let only one job at a time "
                "write to this store",
                stacklevel=2,
            )

    def close(self) -> None:
        """Connections stay for the process's other storages and the next call."""
        self._calls.close()

    def _path(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _present(self, key: str) -> FileExistsError:
        return FileExistsError(f"{self._calls.where(key)} exists already")

    def _exists(self, key: str) -> bool:
        try:
            self.size(key)
        except FileNotFoundError:
            return False
        return True

    def _sendable(self, key: str, data: Buffer) -> memoryview:
        view = byte_view(data)
        if len(view) > MAX_PUT_BYTES:
            raise StorageError(
                f"cannot write {self._calls.where(key)}: it has {len(view)} bytes, and S3 takes at "
                f"most {MAX_PUT_BYTES} in one request; make chunks and objects smaller"
            )
        return view

    def _create(self, key: str, view: memoryview) -> int | None:
        """Put if absent: None, or the status of the answer that something is there."""
        path = self._path(key)
        met: deque[Failure] = deque()
        status = self._calls.send(
            "write", key, lambda requests: requests.create(path, view), once=True, met=met
        )
        if status is not None and any(not each.refused for each in met):
            raise OutcomeUnknownError(
                f"cannot write {self._calls.where(key)}: the server first answered "
                f"{met[0].status}, and then that an object is there, perhaps this one. Whether it "
                "was written is not known: look"
            )
        return status
