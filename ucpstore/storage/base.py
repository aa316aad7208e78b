"""The seam between ucpstore and the places that keep bytes.

A storage maps keys to whole objects below one root. Nothing above this package knows whether the
root is a folder or a bucket, and nothing in this package knows what the bytes mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from ucpstore.options import KIB, MIB

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Buffer: TypeAlias = "bytes | bytearray | memoryview | npt.NDArray[np.uint8]"
"""What can be put: contiguous bytes of any of these types. They are never changed."""


Fill = Callable[[int, memoryview], None]
"""Of a start in an object, and a buffer."""

CACHED_BYTES = 2 * MIB + 4 * KIB
"""What is read at a time from memory: two chunks of the usual size, with their checksums."""

ROUND_TRIP_BYTES = 8 * MIB
"""What is read at a time from a server; twice as much was no faster."""

CACHED_REQUESTS = 8
"""At once, from memory."""

ROUND_TRIP_REQUESTS = 16
"""At once, from a server: a request takes long enough that 8 leave it waiting; 32 gave no more."""


PROBE = ".tmp-writable"
"""How the names begin of objects by which it is tried what a place can do; none is listed."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One listed object: its key, its size in bytes and when it was written, in Unix seconds."""

    key: str
    size: int
    modified: float


class Storage(Protocol):
    """Objects by key, below one root.

    Keys are relative and `/`-separated; no segment is empty, `.` or `..`. They are taken
    literally: a `%` or a space in a key is that character. A prefix is a key followed by `/`, or
    `""` for the root, and matches whole segments only.

    Every method may be called from any thread, and from a child process forked after the storage
    was opened. An absent object raises FileNotFoundError and a present one, where it must not be,
    FileExistsError, both of the builtin type; whatever else the place refuses raises StorageError,
    which says what to do and carries `errno` where the system gave one.
    """

    @property
    def url(self) -> str:
        """Where the root is, for messages; holds no secret."""

    @property
    def one_process(self) -> bool:
        """Whether what is stored here is seen by this process alone."""

    @property
    def case_insensitive(self) -> bool:
        """Whether keys equal but for case would be one object.

        Found by trying on first use, which may write and remove a temporary file: ask only on the
        way to a write.
        """

    @property
    def read_bytes(self) -> int:
        """Up to how many adjacent bytes are best read at a time.

        Few on local files, where a call costs little and what was read is still in the processor's
        cache when it is checked and copied; many where each read is a round trip.
        """

    @property
    def requests(self) -> int:
        """How many requests at once serve it best, where the user has no wish."""

    def put(self, key: str, data: Buffer) -> None:
        """Write one object, replacing what is there, in one request.

        On return other readers see it; on local files it is durable only after `sync`. A put that
        raises StorageError leaves no object on local files; an object store keeps what was there,
        or has the new object whole if only the answer was lost.
        """

    def put_if_absent(self, key: str, data: bytes) -> None:
        """Write one object, whole and durable with its name, unless one is there already.

        Of several callers, in any number of processes, one succeeds and the others get
        FileExistsError. It is sent once, never again by itself: where the answer is lost,
        OutcomeUnknownError says that the object may or may not be there, and the caller reads it
        back.
        """

    def get(self, key: str) -> bytes:
        """The whole object."""

    def reading(self, key: str) -> AbstractContextManager[Fill]:
        """Read parts of one object, which is found once, or each time, as the place allows.

        The function fills a writable contiguous buffer with the bytes from `start` on. It raises
        CorruptError where the object ends before the buffer is full, which is undefined then.
        """

    def size(self, key: str) -> int:
        """The object's size in bytes."""

    def list(self, prefix: str) -> Iterator[Entry]:
        """All objects below `prefix` at any depth, in any order; none where the prefix is absent.

        Objects written or deleted while the listing runs may or may not be in it.
        """

    def folders(self, prefix: str) -> tuple[str, ...]:
        """The names, sorted, one segment below `prefix` that have objects below them.

        Costs the direct children, not the whole tree. Where the place has real folders, local or on
        a server, an empty one may count.
        """

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects, durably; absent ones are fine. There is no order among the keys."""

    def delete_tree(self, prefix: str) -> None:
        """Delete every object below `prefix`, which is not `""`; an absent prefix is fine."""

    def copy(self, source: str, target: str) -> None:
        """Copy an object inside this storage without its bytes passing through Python; as `put`."""

    def sync(self, prefix: str) -> None:
        """Make what was put below `prefix` through this object durable, contents and names.

        Local files: fsync, once, of each file put since the last sync, of its folder and of the
        ancestors up to the root. Several processes that write below one prefix each sync their
        own. Object stores: nothing to do.
        """

    def check_writable(self) -> None:
        """Raise StorageError now if writing cannot work: call it before the first write.

        Creates a local root folder with its parents; never creates a bucket.
        """

    def close(self) -> None:
        """Let go of connections. The storage must not be used afterwards; closing again is fine."""


def read_into(storage: Storage, key: str, start: int, out: memoryview) -> None:
    """Fill one buffer with a part of an object, as `Storage.reading` does."""
    with storage.reading(key) as fill:
        fill(start, out)


def check_key(key: str) -> str:
    """`key` itself; raises ValueError where it is not a relative, normal key."""
    if any(segment in ("", ".", "..") for segment in key.split("/")) or "\0" in key:
        raise ValueError(f"{key!r} is not a key: segments must not be empty, '.' or '..'")
    return key


def check_prefix(prefix: str) -> str:
    """`prefix` itself; raises ValueError where it is neither empty nor a key followed by `/`."""
    if prefix:
        if not prefix.endswith("/"):
            raise ValueError(f"{prefix!r} is not a prefix: it must end with '/'")
        check_key(prefix[:-1])
    return prefix


def byte_view(data: Buffer) -> memoryview:
    """`data` as flat bytes, without a copy."""
    view = memoryview(data)  # type: ignore[arg-type]  # numpy declares this from 3.12 on
    if view.nbytes == 0:  # memoryview refuses to cast an empty array
        return memoryview(b"")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
