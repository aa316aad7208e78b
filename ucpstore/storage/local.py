"""Local files: one file per object, in folders below a root.

Objects are written under their own name, since a reader only looks at them once a record that was
put afterwards says that they are whole. They are synced together before that: a sync of its own for
each would have every one wait for the file system's journal. Only `put_if_absent` needs a temporary
file: link(2) is the one call that makes a name appear with its contents and fails where the name
exists (rename replaces silently).
"""

# ruff: noqa: PTH108, PTH116, PTH120  # strings: this runs once per object, pathlib is slower

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ucpstore.errors import CorruptError, OutcomeUnknownError
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
from ucpstore.storage.files import (
    ABSENT,
    absent,
    copy_all,
    link,
    make_durable,
    make_folders,
    reading,
    refuse,
    refuse_read,
    remove_empty,
    remove_tree,
    start_writing,
    sync_files,
    sync_folder,
    write_all,
)

_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{16}[aA]?\Z")
# A deleter may remove an empty folder just before a file is created in it; make it and try again.
_FOLDER_TRIES = 20


class LocalStorage:
    """Objects as files below `root`, an absolute folder that need not exist yet."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = os.fspath(root).rstrip("/") or "/"
        self._made: set[str] = set()  # folders known to exist
        self._unsynced: set[str] = set()  # files that may not be durable, nor their names
        self._case_insensitive: bool | None = None

    def __repr__(self) -> str:
        return f"LocalStorage({self._root!r})"

    @property
    def url(self) -> str:
        return self._root

    @property
    def one_process(self) -> bool:
        return False

    @property
    def read_bytes(self) -> int:
        return CACHED_BYTES

    @property
    def requests(self) -> int:
        return CACHED_REQUESTS

    @property
    def case_insensitive(self) -> bool:
        if self._case_insensitive is None:
            path = self._temporary(self._root) + "a"
            try:
                self._create(path, lambda descriptor: None)
                try:
                    self._case_insensitive = Path(path[:-1] + "A").exists()
                finally:
                    Path(path).unlink(missing_ok=True)
            except OSError as error:
                refuse("try the file system below", self._root, error)
        return self._case_insensitive

    def put(self, key: str, data: Buffer) -> None:
        view = byte_view(data)
        self._write(self._path(key), lambda descriptor: write_all(descriptor, view))

    def put_if_absent(self, key: str, data: bytes) -> None:
        path = self._path(key)
        folder = os.path.dirname(path)
        temporary = self._temporary(folder)
        try:
            self._create(temporary, lambda descriptor: write_all(descriptor, memoryview(data)))
            try:
                link(temporary, path)
            finally:
                with suppress(OSError):
                    os.unlink(temporary)
        except FileExistsError:
            raise FileExistsError(errno.EEXIST, "the object exists already", path) from None
        except OSError as error:
            refuse("write", path, error)
        self._unsynced.add(path)  # until its name is durable; a later `sync` may do it
        try:
            for each in self._chain(folder):
                sync_folder(each)
            self._unsynced.discard(path)
        except OSError as error:
            raise OutcomeUnknownError(
                f"{path} was written, but its folder could not be synced ({error}), so it may be "
                "gone after a crash of the machine; look whether it is there, and check the disk"
            ) from error

    def get(self, key: str) -> bytes:
        path = self._path(key)
        with reading(path) as descriptor, open(descriptor, "rb", closefd=False) as file:
            return file.read()

    @contextmanager
    def reading(self, key: str) -> Iterator[Fill]:
        path = self._path(key)
        with reading(path) as descriptor:
            yield lambda start, out: _fill(path, descriptor, start, out)

    def size(self, key: str) -> int:
        path = self._path(key)
        try:
            found = os.stat(path)
        except OSError as error:
            refuse_read(path, error)
        if not stat.S_ISREG(found.st_mode):
            raise absent(path)
        return found.st_size

    def list(self, prefix: str) -> Iterator[Entry]:
        stack = [check_prefix(prefix)]
        while stack:
            below = stack.pop()
            for child in self._children(below):
                # Deleted since the folder was read: not there, as a slower listing would find.
                with suppress(FileNotFoundError):
                    if child.is_dir():
                        stack.append(f"{below}{child.name}/")
                    elif child.is_file() and not _TEMPORARY.match(child.name):
                        found = child.stat()
                        yield Entry(below + child.name, found.st_size, found.st_mtime)

    def folders(self, prefix: str) -> tuple[str, ...]:
        children = self._children(check_prefix(prefix))
        return tuple(sorted(child.name for child in children if child.is_dir()))

    def delete(self, keys: Iterable[str]) -> None:
        folders: set[str] = set()
        for key in keys:
            path = self._path(key)
            try:
                os.unlink(path)
            except OSError as error:
                if error.errno not in ABSENT:
                    refuse("delete", path, error)
            folders.add(os.path.dirname(path))
        self._drop_empty(folders)

    def delete_tree(self, prefix: str) -> None:
        if not check_prefix(prefix):
            raise ValueError("the whole storage is not deleted through delete_tree")
        folder = self._path(prefix[:-1])
        try:
            for last in range(_FOLDER_TRIES - 1, -1, -1):
                try:
                    remove_tree(folder)
                    break
                except OSError as error:
                    # Another process deletes, or still writes, below the same prefix.
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not last:
                        raise
        except OSError as error:
            refuse("delete", folder, error)
        for known in (self._made, self._unsynced):
            gone = {each for each in known.copy() if f"{each}/".startswith(f"{folder}/")}
            known.difference_update(gone)
        self._drop_empty({os.path.dirname(folder)})

    def copy(self, source: str, target: str) -> None:
        path = self._path(source)
        if source == target:  # creating the target would empty it
            self.size(source)
            return
        with reading(path) as descriptor:
            self._write(self._path(target), lambda out: copy_all(descriptor, out))

    def sync(self, prefix: str) -> None:
        check_prefix(prefix)
        below = self._path(prefix[:-1]) if prefix else self._root
        chosen = {
            each for each in self._unsynced.copy() if each.startswith(f"{below.rstrip('/')}/")
        }
        # Forgotten before they are synced: a file that another thread writes from here on is
        # entered again, after its contents were written.
        self._unsynced.difference_update(chosen)
        parents = {each.rpartition("/")[0] for each in chosen}
        folders = {each for folder in parents for each in self._chain(folder)}
        try:
            sync_files(chosen)
            sync_files(folders)
        except OSError as error:
            self._unsynced.update(chosen)
            refuse("sync", below, error)

    def check_writable(self) -> None:
        """Makes the root and tries there what a save needs: to create, to link and to remove."""
        temporary = self._temporary(self._root)
        linked = self._temporary(self._root)
        try:
            for folder in make_durable(self._root):
                self._made.add(folder)
            self._create(temporary, lambda descriptor: write_all(descriptor, memoryview(b"?")))
            try:
                link(temporary, linked)
            finally:
                for path in (temporary, linked):
                    Path(path).unlink(missing_ok=True)
        except OSError as error:
            refuse("write below", self._root, error)

    def close(self) -> None:
        self._made.clear()

    def _path(self, key: str) -> str:
        root = "" if self._root == "/" else self._root
        return f"{root}/{check_key(key)}"

    def _temporary(self, folder: str) -> str:
        return f"{folder.rstrip('/')}/.tmp-{secrets.token_hex(8)}"

    def _chain(self, folder: str) -> Iterator[str]:
        """`folder` and its ancestors up to the root, deepest first."""
        while True:
            yield folder
            if len(folder) <= len(self._root):
                return
            folder = os.path.dirname(folder)

    def _children(self, prefix: str) -> tuple[os.DirEntry[str], ...]:
        folder = self._path(prefix[:-1]) if prefix else self._root
        try:
            with os.scandir(folder) as entries:
                return tuple(entries)
        except OSError as error:
            if error.errno in ABSENT:
                return ()
            refuse("list", folder, error)

    def _write(self, path: str, fill: Callable[[int], None]) -> None:
        """`_create` without its sync, and with its errors turned into ours."""
        try:
            self._create(path, fill, sync=False)
        except OSError as error:
            refuse("write", path, error)

    def _create(self, path: str, fill: Callable[[int], None], *, sync: bool = True) -> None:
        """Create or empty the file, let `fill` write it; remove it if that fails.

        Without `sync` its contents are only on their way to the disk until `sync` is called.
        """
        folder = path.rpartition("/")[0]
        for last in range(_FOLDER_TRIES - 1, -1, -1):
            try:
                if folder not in self._made:
                    make_folders(folder)
                    self._made.add(folder)
                descriptor = os.open(
                    path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o666
                )
                break
            except FileNotFoundError:
                self._made.discard(folder)
                if not last:
                    raise
        try:
            try:
                fill(descriptor)
                if sync:
                    os.fsync(descriptor)
                else:
                    start_writing(descriptor)
            finally:
                os.close(descriptor)  # network file systems report a full disk here
        except BaseException:
            with suppress(OSError):
                os.unlink(path)
            self._unsynced.discard(path)
            raise
        if not sync:
            self._unsynced.add(path)

    def _drop_empty(self, folders: set[str]) -> None:
        """Remove folders left without entries, up to the root, and make the removals durable.

        An empty folder is noise to other Zarr tools, which warn of whatever is not a node.
        """
        left: set[str] = set()
        for folder in sorted(folders, key=len, reverse=True):
            for each in self._chain(folder):
                if each == self._root or not remove_empty(each):
                    left.add(each)
                    break
                self._made.discard(each)
        for folder in left:
            try:
                sync_folder(folder)
            except OSError as error:
                if error.errno not in ABSENT:
                    refuse("sync", folder, error)


def _fill(path: str, descriptor: int, start: int, out: memoryview) -> None:
    view, done = byte_view(out), 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], start + done)
        if count == 0:
            raise CorruptError(
                f"{path} is too short: expected {len(view)} bytes from byte {start} on, "
                f"found {done}. The object is damaged; load another step"
            )
        done += count
