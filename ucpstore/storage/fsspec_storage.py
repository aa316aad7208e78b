"""Any place that fsspec has a protocol for.

fsspec's file systems differ in what they promise. Used here is what all of them have: whole objects
in and out, listings, deletions. Nothing is renamed, no open file is synced or asked for its
descriptor, and no listing is kept. What a place lacks, exclusive creation above all, is found by
trying before the first write, and said in a warning.

Each process has a file system of its own, made on first use: those of a parent hold connections and
threads that a forked child has not (`ucpstore.storage.fsspec_calls`).
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote, unquote

from ucpstore.errors import CorruptError, StorageError
from ucpstore.storage.base import (
    ROUND_TRIP_BYTES,
    Buffer,
    Entry,
    Fill,
    byte_view,
    check_key,
    check_prefix,
)
from ucpstore.storage.fsspec_calls import ABSENT, Calls, Here
from ucpstore.storage.fsspec_places import Place, open_place

if TYPE_CHECKING:
    import fsspec  # type: ignore[import-untyped]  # it has no types

_PROBE = ".tmp-writable"
_TRIES = 8
_THREADS = 8
_MODIFIED = ("mtime", "LastModified", "last_modified", "updated", "modified", "modify", "created")

T = TypeVar("T")


# One at a time in this process, where the place itself does not see to it. fsspec's memory looks
# first and then puts.
_creating = threading.Lock()


def _unlock() -> None:
    """In a forked child: another thread of the parent may hold it."""
    global _creating
    _creating = threading.Lock()


os.register_at_fork(after_in_child=_unlock)


class FsspecStorage:
    """Objects below the path of a URL."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._calls = Calls(place)
        self._checked = False
        self._exclusive: bool | None = None
        self._ignores_case: bool | None = None

    @classmethod
    def from_url(cls, url: str, options: Mapping[str, object]) -> FsspecStorage:
        """From any URL that fsspec knows, chained ones too; chained ones are for reading."""
        return cls(open_place(url.rstrip("/") if not url.endswith("://") else url, options))

    def __repr__(self) -> str:
        return f"FsspecStorage({self.url!r})"

    @property
    def url(self) -> str:
        return self._place.url

    @property
    def one_process(self) -> bool:
        return self._place.protocol == "memory"

    @property
    def read_bytes(self) -> int:
        return ROUND_TRIP_BYTES

    @property
    def case_insensitive(self) -> bool:
        if self._ignores_case is None:
            self._ignores_case = self._place.folders and self._probe_case()
        return self._ignores_case

    def put(self, key: str, data: Buffer) -> None:
        path, view = self._path(key), byte_view(data)
        self._refuse_chain(key)
        self._calls.run(
            "write", key, lambda here: self._write(here, path, bytes(view), create=False)
        )

    def put_if_absent(self, key: str, data: bytes) -> None:
        path, view = self._path(key), bytes(byte_view(data))
        self._refuse_chain(key)
        exclusive = self._creates()
        with _creating:
            for _ in range(3):
                if not exclusive and self._exists(key):
                    raise self._present(key)
                try:
                    self._calls.run(
                        "create",
                        key,
                        lambda here: self._write(here, path, view, create=exclusive),
                    )
                    return
                except FileExistsError:
                    if self._exists(key):
                        raise self._present(key) from None
        raise self._calls.refusal("write", key, NotADirectoryError(errno.ENOTDIR, "not a folder"))

    def get(self, key: str) -> bytes:
        path = self._path(key)
        return self._read(key, lambda here: bytes(here.fs.cat_file(self._at(here, path))))

    def reading(self, key: str) -> AbstractContextManager[Fill]:
        return nullcontext(partial(self._fill, key))

    def _fill(self, key: str, start: int, out: memoryview) -> None:
        view = byte_view(out)
        if not view:
            self.size(key)
            return
        path = self._path(key)
        end = start + len(view)

        def read(here: Here) -> bytes:
            try:
                return bytes(here.fs.cat_file(self._at(here, path), start=start, end=end))
            except ABSENT:
                raise
            except Exception:
                if self.size(key) >= end:
                    raise
                return b""  # some answer so where the range lies behind the end

        data = self._read(key, read)
        if len(data) != len(view):
            found = min(len(view), max(0, self.size(key) - start))
            raise CorruptError(
                f"{self._calls.where(key)} is too short: expected {len(view)} bytes from byte "
                f"{start} on, found {found}. The object is damaged; load another step"
            )
        view[:] = data

    def size(self, key: str) -> int:
        path = self._path(key)

        def look(here: Here) -> int:
            info = here.fs.info(self._at(here, path))
            if info["type"] == "directory":
                raise FileNotFoundError
            if info.get("size") is None:  # a web server that does not say
                return len(here.fs.cat_file(self._at(here, path)))
            return int(info["size"])

        return self._read(key, look)

    def list(self, prefix: str) -> Iterator[Entry]:
        path = check_prefix(prefix).rstrip("/")
        walk = self._find if self._place.flat else self._walk
        here = self._connected(prefix)
        for info in walk(here, prefix, self._at(here, path)):
            key = self._key(here, str(info["name"]))
            if key.startswith(prefix) and key and not key.startswith(_PROBE):
                yield Entry(key, int(info["size"] or 0), _modified(info))  # type: ignore[call-overload]

    def folders(self, prefix: str) -> tuple[str, ...]:
        path = check_prefix(prefix).rstrip("/")
        here = self._connected(prefix)
        found = self._children(here, prefix, self._at(here, path))
        names = (self._key(here, str(each["name"])) for each in found if _is_folder(each))
        inside = (each[len(prefix) :] for each in names if each.startswith(prefix))
        return tuple(sorted(each for each in inside if each))

    def delete(self, keys: Iterable[str]) -> None:
        paths = [(key, self._path(key)) for key in keys]

        def remove(pair: tuple[str, str]) -> None:
            key, path = pair
            self._refuse_chain(key)
            with suppress(FileNotFoundError):
                self._read(key, lambda here: self._remove(here, path), "delete")

        if len(paths) < 2 * _THREADS:
            for pair in paths:
                remove(pair)
        else:
            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(remove, paths))
        if self._place.folders:
            self._tidy({path.rpartition("/")[0] for _, path in paths})

    def delete_tree(self, prefix: str) -> None:
        if not check_prefix(prefix):
            raise ValueError("the whole storage is not deleted through delete_tree")
        self.delete([entry.key for entry in self.list(prefix)])

    def copy(self, source: str, target: str) -> None:
        if source == target:
            self.size(source)
        else:  # not every protocol can copy, and some change what they copy
            self.put(target, self.get(source))

    def sync(self, prefix: str) -> None:
        check_prefix(prefix)

    def check_writable(self) -> None:
        """Puts a probe, twice if absent; the second must be refused, else a warning is given."""
        if self._checked:
            return
        self._refuse_chain("")
        if not self._creates():
            warnings.warn(
                f"{self.url} cannot create an object only where there is none: let only one job "
                "at a time write to this store",
                stacklevel=2,
            )
        self._checked = True

    def close(self) -> None:
        self._calls.close()

    # -- paths -----------------------------------------------------------------------------------

    def _path(self, key: str) -> str:
        return check_key(key)

    def _at(self, here: Here, path: str) -> str:
        if self._place.quoted:
            path = quote(path)
        return f"{here.root}/{path}" if here.root and path else path or here.root

    def _key(self, here: Here, name: str) -> str:
        """The key of a listed path; empty where it is not below the root."""
        root = here.root.lstrip("/")
        name = name.lstrip("/").rstrip("/")
        if root and not name.startswith(f"{root}/"):
            return ""
        key = name[len(root) + 1 :] if root else name
        return unquote(key) if self._place.quoted else key

    # -- listing ---------------------------------------------------------------------------------

    def _find(self, here: Here, prefix: str, path: str) -> Iterable[Mapping[str, object]]:
        def find(here: Here) -> Iterable[Mapping[str, object]]:
            here.fs.invalidate_cache()
            found: Mapping[str, Mapping[str, object]] = here.fs.find(path, detail=True)
            return found.values()

        try:
            return self._calls.run("list", prefix, find)
        except FileNotFoundError:
            return ()

    def _walk(self, here: Here, prefix: str, path: str) -> Iterator[Mapping[str, object]]:
        """fsspec's own walk leaves out the folders that it cannot read."""
        left = [path]
        while left:
            for each in self._children(here, prefix, left.pop()):
                if _is_folder(each):
                    left.append(str(each["name"]))
                else:
                    yield each

    def _children(self, here: Here, prefix: str, path: str) -> Iterable[Mapping[str, object]]:
        def ls(here: Here) -> Iterable[Mapping[str, object]]:
            here.fs.invalidate_cache()
            found = here.fs.ls(path, detail=True)
            own = path.strip("/")  # of a file, the file itself is listed
            return [each for each in found if str(each["name"]).strip("/") != own]

        try:
            return self._calls.run("list", prefix, ls)
        except FileNotFoundError:
            return ()

    # -- writing ---------------------------------------------------------------------------------

    def _creates(self) -> bool:
        """Whether objects can be created exclusively, tried once before the first write."""
        if self._exclusive is None:
            self._calls.run("write", "", self._make_root)
            # A name of its own: other stores may try the same place at the same moment.
            name = f"{_PROBE}-{secrets.token_hex(8)}"
            self._exclusive = self._place.exclusive and self._probe(name)
            if not self._exclusive:
                self._calls.run(
                    "write", "", lambda here: self._write(here, name, b"ucpstore\n", create=False)
                )
            self.delete([name])
        return self._exclusive

    def _make_root(self, here: Here) -> None:
        if self._place.folders and here.root:
            _make_folders(here.fs, here.root)

    def _probe(self, name: str) -> bool:
        def create(here: Here) -> None:
            self._write(here, name, b"ucpstore\n", create=True)

        for _ in range(2):
            try:
                self._calls.run("create", "", create)
            except FileExistsError:
                return True
            except StorageError:  # not known there; if nothing at all can be written, put says so
                return False
        return False

    def _probe_case(self) -> bool:
        name = f"{_PROBE}-a"
        self.put(name, b"")
        try:
            return self._exists(name[:-1] + "A")
        finally:
            self.delete([name])

    def _write(self, here: Here, path: str, data: bytes, *, create: bool) -> None:
        """In folders that are made as needed, and again where one was removed meanwhile."""
        whole = self._at(here, path)
        folder = whole.rpartition("/")[0]
        for last in (False,) * (_TRIES - 1) + (True,):
            try:
                if self._place.folders and folder and folder not in here.folders:
                    _make_folders(here.fs, folder)
                    here.folders.add(folder)
                self._put(here.fs, whole, data, create=create)
                return
            except FileNotFoundError:
                here.folders.clear()
                if last or not self._place.folders:
                    raise

    def _put(self, fs: fsspec.AbstractFileSystem, path: str, data: bytes, *, create: bool) -> None:
        if not self._place.folders:
            fs.pipe_file(path, data, **({"mode": "create"} if create else {}))
            return
        file = fs.open(path, "xb" if create else "wb")  # where this fails nothing has changed
        try:
            with file:
                file.write(data)
        except (*ABSENT, FileExistsError, PermissionError):
            raise
        except BaseException:
            with suppress(Exception):  # a part of it may be there
                fs.rm_file(path)
            raise

    def _remove(self, here: Here, path: str) -> None:
        here.fs.rm_file(self._at(here, path))

    def _tidy(self, folders: Iterable[str]) -> None:
        """Remove folders that are empty now, and their parents, but not the root."""

        def remove(here: Here) -> None:
            here.folders.clear()
            for folder in sorted(folders, key=len, reverse=True):
                left = folder
                while left:
                    try:
                        if here.fs.ls(self._at(here, left), detail=False):
                            break
                        here.fs.rmdir(self._at(here, left))
                    except Exception:
                        break
                    left = left.rpartition("/")[0]

        self._calls.run("delete", "", remove)

    def _refuse_chain(self, key: str) -> None:
        if self._place.chained:
            raise StorageError(
                f"cannot write {self._calls.where(key)}: chained URLs are for reading; save to the "
                "URL of the place itself"
            )

    # -- calls -----------------------------------------------------------------------------------

    def _connected(self, key: str = "") -> Here:
        return self._calls.run("reach", key, lambda here: here)

    def _read(self, key: str, call: Callable[[Here], T], action: str = "read") -> T:
        """As `Calls.run`; absence is a FileNotFoundError whatever the place says of it."""
        try:
            return self._calls.run(action, key, call)
        except StorageError:
            if self._exists(key):
                raise
        raise FileNotFoundError(f"no object {self._calls.where(key)}")

    def _exists(self, key: str) -> bool:
        def look(here: Here) -> bool:
            try:
                info = here.fs.info(self._at(here, self._path(key)))
            except ABSENT:
                return False
            return not _is_folder(info)

        return self._calls.run("read", key, look)

    def _present(self, key: str) -> FileExistsError:
        return FileExistsError(f"{self._calls.where(key)} exists already")


def _make_folders(fs: fsspec.AbstractFileSystem, folder: str) -> None:
    """Others may make the same ones at the same time, which some places report as a failure."""
    for last in (False,) * (_TRIES - 1) + (True,):
        try:
            fs.makedirs(folder, exist_ok=True)
            return
        except OSError:
            if fs.isdir(folder):
                return
            if last:
                raise


def _is_folder(info: Mapping[str, object]) -> bool:
    return info["type"] == "directory"


def _modified(info: Mapping[str, object]) -> float:
    """When an object was written, in Unix seconds; now, where the place does not tell."""
    for name in _MODIFIED:
        value = info.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
        if isinstance(value, str):
            with suppress(ValueError):
                return datetime.fromisoformat(value).timestamp()
    return time.time()
