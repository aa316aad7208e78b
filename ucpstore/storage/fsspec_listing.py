"""What a file system lists, as objects and folders. No listing is kept.

Places that list their whole tree at once are asked so; elsewhere the tree is walked folder by
folder.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime

from ucpstore.storage.base import PROBE, Entry, check_prefix
from ucpstore.storage.fsspec_calls import FsspecCalls, Here, is_folder

_MODIFIED = ("mtime", "LastModified", "last_modified", "updated", "modified", "modify", "created")

_Info = Mapping[str, object]


def objects(calls: FsspecCalls, prefix: str, *, flat: bool) -> Iterator[Entry]:
    """As `Storage.list`; `flat` says that one call lists the whole tree."""
    path = check_prefix(prefix).rstrip("/")
    walk = _find if flat else _walk
    here = _connected(calls, prefix)
    for info in walk(calls, prefix, here.path(path)):
        key = here.key(str(info["name"]))
        if key.startswith(prefix) and key and not key.startswith(PROBE):
            yield Entry(key, int(info["size"] or 0), _modified(info))  # type: ignore[call-overload]


def folders(calls: FsspecCalls, prefix: str) -> tuple[str, ...]:
    """As `Storage.folders`."""
    path = check_prefix(prefix).rstrip("/")
    here = _connected(calls, prefix)
    found = _children(calls, prefix, here.path(path))
    names = (here.key(str(each["name"])) for each in found if is_folder(each))
    inside = (each[len(prefix) :] for each in names if each.startswith(prefix))
    return tuple(sorted(each for each in inside if each))


def _connected(calls: FsspecCalls, prefix: str) -> Here:
    return calls.run("reach", prefix, lambda here: here)


def _find(calls: FsspecCalls, prefix: str, path: str) -> Iterable[_Info]:
    def find(here: Here) -> Iterable[_Info]:
        here.fs.invalidate_cache()
        found: Mapping[str, _Info] = here.fs.find(path, detail=True)
        return found.values()

    try:
        return calls.run("list", prefix, find)
    except FileNotFoundError:
        return ()


def _walk(calls: FsspecCalls, prefix: str, path: str) -> Iterator[_Info]:
    """fsspec's own walk leaves out the folders that it cannot read."""
    left = [path]
    while left:
        for each in _children(calls, prefix, left.pop()):
            if is_folder(each):
                left.append(str(each["name"]))
            else:
                yield each


def _children(calls: FsspecCalls, prefix: str, path: str) -> Iterable[_Info]:
    def ls(here: Here) -> Iterable[_Info]:
        here.fs.invalidate_cache()
        found = here.fs.ls(path, detail=True)
        own = path.strip("/")  # of a file, the file itself is listed
        return [each for each in found if str(each["name"]).strip("/") != own]

    try:
        return calls.run("list", prefix, ls)
    except FileNotFoundError:
        return ()


def _modified(info: _Info) -> float:
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
