"""What a store holds: committed steps, and apart from them what unfinished saves left. Reads only.

Needs no torch, so that a store is listed in the time that Python takes to start.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ucpstore import catalog
from ucpstore.errors import CorruptError, FormatError, StepNotFoundError
from ucpstore.format import layout
from ucpstore.format.documents import TOMBSTONE
from ucpstore.format.marks import WorkMark
from ucpstore.format.record import CommitRecord
from ucpstore.options import Options
from ucpstore.saving.mark import age_s, alive, unfinished
from ucpstore.storage import Storage

_LOOKED_AT = 1000
"""Objects of a folder without a mark that are looked at for its age: one page of a bucket."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A step that is committed, but whose record cannot be used.

    `damaged` tells a record that lost its bytes from one that a newer ucpstore wrote.
    """

    step: int
    generation: int
    damaged: bool
    why: str


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A save that is not committed: running, dead, or removed in part.

    `state` is `running`, `dead` (its process is gone, or it is too old), `no mark` (a folder that
    no record and no mark names: the rest of a save or of a deleted step) or `removed` (nothing but
    a tombstone is left to stop the save). `age_s` counts from the mark, else from the last object
    written; None where neither is there. `host` and `pid` are None without a mark.
    """

    step: int
    save_id: str
    state: str
    age_s: float | None
    host: str | None
    pid: int | None


@dataclass(frozen=True, slots=True)
class Listing:
    """A store: its steps, rising, each in its newest generation, and what else lies there."""

    url: str
    steps: tuple[CommitRecord, ...]
    unreadable: tuple[Unreadable, ...]
    unfinished: tuple[Unfinished, ...]


def list_store(storage: Storage, options: Options) -> Listing:
    """Everything in a store. One small request for each step and each unfinished save."""
    catalog.require_store(storage)
    # Before the records: a save that commits meanwhile is then among both and known as committed.
    marks = unfinished(storage)
    folders = storage.folders(layout.STEPS_PREFIX)
    found = catalog.generations(storage)
    newest = {step: numbers[-1] for step, numbers in found.items()}
    read = _read_records(storage, newest, options.threads or storage.requests)
    records = tuple(each for each in read if isinstance(each, CommitRecord))
    unreadable = tuple(each for each in read if isinstance(each, Unreadable))
    committed = {record.save_id for record in records}
    marks = [mark for mark in marks if mark.save_id not in committed]
    known = committed | {mark.save_id for mark in marks}
    unknown_steps = {each.step for each in unreadable}
    return Listing(
        storage.url,
        records,
        unreadable,
        (
            *(_marked(mark, options) for mark in marks),
            *_without_mark(storage, folders, known, unknown_steps),
        ),
    )


def _read_records(
    storage: Storage, newest: Mapping[int, int], threads: int
) -> list[CommitRecord | Unreadable]:
    def read(step: int) -> CommitRecord | Unreadable | None:
        generation = newest[step]
        key = layout.commit_key(step, generation)
        try:
            return CommitRecord.from_bytes(storage.get(key), key)
        except FileNotFoundError:
            return _look_again(storage, step)
        except (CorruptError, FormatError) as error:
            return Unreadable(step, generation, isinstance(error, CorruptError), str(error))

    if not newest:
        return []
    with ThreadPoolExecutor(min(threads, len(newest)), "ucpstore-list") as pool:
        return [each for each in pool.map(read, sorted(newest)) if each is not None]


def _look_again(storage: Storage, step: int) -> CommitRecord | None:
    """The record that replaced a listed one, or None where the step was deleted."""
    try:
        return catalog.find_step(storage, step).record
    except StepNotFoundError:
        return None


def _marked(mark: WorkMark, options: Options) -> Unfinished:
    state = "running" if alive(mark, options.unfinished_age_s) else "dead"
    return Unfinished(mark.step, mark.save_id, state, age_s(mark), mark.host, mark.pid)


def _without_mark(
    storage: Storage, folders: Iterable[str], known: Collection[str], unknown_steps: Collection[int]
) -> list[Unfinished]:
    """Folders of saves that neither a record nor a mark names.

    Those of `unknown_steps` are left out, for one of them belongs to a record that is unreadable.
    """
    found = []
    for name in folders:
        path = f"{layout.STEPS_PREFIX}{name}"
        parsed = layout.parse_step_path(path)
        if parsed is None or parsed[1] in known or parsed[0] in unknown_steps:
            continue
        newest = _last_written(storage, path)
        age = None if newest is None else max(0.0, time.time() - newest)
        state = "removed" if _is_tombstone(storage, path) else "no mark"
        found.append(Unfinished(*parsed, state, age, None, None))
    return found


def _last_written(storage: Storage, path: str) -> float | None:
    some = itertools.islice(storage.list(f"{path}/"), _LOOKED_AT)
    return max((entry.modified for entry in some), default=None)


def _is_tombstone(storage: Storage, path: str) -> bool:
    try:
        return storage.get(layout.step_key(path)) == TOMBSTONE
    except FileNotFoundError:
        return False
