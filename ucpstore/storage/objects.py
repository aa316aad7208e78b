"""S3 and what speaks its protocol.

Every object is put in one request, since none is larger than a few tens of MiB: a multipart upload
would cost three round trips and leave parts behind when it fails. Requests are sent again, with
growing waits, while the server answers 5xx or the connection breaks. `put_if_absent` is sent again
only where the server answered that it did nothing: after a lost answer, a second try could not tell
its own first success from someone else's.

The requests themselves go through obstore, or through s3fs where the user asks for it.
"""

from __future__ import annotations

import os
import random
import re
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TypeVar

from ucpstore.errors import CorruptError, OutcomeUnknownError, StateError, StorageError
from ucpstore.storage.base import (
    ROUND_TRIP_BYTES,
    Buffer,
    Entry,
    Fill,
    byte_view,
    check_key,
    check_prefix,
)
from ucpstore.storage.s3_clients import (
    FIRST_WAIT_S,
    LONGEST_WAIT_S,
    RETRIES,
    Clients,
    clients_of,
    limit_s,
    renewed,
)
from ucpstore.storage.s3_errors import Failure
from ucpstore.storage.s3_options import S3Options
from ucpstore.storage.s3_requests import Listed, Requests

MAX_PUT_BYTES = 5 * 1024**3
_FIRST_BYTES = 1024 * 1024
_LIST_PAGE = 1000
_CONFLICT_TRIES = 3
# Probed by check_writable. A fixed name, so that credentials that may not delete leave one at most.
_PROBE = ".tmp-writable"
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}\Z")

T = TypeVar("T")
_Page = tuple[Sequence[Listed], object | None]


class S3Storage:
    """Objects below a prefix of a bucket; the prefix may be empty."""

    def __init__(self, bucket: str, prefix: str = "", options: S3Options | None = None) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._options = options or S3Options()
        self._made: tuple[int, Clients] | None = None
        self._answered = False
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
    def case_insensitive(self) -> bool:
        return False

    def put(self, key: str, data: Buffer) -> None:
        view = self._sendable(key, data)
        path = self._path(key)
        self._send(
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
            f"cannot write {self._where(key)}: other writers kept changing it; try again"
        )

    def get(self, key: str) -> bytes:
        path = self._path(key)
        return self._send("read", key, lambda requests: requests.get(path))

    def reading(self, key: str) -> AbstractContextManager[Fill]:
        return nullcontext(partial(self._fill, key))

    def _fill(self, key: str, start: int, out: memoryview) -> None:
        view = byte_view(out)
        if not view:
            self.size(key)
            return
        path = self._path(key)
        found = self._send("read", key, lambda requests: requests.get_into(path, start, view))
        if found != len(view):
            raise CorruptError(
                f"{self._where(key)} is too short: expected {len(view)} bytes from byte {start} "
                f"on, found {found}. The object is damaged; load another step"
            )

    def size(self, key: str) -> int:
        path = self._path(key)
        return self._send("read", key, lambda requests: requests.head(path))

    def list(self, prefix: str) -> Iterator[Entry]:
        path = self._prefix + check_prefix(prefix)
        after: object | None = None
        while True:
            found, after = self._page(path, prefix, after)
            for each in found:
                # A folder marker that some other tool made is listed under the prefix's own name.
                if each.path.startswith(path) and each.path not in (path, self._prefix + _PROBE):
                    yield Entry(each.path[len(self._prefix) :], each.size, each.modified)
            if after is None:
                return

    def _page(self, path: str, prefix: str, after: object | None) -> _Page:
        return self._send("list", prefix, lambda requests: requests.page(path, after, _LIST_PAGE))

    def folders(self, prefix: str) -> tuple[str, ...]:
        path = self._prefix + check_prefix(prefix)
        found = self._send("list", prefix, lambda requests: list(requests.folders(path)))
        return tuple(sorted(each[len(path) :].rstrip("/") for each in found))

    def delete(self, keys: Iterable[str]) -> None:
        paths = [self._path(key) for key in keys]
        if paths:
            self._send("delete", "", lambda requests: requests.delete(paths))

    def delete_tree(self, prefix: str) -> None:
        if not check_prefix(prefix):
            raise ValueError("the whole storage is not deleted through delete_tree")
        self.delete([entry.key for entry in self.list(prefix)])

    def copy(self, source: str, target: str) -> None:
        paths = (self._path(source), self._path(target))
        if source == target:
            self.size(source)
        else:
            self._send("copy", source, lambda requests: requests.copy(*paths))

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
        if self._create(_PROBE, probe) is None:
            self._conditional = self._create(_PROBE, probe) is not None
            self.delete([_PROBE])
        self._checked = True
        if not self._conditional:
            warnings.warn(
                f"the server of {self.url} ignores conditional puts: let only one job at a time "
                "write to this store",
                stacklevel=2,
            )

    def close(self) -> None:
        """Connections stay for the process's other storages and the next call."""
        self._made = None

    def _path(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}" if key else self.url

    def _present(self, key: str) -> FileExistsError:
        return FileExistsError(f"{self._where(key)} exists already")

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
                f"cannot write {self._where(key)}: it has {len(view)} bytes, and S3 takes at most "
                f"{MAX_PUT_BYTES} in one request; make chunks and objects smaller"
            )
        return view

    def _create(self, key: str, view: memoryview) -> int | None:
        """Put if absent: None, or the status of the answer that something is there."""
        path = self._path(key)
        met: deque[Failure] = deque()
        status = self._send(
            "write", key, lambda requests: requests.create(path, view), once=True, met=met
        )
        if status is not None and any(not each.refused for each in met):
            raise OutcomeUnknownError(
                f"cannot write {self._where(key)}: the server first answered {met[0].status}, and "
                "then that an object is there, perhaps this one. Whether it was written is not "
                "known: look"
            )
        return status

    def _send(
        self,
        action: str,
        key: str,
        call: Callable[[Requests], T],
        *,
        quick: bool = True,
        once: bool = False,
        met: deque[Failure] | None = None,
    ) -> T:
        """Run one request, again where that can help, and turn its failure into our errors.

        Credentials from the environment or a profile may have been renewed since they were read:
        if the server refuses them and others are found, the request is sent with those, once.
        `once` sends again only what the server has answered and not begun; `met` gets those
        answers.
        """
        renewed = False
        waits = _Waits()
        while True:
            clients = self._clients()
            first = quick and not self._answered
            requests = clients.once if once else clients.first if first else clients.patient
            try:
                result = call(requests)
            except requests.errors as error:
                failure = requests.failure(error)
                absent = isinstance(error, FileNotFoundError) or failure.missing_object
            else:
                self._answered = True
                return result
            # Outside of the except block: the server's answer, which may hold a token, must not
            # hang on our error as its context.
            self._answered = self._answered or failure.answered
            if absent and not failure.missing_bucket:
                raise FileNotFoundError(f"no object {self._where(key)}")
            if failure.stale_credentials and not renewed and self._renew(clients):
                renewed = True
                continue
            again = failure.idle if once else failure.passing and not requests.resends
            if again and waits.wait(limit_s(answered=self._answered)):
                if met is not None:
                    met.append(failure)
                continue
            refusal = failure.refusal(
                action, self._where(key), self._bucket, clients.endpoint, clients.secrets
            )
            if once and not (failure.certain and all(each.certain for each in met or ())):
                raise OutcomeUnknownError(f"{refusal}. Whether it was written is not known: look")
            raise refusal

    def _clients(self) -> Clients:
        made = self._made
        if made is None or made[0] != os.getpid():
            made = self._made = (os.getpid(), clients_of(self._bucket, self._options))
        return made[1]

    def _renew(self, used: Clients) -> bool:
        """Look the credentials up again; whether there are others than those that were used."""
        fresh = renewed(self._bucket, self._options, used)
        if fresh is not None:
            self._made = (os.getpid(), fresh)
        return fresh is not None


class _Waits:
    """Growing waits between the tries of one request, as obstore does it."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._tries = 0

    def wait(self, limit_s: float) -> bool:
        """Wait before the next try; False, at once, where tries or time are used up."""
        wait_s = min(FIRST_WAIT_S * 2**self._tries, LONGEST_WAIT_S) * random.uniform(0.75, 1.0)
        if self._tries >= RETRIES or time.monotonic() - self._began + wait_s > limit_s:
            return False
        self._tries += 1
        time.sleep(wait_s)
        return True
