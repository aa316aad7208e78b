from __future__ import annotations

import errno
import itertools
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from manage.samples import flip, opened, step_folder
from services.faults import WRITES, FaultyStorage, Operation

from ucpstore.errors import FormatError, StateError, StepNotFoundError, StorageError
from ucpstore.format.layout import commit_key, tag_key
from ucpstore.format.marks import Tag
from ucpstore.format.record import CommitRecord
from ucpstore.manage.objects import READ_BYTES
from ucpstore.manage.verify import VerifyReport, verify
from ucpstore.options import MIB, Options
from ucpstore.progress import ProgressEvent
from ucpstore.storage import Entry


def problems(report: VerifyReport, store: Path, step: int = 100) -> dict[str, str]:
    """What is wrong, by key below the step's folder where it lies there."""
    prefix = f"steps/{step_folder(store, step).name}/"
    return {problem.key.removeprefix(prefix): problem.what for problem in report.problems}


def test_a_whole_store_has_no_problem(made: Path) -> None:
    report = verify(opened(made), data=True)
    assert report.ok
    assert report.steps == (100, 200)
    # Each step: 4 parameters and their 8 moments, table, ema, vocabulary, per-rank row.
    assert report.arrays == 2 * 16
    stored = [path.stat().st_size for path in made.glob("steps/*/**/c*") if path.is_file()]
    assert (report.objects, report.bytes) == (len(stored), sum(stored))
    assert report.bytes_read == report.bytes


def test_one_step_alone(made: Path) -> None:
    report = verify(opened(made), 100)
    assert (report.ok, report.steps, report.arrays, report.bytes_read) == (True, (100,), 16, 0)
    # The fixed ones, record, step, 5 items (`scheduler` has no array, `ema` is one), the folders
    # of the moments and of the vocabulary's document, and the arrays' own.
    assert report.documents == 5 + 1 + 1 + 5 + 3 + 16


def test_every_flipped_bit_is_found(store: Path) -> None:
    storage = opened(store)
    step = step_folder(store, 100)
    files = sorted(path for path in step.rglob("*") if path.is_file())
    files += [store / commit_key(100), store / "zarr.json", store / "steps/zarr.json"]
    choose = random.Random(20)
    unseen = []
    for path in itertools.islice(itertools.cycle(files), 200):
        whole = path.read_bytes()
        position, bit = choose.randrange(len(whole)), choose.randrange(8)
        if path.parent.name == "table" and path.name != "zarr.json" and choose.random() < 0.5:
            position = len(whole) - 1 - choose.randrange(40)  # in the index
        flip(path, position, bit)
        found = verify(storage, 100, data=True).problems
        if not any(problem.key == path.relative_to(store).as_posix() for problem in found):
            unseen.append((path, position, bit))
        path.write_bytes(whole)
    assert unseen == []
    assert verify(storage, 100, data=True).ok


def test_objects_that_are_gone_cut_or_grown(store: Path) -> None:
    step = step_folder(store, 100)
    bias, weight = step / "model/0.bias/c.0", step / "model/0.weight/c.0.0"
    table = step / "large/table/c.0.0"
    bias.unlink()
    weight.write_bytes(weight.read_bytes()[:-1])
    table.write_bytes(table.read_bytes() + b"\0")
    sizes = weight.stat().st_size, table.stat().st_size
    for data in (False, True):
        assert problems(verify(opened(store), 100, data=data), store) == {
            "model/0.bias/c.0": "is missing; restore it from a copy, or use another step",
            "model/0.weight/c.0.0": f"should have {sizes[0] + 1} bytes, found {sizes[0]}; "
            "restore it from a copy, or use another step",
            "large/table/c.0.0": f"should have {sizes[1] - 1} bytes, found {sizes[1]}; "
            "restore it from a copy, or use another step",
        }


def test_documents_that_are_gone_are_told_once(store: Path) -> None:
    step = step_folder(store, 100)
    gone = ["zarr.json", "model/zarr.json", "optim/exp_avg/zarr.json", "large/table/zarr.json"]
    for name in gone:
        (step / name).unlink()
    report = verify(opened(store), 100)
    assert [problem.what.split(";")[0] for problem in report.problems] == ["is missing"] * 4
    assert sorted(problems(report, store)) == sorted(gone)


def test_nothing_below_a_damaged_document_is_called_a_stranger(store: Path) -> None:
    step = step_folder(store, 100)
    flip(step / "model/zarr.json", 30)
    flip(step / "zarr.json", 30)
    (step / "optim/stranger").write_bytes(b"?")
    found = problems(verify(opened(store), 100, data=True), store)
    assert sorted(found) == ["model/zarr.json", "optim/stranger", "zarr.json"]
    assert "checksum" in found["model/zarr.json"]
    assert found["optim/stranger"] == "does not belong to the step; remove it"


@pytest.mark.parametrize(
    "name", ["stranger", "model/0.bias/c.1", "large/table/c.0.0.part", "new/zarr.json"]
)
def test_what_does_not_belong_is_named(store: Path, name: str) -> None:
    path = step_folder(store, 100) / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"?")
    assert list(problems(verify(opened(store)), store)) == [name]


def test_names_among_the_records_that_nothing_reads(store: Path) -> None:
    shutil.copytree(store / "commits/0000000100", store / "commits/100")
    (problem,) = verify(opened(store)).problems
    assert problem.key == "commits/100/zarr.json"


def test_a_record_copied_to_another_step_is_found(store: Path) -> None:
    shutil.copytree(store / "commits/0000000100", store / "commits/0000000101")
    report = verify(opened(store))
    assert [problem.key for problem in report.problems] == ["commits/0000000101/zarr.json"]
    assert report.steps == (100, 200)


def test_files_that_changed_places(store: Path) -> None:
    step = step_folder(store, 100)
    for one, other in (
        ("model/0.bias/c.0", "model/1.bias/c.0"),
        ("model/0.weight/zarr.json", "model/1.weight/zarr.json"),
        ("model/zarr.json", "optim/zarr.json"),
    ):
        first, second = (step / one).read_bytes(), (step / other).read_bytes()
        (step / one).write_bytes(second)
        (step / other).write_bytes(first)
        found = problems(verify(opened(store), 100, data=True), store)
        assert found.keys() >= {one, other}, found
        (step / one).write_bytes(first)
        (step / other).write_bytes(second)


def test_damage_in_data_is_left_to_data(store: Path) -> None:
    table = step_folder(store, 100) / "large/table/c.0.0"
    flip(table, 5)
    flip(table, table.stat().st_size - 1)
    assert verify(opened(store)).ok
    found = verify(opened(store), data=True).problems
    assert [problem.what.split(" is damaged")[0] for problem in found] == ["chunk 0", "index"]


def test_every_damaged_chunk_is_named(store: Path) -> None:
    table = step_folder(store, 100) / "large/table/c.0.0"
    half = (table.stat().st_size - 36) // 2  # two chunks, index of 2 x 16 + 4 bytes
    for position in (0, half):
        flip(table, position)
    found = verify(opened(store), 100, data=True).problems
    assert [problem.what.split(" is damaged")[0] for problem in found] == ["chunk 0", "chunk 1"]


def test_fixed_documents_of_the_store(store: Path) -> None:
    (store / "tags/zarr.json").unlink()
    flip(store / "commits/zarr.json", 3)
    raw = (store / "work/zarr.json").read_bytes()
    (store / "work/zarr.json").write_bytes(raw + b" ")
    found = {problem.key: problem.what for problem in verify(opened(store)).problems}
    assert found == {
        "tags/zarr.json": "is missing; restore it from a copy",
        "commits/zarr.json": "is damaged: its byte 3 should be 0x61, found 0x60; "
        "restore it from a copy",
        "work/zarr.json": f"is damaged: it should have {len(raw)} bytes, found {len(raw) + 1}; "
        "restore it from a copy",
    }


def test_tags(store: Path) -> None:
    for name in ("best", "last", "old"):
        path = store / tag_key(name)
        path.parent.mkdir()
        path.write_bytes(Tag(name if name != "old" else "new", 100, "2025-01-01").to_bytes())
    flip(store / tag_key("last"), 40)
    found = {problem.key: problem.what for problem in verify(opened(store)).problems}
    assert found.keys() == {tag_key("last"), tag_key("old")}
    assert found[tag_key("old")] == "is not the tag of its name; set the tag again"


def test_a_damaged_record_leaves_the_other_steps(store: Path) -> None:
    flip(store / commit_key(100), 100)
    report = verify(opened(store))
    assert [problem.key for problem in report.problems] == [commit_key(100)]
    assert report.steps == (200,)


def test_a_step_that_is_too_new(store: Path) -> None:
    path = store / commit_key(100)
    record = CommitRecord.from_bytes(path.read_bytes(), commit_key(100))
    path.write_bytes(replace(record, format_version=2).to_bytes())
    report = verify(opened(store))
    assert (report.ok, report.steps) == (True, (200,))
    assert [problem.key for problem in report.too_new] == [commit_key(100)]
    with pytest.raises(FormatError, match="version 2"):
        verify(opened(store), 100)


def test_steps_and_stores_that_are_not_there(store: Path, tmp_path: Path) -> None:
    with pytest.raises(StepNotFoundError, match=r"step 7 is not in .*committed are 100, 200"):
        verify(opened(store), 7)
    with pytest.raises(StepNotFoundError, match="there is no checkpoint store at"):
        verify(opened(tmp_path / "nothing"))


def test_a_step_that_is_deleted_meanwhile_is_not_called_damaged(store: Path) -> None:
    class Deleted(FaultyStorage):
        def list(self, prefix: str):  # type: ignore[no-untyped-def]
            if prefix.startswith("steps/0000000100"):
                shutil.rmtree(store / "commits/0000000100")
                shutil.rmtree(step_folder(store, 100) / "model")
            return super().list(prefix)

    with pytest.raises(StepNotFoundError, match="was deleted or overwritten while"):
        verify(Deleted(opened(store)), 100)


def test_a_deleted_step_is_left_out_of_a_whole_verification(store: Path) -> None:
    class Deleted(FaultyStorage):
        def list(self, prefix: str):  # type: ignore[no-untyped-def]
            if prefix.startswith("steps/0000000100") and (store / commit_key(100)).exists():
                shutil.rmtree(store / "commits/0000000100")
                shutil.rmtree(step_folder(store, 100) / "model")
            return super().list(prefix)

    report = verify(Deleted(opened(store)))
    assert (report.ok, report.steps) == (True, (200,))


def test_nothing_is_written_and_the_folder_is_listed_once(made: Path) -> None:
    storage = FaultyStorage(opened(made))
    verify(storage, 100, data=True)
    kinds = {operation.kind for operation in storage.log}
    assert not kinds & (WRITES | {"check_writable"})
    assert storage.count("list", "steps/") == 1


def test_without_data_no_object_is_read(made: Path) -> None:
    storage = FaultyStorage(opened(made))
    verify(storage)
    assert storage.count("read_into") == 0
    assert all(key.endswith("zarr.json") for key in storage.keys("get"))


def test_objects_are_read_in_parts(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert READ_BYTES == 4 * MIB
    monkeypatch.setattr("ucpstore.manage.objects.READ_BYTES", 1024)
    storage = FaultyStorage(opened(made))
    report = verify(storage, 100, data=True, options=Options(budget_bytes=1))
    table = [o.bytes for o in storage.log if o.kind == "read_into" and "large/table" in o.key]
    assert table == [1_200_004, 1_200_004, 36]  # one chunk at a time, then the index
    assert storage.bytes("read_into") == report.bytes


def test_progress_counts_the_bytes_of_each_step(made: Path) -> None:
    storage = FaultyStorage(opened(made))
    told: list[ProgressEvent] = []
    report = verify(storage, data=True, progress=told.append)
    phases = [(each.phase, each.step) for each in told]
    assert list(dict.fromkeys(phases)) == [
        ("records", None),
        ("documents", 100),
        ("objects", 100),
        ("documents", 200),
        ("objects", 200),
    ]
    last = dict(zip(phases, told, strict=True))
    records = last["records", None]
    assert (records.done_objects, records.total_objects) == (2, 2)
    for step in (100, 200):
        event = last["objects", step]
        folder = step_folder(made, step).name
        assert event.done_bytes == event.total_bytes == storage.bytes("read_into", folder)
        assert event.done_objects == event.total_objects
        assert (event.action, event.rank) == ("verify", 0)
    assert sum(last["objects", step].done_bytes for step in (100, 200)) == report.bytes_read


def test_progress_without_data_counts_documents(made: Path) -> None:
    told: list[ProgressEvent] = []
    verify(opened(made), 100, progress=told.append)
    assert (told[-1].phase, told[-1].done_bytes, told[-1].total_bytes) == ("objects", 0, 0)
    # The arrays' own, and the folders of two moments and of the vocabulary's document.
    assert told[-1].done_objects == told[-1].total_objects == 16 + 3


def test_an_error_of_the_callback_ends_a_verification(made: Path) -> None:
    def callback(event: ProgressEvent) -> None:
        raise RuntimeError(f"no room for {event.phase}")

    with pytest.raises(RuntimeError, match="no room for records"):
        verify(opened(made), data=True, progress=callback)
    with pytest.raises(StateError, match="progress must be a function"):
        verify(opened(made), progress=5)  # type: ignore[arg-type]  # that is what is tested


def test_a_storage_that_fails_is_no_damage(made: Path) -> None:
    storage = FaultyStorage(opened(made))
    storage.fail_when(lambda operation: operation.kind == "read_into")
    with pytest.raises(StorageError, match="injected"):
        verify(storage, 100, data=True)


def test_a_bad_sector_is_damage(made: Path) -> None:
    bad = StorageError("cannot read it: input/output error")
    bad.errno = errno.EIO
    storage = FaultyStorage(opened(made))

    def one(operation: Operation) -> bool:
        return operation.kind == "read_into" and "model/1.bias" in operation.key

    storage.fail_when(one, bad)
    (problem,) = verify(storage, 100, data=True).problems
    assert problem.key.endswith("model/1.bias/c.0")
    assert "input/output error" in problem.what


def test_an_object_that_shrinks_meanwhile(store: Path) -> None:
    class Before(FaultyStorage):
        def list(self, prefix: str):  # type: ignore[no-untyped-def]
            entries: list[Entry] = list(super().list(prefix))
            if prefix.startswith("steps/0000000100"):
                path = step_folder(store, 100) / "large/table/c.0.0"
                path.write_bytes(path.read_bytes()[:100])
            return iter(entries)

    (problem,) = verify(Before(opened(store)), 100, data=True).problems
    assert "too short" in problem.what
