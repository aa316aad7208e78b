from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from manage.samples import flip, opened, step_folder
from services.faults import WRITES, FaultyStorage

from ucpstore.format.documents import TOMBSTONE
from ucpstore.format.layout import commit_key, step_path, work_key
from ucpstore.format.marks import WorkMark
from ucpstore.format.record import CommitRecord
from ucpstore.manage.listing import Unfinished, list_store
from ucpstore.options import Options


def put(store: Path, key: str, raw: bytes) -> None:
    (store / key).parent.mkdir(parents=True, exist_ok=True)
    (store / key).write_bytes(raw)


def mark(store: Path, step: int, save_id: str, *, host: str, pid: int, age_s: float) -> None:
    created = (datetime.now(UTC) - timedelta(seconds=age_s)).isoformat(timespec="seconds")
    put(store, work_key(save_id), WorkMark(step, save_id, host, pid, created).to_bytes())


def test_steps_with_their_newest_generation(made: Path) -> None:
    found = list_store(opened(made), Options())
    assert [(each.step, each.generation, each.arrays) for each in found.steps] == [
        (100, 1, 16),
        (200, 2, 16),
    ]
    assert [each.metadata for each in found.steps] == [{"loss": 0.5}, {"loss": 0.25, "run": "a"}]
    assert (found.url, found.unreadable, found.unfinished) == (str(made), (), ())


def test_unfinished_saves_are_apart(store: Path) -> None:
    here = socket.gethostname()
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    mark(store, 300, "a" * 12, host=here, pid=os.getpid(), age_s=90)
    mark(store, 301, "b" * 12, host=here, pid=done.pid, age_s=60)
    mark(store, 302, "c" * 12, host="elsewhere", pid=1, age_s=30)
    mark(store, 303, "d" * 12, host="elsewhere", pid=1, age_s=25 * 3600)
    put(store, f"{step_path(300, 'a' * 12)}/model/zarr.json", b"?")
    put(store, f"{step_path(304, 'e' * 12)}/model/zarr.json", b"?")
    os.utime(store / step_path(304, "e" * 12) / "model/zarr.json", (1e9, 1e9))
    put(store, f"{step_path(305, 'f' * 12)}/zarr.json", TOMBSTONE)
    found = list_store(opened(store), Options())
    assert [each.step for each in found.steps] == [100, 200]
    assert [(each.step, each.state, each.host) for each in found.unfinished] == [
        (303, "dead", "elsewhere"),
        (300, "running", here),
        (301, "dead", here),
        (302, "running", "elsewhere"),
        (304, "no mark", None),
        (305, "removed", None),
    ]
    ages = {each.step: each.age_s for each in found.unfinished}
    assert 90 <= (ages[300] or 0) < 150
    assert (ages[304] or 0) > 10 * 365 * 86400  # written in 2001


def test_a_mark_that_outlived_its_commit_is_no_unfinished_save(store: Path) -> None:
    save_id = step_folder(store, 100).name.partition("-")[2]
    mark(store, 100, save_id, host="elsewhere", pid=1, age_s=5)
    assert list_store(opened(store), Options()).unfinished == ()


def test_an_empty_folder_has_no_age(store: Path) -> None:
    (store / step_path(300, "a" * 12)).mkdir()
    assert list_store(opened(store), Options()).unfinished == (
        Unfinished(300, "a" * 12, "no mark", None, None, None),
    )


def test_records_that_cannot_be_read_are_apart(store: Path) -> None:
    flip(store / commit_key(100), 50)
    path = store / commit_key(200, 2)
    record = CommitRecord.from_bytes(path.read_bytes(), commit_key(200, 2))
    path.write_bytes(replace(record, features=("time-travel",)).to_bytes())
    found = list_store(opened(store), Options())
    assert found.steps == found.unfinished == ()
    assert [(e.step, e.generation, e.damaged) for e in found.unreadable] == [
        (100, 1, True),
        (200, 2, False),
    ]
    assert "time-travel" in found.unreadable[1].why


def test_a_step_that_is_overwritten_meanwhile(store: Path) -> None:
    class Overwritten(FaultyStorage):
        def get(self, key: str) -> bytes:
            if key == commit_key(100) and (store / key).exists():
                raw = CommitRecord.from_bytes(super().get(key), key)
                shutil.rmtree(store / "commits/0000000100")
                put(store, commit_key(100, 2), replace(raw, generation=2).to_bytes())
            return super().get(key)

    found = list_store(Overwritten(opened(store)), Options())
    assert [(each.step, each.generation) for each in found.steps] == [(100, 2), (200, 2)]


def test_a_step_that_is_deleted_meanwhile(store: Path) -> None:
    class Deleted(FaultyStorage):
        def get(self, key: str) -> bytes:
            if key == commit_key(100):
                shutil.rmtree(store / "commits/0000000100", ignore_errors=True)
            return super().get(key)

    assert [each.step for each in list_store(Deleted(opened(store)), Options()).steps] == [200]


def test_listing_writes_nothing(made: Path) -> None:
    storage = FaultyStorage(opened(made))
    list_store(storage, Options())
    assert not {operation.kind for operation in storage.log} & (WRITES | {"check_writable"})
    # The root, each record, and the listings; data is not listed.
    assert storage.count("get") == 3
    assert storage.keys("list") == ["commits/"]


def test_a_store_without_its_root_is_still_listed(store: Path) -> None:
    (store / "zarr.json").unlink()
    assert len(list_store(opened(store), Options()).steps) == 2
