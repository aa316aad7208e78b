"""S3 and what speaks its protocol, through obstore.

Every object is put in one request, since none is larger than a few tens of MiB: a multipart upload
would cost three round trips and leave parts behind when it fails. Requests are sent again, with
growing waits, while the server answers 5xx or the connection breaks, except for `put_if_absent`,
whose second try could not tell its own first success from someone else's.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import ModuleType
from typing import TypeVar

from ucpstore.errors import CorruptError, OutcomeUnknownError, StateError, StorageError
from ucpstore.storage.base import Buffer, Entry, byte_view, check_key, check_prefix
from ucpstore.storage.s3_engine import engine
from ucpstore.storage.s3_errors import Failure
from ucpstore.storage.s3_options import Credential, Resolved, S3Options

MAX_PUT_BYTES = 5 * 1024**3
RETRY_TIMEOUT_S = 180.0
FIRST_RETRY_TIMEOUT_S = 12.0
_FIRST_BYTES = 1024 * 1024
_LIST_PAGE = 1000
_CONFLICT_TRIES = 3
# Probed by check_writable. A fixed name, so that credentials that may not delete leave one at most.
_PROBE = ".tmp-writable"
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}\Z")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Clients:
    """One process's clients. `first` gives up early, for requests before any was answered."""

    engine: ModuleType
    endpoint: str
    credential: Credential | None
    patient: object
    first: object
    once: object

    @property
    def secrets(self) -> tuple[str, ...]:
        return tuple(str(each) for each in (self.credential or {}).values() if each)


class S3Storage:
    """Objects below a prefix of a bucket; the prefix may be empty."""

    def __init__(self, bucket: str, prefix: str = "", options: S3Options | None = None) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._options = options or S3Options()
        self._made: tuple[int, _Clients] | None = None
        self._answered = False
        self._checked = False
        self._conditional = True

    @classmethod
    def from_url(cls, url: str, options: Mapping[str, object]) -> S3Storage:
        """From `s3://bucket/prefix`; empty segments mean nothing, `%` is a literal `%`."""
        bucket, *segments = [each for each in url[len("s3://") :].split("/") if each] or [""]
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
    def case_insensitive(self) -> bool:
        return False

    def put(self, key: str, data: Buffer) -> None:
        view = self._sendable(key, data)
        self._send(
            "write",
            key,
            lambda lib, store: lib.put(store, self._path(key), view, use_multipart=False),
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
        data: bytes = self._send(
            "read", key, lambda lib, store: lib.get(store, self._path(key)).bytes().to_bytes()
        )
        return data

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        view = byte_view(out)
        if not view:
            self.size(key)
            return

        def read(lib: ModuleType, store: object) -> int:
            try:
                data = lib.get_range(store, self._path(key), start=start, length=len(view))
            except lib.exceptions.BaseError as error:
                if Failure.of(error).status != 416:
                    raise
                return 0
            if len(data) == len(view):
                view[:] = memoryview(data)
            return len(data)

        found = self._send("read", key, read)
        if found != len(view):
            raise CorruptError(
                f"{self._where(key)} is too short: expected {len(view)} bytes from byte {start} "
                f"on, found {found}. The object is damaged; load another step"
            )

    def size(self, key: str) -> int:
        return self._send(
            "read", key, lambda lib, store: int(lib.head(store, self._path(key))["size"])
        )

    def list(self, prefix: str) -> Iterator[Entry]:
        path = self._prefix + check_prefix(prefix)
        pages: Iterator[list[Mapping[str, object]]] = self._send(
            "list",
            prefix,
            lambda lib, store: iter(lib.list(store, path or None, chunk_size=_LIST_PAGE)),
        )
        while page := self._send("list", prefix, lambda lib, store: next(pages, None)):
            for found in page:
                key = str(found["path"])
                # A folder marker that some other tool made is listed under the prefix's own name.
                if key.startswith(path) and key != self._prefix + _PROBE:
                    modified = found["last_modified"]
                    assert isinstance(modified, datetime)
                    size = int(str(found["size"]))
                    yield Entry(key[len(self._prefix) :], size, modified.timestamp())

    def folders(self, prefix: str) -> tuple[str, ...]:
        path = self._prefix + check_prefix(prefix)
        found: Mapping[str, Iterable[str]] = self._send(
            "list", prefix, lambda lib, store: lib.list_with_delimiter(store, path or None)
        )
        return tuple(sorted(each[len(path) :] for each in found["common_prefixes"]))

    def delete(self, keys: Iterable[str]) -> None:
        paths = [self._path(key) for key in keys]
        if paths:
            self._send("delete", "", lambda lib, store: lib.delete(store, paths))

    def delete_tree(self, prefix: str) -> None:
        if not check_prefix(prefix):
            raise ValueError("the whole storage is not deleted through delete_tree")
        self.delete([entry.key for entry in self.list(prefix)])

    def copy(self, source: str, target: str) -> None:
        paths = (self._path(source), self._path(target))
        if source == target:
            self.size(source)
        else:
            self._send("copy", source, lambda lib, store: lib.copy(store, *paths))

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
        """Put if absent, once: None, or the status of the answer that something is there."""

        def put(lib: ModuleType, store: object) -> int | None:
            try:
                lib.put(store, self._path(key), view, mode="create", use_multipart=False)
            except lib.exceptions.AlreadyExistsError as error:
                return Failure.of(error).status or 412
            return None

        return self._send("write", key, put, once=True)

    def _send(
        self,
        action: str,
        key: str,
        call: Callable[[ModuleType, object], T],
        *,
        quick: bool = True,
        once: bool = False,
    ) -> T:
        """Run one request and turn its failure into our errors.

        Credentials from the environment or a profile may have been renewed since they were read:
        if the server refuses them and others are found, the request is sent with those, once.
        """
        renewed = False
        while True:
            clients = self._clients()
            first = quick and not self._answered
            store = clients.once if once else clients.first if first else clients.patient
            try:
                result = call(clients.engine, store)
            except (clients.engine.exceptions.BaseError, FileNotFoundError) as error:
                failure = Failure.of(error)
                absent = isinstance(error, FileNotFoundError)
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
            refusal = failure.refusal(
                action, self._where(key), self._bucket, clients.endpoint, clients.secrets
            )
            if once and not failure.certain:
                raise OutcomeUnknownError(f"{refusal}. Whether it was written is not known: look")
            raise refusal

    def _clients(self) -> _Clients:
        made = self._made
        if made is None or made[0] != os.getpid():
            made = (os.getpid(), self._connect())
            self._made = made
        return made[1]

    def _renew(self, used: _Clients) -> bool:
        """Look the credentials up again; whether there are others than those that were used."""
        fresh = self._connect()
        if fresh.secrets[:3] == used.secrets[:3]:
            return False
        self._made = (os.getpid(), fresh)
        return True

    def _connect(self) -> _Clients:
        found = self._options.resolve()
        lib = engine()

        def client(retries: int, limit_s: float, timeout_s: float, wait_s: float) -> object:
            return _client(lib, self._bucket, found, retries, limit_s, timeout_s, wait_s)

        return _Clients(
            lib,
            found.endpoint or f"AWS S3 in {found.region}",
            found.provider() if found.provider else None,
            patient=client(12, RETRY_TIMEOUT_S, 300.0, 15.0),
            first=client(12, FIRST_RETRY_TIMEOUT_S, 15.0, 4.0),
            once=client(0, 0.0, 60.0, 1.0),
        )


def _client(
    lib: ModuleType,
    bucket: str,
    found: Resolved,
    retries: int,
    limit_s: float,
    timeout_s: float,
    wait_s: float,
) -> object:
    # All that obstore would otherwise take from the environment by rules of its own is given.
    own = found.endpoint is not None
    config: dict[str, object] = {
        "region": found.region,
        "virtual_hosted_style_request": not own and "." not in bucket,
        "skip_signature": found.provider is None,
        "conditional_put": "etag",
    }
    if own:
        config |= {"endpoint": found.endpoint, "aws_endpoint_url_s3": found.endpoint}
    return lib._store.S3Store(
        bucket,
        config=config,
        client_options={
            "allow_http": own and str(found.endpoint).startswith("http://"),
            "connect_timeout": timedelta(seconds=5),
            "timeout": timedelta(seconds=timeout_s),
        },
        retry_config={
            "max_retries": retries,
            "retry_timeout": timedelta(seconds=limit_s),
            "backoff": {
                "init_backoff": timedelta(milliseconds=100),
                "max_backoff": timedelta(seconds=wait_s),
                "base": 2,
            },
        },
        credential_provider=found.provider,
    )
