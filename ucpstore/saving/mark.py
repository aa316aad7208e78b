"""The mark of a save in progress: `work/<save_id>`, the first thing a save writes.

Every rank reads it before it writes, so disks that the ranks do not share are found early. It
goes after the commit; what is left of a dead save keeps its mark.
"""

from __future__ import annotations

import os
import secrets
import socket
from datetime import UTC, datetime

from ucpstore.errors import CorruptError, StorageError
from ucpstore.format import layout
from ucpstore.format.marks import WorkMark
from ucpstore.storage import Storage

_ended: set[str] = set()
"""Ids of this process's saves that are over, whose marks could not be removed, perhaps."""


def end(mark: WorkMark) -> None:
    """Remember that a save of this process is over, with or without its mark."""
    _ended.add(mark.save_id)


def new_mark(step: int) -> WorkMark:
    """A mark with a random save_id for this process."""
    return WorkMark(
        step=step,
        save_id=secrets.token_hex(layout.SAVE_ID_DIGITS // 2),
        host=socket.gethostname(),
        pid=os.getpid(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def check_mark(storage: Storage, mark: WorkMark) -> None:
    """Raise StorageError where this rank does not see the mark that rank 0 wrote."""
    key = layout.work_key(mark.save_id)
    try:
        found = storage.get(key)
    except FileNotFoundError:
        found = b""
    if found != mark.to_bytes():
        raise StorageError(
            f"{storage.url}: this rank (host {socket.gethostname()}) does not see {key}, which "
            f"rank 0 (host {mark.host}) has just written; all ranks must write to one shared file "
            "system or bucket, not to disks of their own"
        )


def age_s(mark: WorkMark) -> float:
    """Seconds since the save began, by the clocks of both hosts."""
    return (datetime.now(UTC) - datetime.fromisoformat(mark.created)).total_seconds()


def alive(mark: WorkMark, age_limit_s: float) -> bool:
    """Whether the save may still be running: not older than the limit, its process not gone.

    A process can be looked up on its own host only.
    """
    if mark.save_id in _ended:
        return False
    if age_s(mark) > age_limit_s:
        return False
    if mark.host != socket.gethostname():
        return True
    try:
        os.kill(mark.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def unfinished(storage: Storage) -> list[WorkMark]:
    """The marks of all saves that are in progress or died, oldest first."""
    marks = []
    for save_id in storage.folders(layout.WORK_PREFIX):
        key = layout.work_key(save_id)
        try:
            marks.append(WorkMark.from_bytes(storage.get(key), key))
        except (FileNotFoundError, CorruptError):
            continue  # gone since it was listed, or torn by the death of its writer
    return sorted(marks, key=lambda mark: mark.created)
