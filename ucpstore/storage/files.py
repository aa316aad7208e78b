"""System calls on files and folders, and what their errors mean to the user."""

# ruff: noqa: PTH102, PTH106, PTH108, PTH112, PTH116, PTH120  # strings: see local.py

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from typing import NoReturn

from ucpstore.errors import StorageError

ABSENT = (errno.ENOENT, errno.ENOTDIR)
_NO_COPY_RANGE = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)
_COPY_BYTES = 64 * 1024 * 1024

REMEDIES = {
    errno.ENOSPC: "free some space, or choose another place",
    errno.EDQUOT: "your quota is used up: free some space, or choose another place",
    errno.EROFS: "the file system is read-only: mount it writable, or choose another place",
    errno.EACCES: "change its permissions, or run as a user who has them",
    errno.EPERM: "the file system or the user does not allow this: choose another place",
    errno.ENOTDIR: "a file is where a folder is needed: move it away, or choose another place",
    errno.EEXIST: "a file is where a folder is needed: move it away, or choose another place",
    errno.EISDIR: "a folder is where a file is needed: move it away, or choose another place",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "the whole machine has too many open files: close some",
    errno.ESTALE: "the network file system lost the file: check the mount",
    errno.EIO: "the disk or the network file system failed: check the kernel's log",
}


class reading:  # noqa: N801  # used as a function
    """An open descriptor of the file; errors on the way are turned into ours."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> int:
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            refuse_read(self._path, error)
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):  # a folder opens too
            os.close(self._descriptor)
            raise absent(self._path)
        return self._descriptor

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        os.close(self._descriptor)
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            refuse_read(self._path, error)


def link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileExistsError:
        # NFS: the answer to a link that worked can be lost, and the client's second try then
        # finds its own link. The count of links tells.
        if os.stat(source).st_nlink != 2:
            raise
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise OSError(
                error.errno, "the file system has no hard links, which a commit needs", target
            ) from error
        raise


def write_all(descriptor: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        done += os.write(descriptor, view[done:])  # stops at 2,147,479,552 bytes


_START = ctypes.c_uint(2)  # SYNC_FILE_RANGE_WRITE
_WHOLE = ctypes.c_int64(0)
_SYNC_THREADS = 8


def start_writing(descriptor: int) -> None:
    """Have the system begin to write the file to its disk, without waiting; a hint, never an error.

    A later fsync then finds most of the work done, and blocks on the disk allocated by one entry
    of the journal for many files.
    """
    call = _sync_file_range()
    if call is not None:
        call(descriptor, _WHOLE, _WHOLE, _START)


@lru_cache
def _sync_file_range() -> Callable[..., int] | None:
    """Linux's call, which Python has no name for."""
    return getattr(ctypes.CDLL(None), "sync_file_range", None)


def sync_files(paths: Collection[str]) -> None:
    """fsync all that are still there, files or folders, whose names in them are durable then.

    They are opened again: the system tells an error of writing that nobody was told yet then too.
    """
    left = iter(paths)  # shared by all threads; a task for each path would cost more than its sync

    def work() -> None:
        for path in left:
            _sync_file(path)

    count = min(_SYNC_THREADS, len(paths))
    if count > 1:
        with ThreadPoolExecutor(count, "ucpstore-sync") as pool:
            for done in [pool.submit(work) for _ in range(count)]:
                done.result()
    else:
        work()


def _sync_file(path: str) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # deleted meanwhile
    try:
        os.fsync(descriptor)
    except OSError as error:
        error.filename = path  # a descriptor's errors name no file
        raise
    finally:
        os.close(descriptor)


def copy_all(source: int, target: int) -> None:
    done = 0
    try:
        while count := os.copy_file_range(source, target, _COPY_BYTES, done, done):
            done += count
    except OSError as error:
        if done or error.errno not in _NO_COPY_RANGE:
            raise
    # Some file systems have no copy_file_range, or answer 0 as if the file were empty.
    while data := os.pread(source, _COPY_BYTES, done):
        done += os.pwrite(target, data, done)


def make_folders(folder: str) -> None:
    """Make the folder and its parents; as fast as one call where only the last is missing."""
    try:
        os.mkdir(folder)
    except FileExistsError:
        pass  # if it is a file, opening something in it says so
    except FileNotFoundError:
        make_folders(os.path.dirname(folder))
        with suppress(FileExistsError):
            os.mkdir(folder)


def make_durable(folder: str) -> list[str]:
    """Make the folder and its missing parents, each with a durable name; returns the new ones."""
    made: list[str] = []
    missing: list[str] = []
    while not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for each in reversed(missing):
        try:
            os.mkdir(each)
        except FileExistsError:
            if not os.path.isdir(each):  # a file; else another rank was faster
                raise
        made.append(each)
        sync_folder(os.path.dirname(each))
    return made


def sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(folder: str) -> None:
    """Remove what is below, then the folder; symbolic links are removed, never followed."""
    try:
        with os.scandir(folder) as entries:
            children = list(entries)
    except OSError as error:
        if error.errno in ABSENT:
            return
        raise
    for child in children:
        with suppress(FileNotFoundError):
            if child.is_dir(follow_symlinks=False):
                remove_tree(child.path)
            else:
                os.unlink(child.path)
    with suppress(FileNotFoundError):
        os.rmdir(folder)


def remove_empty(folder: str) -> bool:
    """Remove the folder if it is empty; whether it is gone."""
    try:
        os.rmdir(folder)
    except OSError as error:
        return error.errno in ABSENT
    return True


def absent(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "no such object", path)


def refuse_read(path: str, error: OSError) -> NoReturn:
    if error.errno in (*ABSENT, errno.EISDIR):
        raise absent(path) from None
    refuse("read", path, error)


def refuse(action: str, path: str, error: OSError) -> NoReturn:
    """Raise StorageError in the place of the system's error, with its number and a remedy."""
    remedy = REMEDIES.get(error.errno or 0, "check the path and the file system")
    where = f" ({error.filename})" if error.filename not in (None, path) else ""
    refusal = StorageError(f"cannot {action} {path}: {error.strerror or error}{where}; {remedy}")
    refusal.errno = error.errno
    raise refusal from error
