"""Calls to one fsspec file system: made once per process, one at a time where need be.

Each process has a file system of its own, made on first use: those of a parent hold connections and
threads that a forked child has not. Whatever a file system's library raises becomes one of our
errors, without a value of any option.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote, unquote

from ucpstore.errors import OutcomeUnknownError, StorageError
from ucpstore.storage.files import REMEDIES
from ucpstore.storage.fsspec_places import Place

if TYPE_CHECKING:
    import fsspec  # type: ignore[import-untyped]  # it has no types

ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# Errors after which an object was surely not created.
_CERTAIN = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ECONNREFUSED}

_BROKEN = (ConnectionError, EOFError)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Here:
    """This process's file system."""

    pid: int
    fs: fsspec.AbstractFileSystem
    root: str
    quoted: bool
    """Whether paths are URLs, in which `%` has a meaning."""
    turn: AbstractContextManager[object]
    """Held during a call, where calls must not overlap."""
    folders: set[str] = field(default_factory=set)
    """Those that are known to be there."""

    def path(self, key: str) -> str:
        """The path of a key, or of the folder of that name; of `""`, that of the root."""
        if self.quoted:
            key = quote(key)
        return f"{self.root}/{key}" if self.root and key else key or self.root

    def key(self, path: str) -> str:
        """The key of a listed path; empty where it is not below the root."""
        root = self.root.lstrip("/")
        path = path.lstrip("/").rstrip("/")
        if root and not path.startswith(f"{root}/"):
            return ""
        key = path[len(root) + 1 :] if root else path
        return unquote(key) if self.quoted else key


_connecting = threading.Lock()


def _unlock() -> None:
    """In a forked child: another thread of the parent may hold it."""
    global _connecting
    _connecting = threading.Lock()


os.register_at_fork(after_in_child=_unlock)


class FsspecCalls:
    """The way to the file system of a place."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.here: Here | None = None

    def where(self, key: str) -> str:
        """The URL of a key, for messages; of `""`, that of the place."""
        return f"{self._place.url}/{key}" if key else self._place.url

    def run(self, action: str, key: str, call: Callable[[Here], T]) -> T:
        """Run one call and turn its failure into our errors, without the values of any option."""
        absent = present = False
        failure: Exception | None = None
        try:
            here = self.open()
            with here.turn:
                return call(here)
        except StorageError:
            raise
        except ABSENT as error:
            absent, failure = action != "write", error
        except FileExistsError as error:
            present, failure = action == "create", error
        except Exception as error:  # file systems let through what their libraries raise
            failure = error
        # Outside of the except block: the library's text may hold a secret, and must not hang on
        # our error as its context.
        if absent and action != "create":
            raise FileNotFoundError(f"no object {self.where(key)}")
        if present:
            raise self.present(key)
        assert failure is not None
        if isinstance(failure, _BROKEN) or type(failure).__name__ == "SSHException":
            self.here = None  # the next call connects again
        refusal = self.refusal("write" if action == "create" else action, key, failure)
        known = isinstance(failure, (*ABSENT, PermissionError)) or refusal.errno in _CERTAIN
        if action == "create" and not known:
            raise OutcomeUnknownError(f"{refusal}. Whether it was written is not known: look")
        raise refusal

    def read(self, key: str, call: Callable[[Here], T], action: str = "read") -> T:
        """As `run`; absence is a FileNotFoundError whatever the place says of it."""
        try:
            return self.run(action, key, call)
        except StorageError:
            if self.exists(key):
                raise
        raise FileNotFoundError(f"no object {self.where(key)}")

    def exists(self, key: str) -> bool:
        """Whether there is an object; a folder is none."""

        def look(here: Here) -> bool:
            try:
                info = here.fs.info(here.path(key))
            except ABSENT:
                return False
            return not is_folder(info)

        return self.run("read", key, look)

    def present(self, key: str) -> FileExistsError:
        """The error that an object is there which must not be."""
        return FileExistsError(f"{self.where(key)} exists already")

    def refusal(self, action: str, key: str, error: Exception) -> StorageError:
        """What is raised where the place refuses a call: what to do, and no value of any option."""
        number = error.errno if isinstance(error, OSError) else None
        if isinstance(error, FileNotFoundError):
            reason = "its bucket or folder does not exist: create it first, or correct the URL"
        else:
            said = self._place.redact(str(error).split("\n", 1)[0])[:300]
            remedy = REMEDIES.get(number or 0, "check the place, the options and the network")
            reason = f"{type(error).__name__}: {said}; {remedy}"
        refusal = StorageError(f"cannot {action} {self.where(key)}: {reason}")
        refusal.errno = number
        return refusal

    def open(self) -> Here:
        """This process's file system, connected on first use."""
        here = self.here
        if here is None or here.pid != os.getpid():
            with _connecting:
                here = self.here
                if here is None or here.pid != os.getpid():
                    fs, root = self._place.connect()
                    turn = threading.RLock() if self._place.serial(fs) else nullcontext()
                    here = Here(os.getpid(), fs, root, self._place.quoted, turn)
                    self.here = here
        return here

    def close(self) -> None:
        """Let go of the file system; the next call connects again."""
        here, self.here = self.here, None
        client = getattr(here.fs, "client", None) if here else None
        if client is not None and self._place.protocol in ("sftp", "ssh"):
            client.close()  # fsspec leaves its thread to run


def is_folder(info: Mapping[str, object]) -> bool:
    """Whether what a file system tells of a path is that it is a folder."""
    return info["type"] == "directory"
