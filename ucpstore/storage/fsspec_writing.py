"""What changes a place: objects put, created only where there is none, and deleted.

Nothing is renamed, and no open file is synced or asked for its descriptor: not every file system
can. Where folders are real they are made as needed, and removed when they are empty.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from ucpstore.errors import StorageError
from ucpstore.storage.base import PROBE
from ucpstore.storage.fsspec_calls import ABSENT, FsspecCalls, Here
from ucpstore.storage.fsspec_places import Place

if TYPE_CHECKING:
    import fsspec  # type: ignore[import-untyped]  # it has no types

_TRIES = 8
_THREADS = 8

# One at a time in this process, where the place itself does not see to it. fsspec's memory looks
# first and then puts.
_creating = threading.Lock()


def _unlock() -> None:
    """In a forked child: another thread of the parent may hold it."""
    global _creating
    _creating = threading.Lock()


os.register_at_fork(after_in_child=_unlock)


class Writer:
    """The writes to one place, and what of them it can do, found by trying. Keys are checked."""

    def __init__(self, place: Place, calls: FsspecCalls) -> None:
        self._place = place
        self._calls = calls
        self._exclusive: bool | None = None
        self._ignores_case: bool | None = None

    @property
    def case_insensitive(self) -> bool:
        """As of `Storage`, tried on first use."""
        if self._ignores_case is None:
            self._ignores_case = self._place.folders and self._probe_case()
        return self._ignores_case

    def creates(self) -> bool:
        """Whether objects can be created exclusively, tried once before the first write."""
        if self._exclusive is None:
            self._calls.run("write", "", self._make_root)
            # A name of its own: other stores may try the same place at the same moment.
            name = f"{PROBE}-{secrets.token_hex(8)}"
            self._exclusive = self._place.exclusive and self._probe(name)
            if not self._exclusive:
                self._calls.run(
                    "write", "", lambda here: self._write(here, name, b"ucpstore\n", create=False)
                )
            self.delete([name])
        return self._exclusive

    def put(self, key: str, view: memoryview) -> None:
        """As `Storage.put`."""
        self.refuse_chain(key)
        self._calls.run(
            "write", key, lambda here: self._write(here, key, bytes(view), create=False)
        )

    def put_if_absent(self, key: str, data: bytes) -> None:
        """As `Storage.put_if_absent`."""
        self.refuse_chain(key)
        exclusive = self.creates()
        with _creating:
            for _ in range(3):
                if not exclusive and self._calls.exists(key):
                    raise self._calls.present(key)
                try:
                    self._calls.run(
                        "create",
                        key,
                        lambda here: self._write(here, key, data, create=exclusive),
                    )
                    return
                except FileExistsError:
                    if self._calls.exists(key):
                        raise self._calls.present(key) from None
        raise self._calls.refusal("write", key, NotADirectoryError(errno.ENOTDIR, "not a folder"))

    def delete(self, keys: Sequence[str]) -> None:
        """As `Storage.delete`, and the folders that are empty then."""
        if len(keys) < 2 * _THREADS:
            for key in keys:
                self._remove(key)
        else:
            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(self._remove, keys))
        if self._place.folders:
            self._tidy({key.rpartition("/")[0] for key in keys})

    def refuse_chain(self, key: str) -> None:
        """Raise StorageError where the place is behind others, which only read."""
        if self._place.chained:
            raise StorageError(
                f"cannot write {self._calls.where(key)}: chained URLs are for reading; save to the "
                "URL of the place itself"
            )

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
        name = f"{PROBE}-a"
        self.put(name, memoryview(b""))
        try:
            return self._calls.exists(name[:-1] + "A")
        finally:
            self.delete([name])

    def _write(self, here: Here, key: str, data: bytes, *, create: bool) -> None:
        """In folders that are made as needed, and again where one was removed meanwhile."""
        path = here.path(key)
        folder = path.rpartition("/")[0]
        for last in (False,) * (_TRIES - 1) + (True,):
            try:
                if self._place.folders and folder and folder not in here.folders:
                    _make_folders(here.fs, folder)
                    here.folders.add(folder)
                self._put(here.fs, path, data, create=create)
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

    def _make_root(self, here: Here) -> None:
        if self._place.folders and here.root:
            _make_folders(here.fs, here.root)

    def _remove(self, key: str) -> None:
        def remove(here: Here) -> None:
            here.fs.rm_file(here.path(key))

        self.refuse_chain(key)
        with suppress(FileNotFoundError):
            self._calls.read(key, remove, "delete")

    def _tidy(self, folders: Iterable[str]) -> None:
        """Remove folders that are empty now, and their parents, but not the root."""

        def remove(here: Here) -> None:
            here.folders.clear()
            for folder in sorted(folders, key=len, reverse=True):
                left = folder
                while left:
                    try:
                        if here.fs.ls(here.path(left), detail=False):
                            break
                        here.fs.rmdir(here.path(left))
                    except Exception:
                        break
                    left = left.rpartition("/")[0]

        self._calls.run("delete", "", remove)


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
