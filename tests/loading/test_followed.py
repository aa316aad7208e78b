"""A load that is followed: exact totals, and callbacks that raise."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks.harness import Ranks
from services.faults import FaultyStorage

import ucpstore
from ucpstore import Options, ProgressEvent
from ucpstore.storage.local import LocalStorage

PHASES = ["resolve", "plan", "read", "apply", "agree"]


def state(value: float = 0.0) -> dict[str, object]:
    return {"m": {"large": torch.full((3000, 2000), value), "small": torch.full((7,), value)}}


def followed(
    url: Path, target: dict[str, object]
) -> tuple[ucpstore.LoadReport, list[ProgressEvent], FaultyStorage]:
    store = ucpstore.CheckpointStore(url)
    storage = store._storage = FaultyStorage(store._storage)
    told: list[ProgressEvent] = []
    report = store.load(target, progress=told.append)
    return report, told, storage


def test_the_totals_are_what_is_read_from_the_storage(tmp_path: Path) -> None:
    ucpstore.save(tmp_path / "s", state(2.0), step=4)
    target = state()
    report, told, storage = followed(tmp_path / "s", target)
    assert torch.equal(target["m"]["large"], torch.full((3000, 2000), 2.0))  # type: ignore[index]
    assert list(dict.fromkeys(each.phase for each in told)) == PHASES
    assert [each.step for each in told if each.phase in PHASES[:2]] == [None, 4]
    assert {(each.action, each.rank) for each in told} == {("load", 0)}
    reads = [each for each in told if each.phase == "read"]
    total = storage.bytes("read_into")
    # 2 objects of `large`, one of them in more than one request, and `small`.
    assert storage.count("read_into") > 3
    assert {(each.total_bytes, each.total_objects) for each in reads} == {(total, 3)}
    assert total == report.bytes_read == report.total_bytes_read
    assert report.arrays == 2
    assert (reads[0].done_bytes, reads[0].done_objects) == (0, 0)
    assert (reads[-1].done_bytes, reads[-1].done_objects) == (total, 3)


CHUNK = 1024 * 1024 + 4  # with its checksum


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, 4 * [CHUNK]),
        (2 * CHUNK - 1, 4 * [CHUNK]),
        (2 * CHUNK, 2 * [2 * CHUNK]),
        (3 * CHUNK, [CHUNK, 3 * CHUNK]),
        (4 * CHUNK, [4 * CHUNK]),
    ],
)
def test_the_storage_says_how_much_is_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, sizes: list[int]
) -> None:
    values = torch.arange(1024.0 * 1024).reshape(1024, 1024)
    ucpstore.save(tmp_path, {"w": values}, step=1)
    monkeypatch.setattr(FaultyStorage, "read_bytes", most)
    target = {"w": torch.zeros(1024, 1024)}
    _, _, storage = followed(tmp_path, target)
    assert torch.equal(target["w"], values)
    assert sorted(o.bytes for o in storage.log if o.kind == "read_into") == sizes


def test_a_file_is_opened_once_for_all_that_is_read_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.arange(1024.0 * 1024).reshape(1024, 1024)
    ucpstore.save(tmp_path, {"w": values}, step=1)
    opened: list[str] = []
    real = os.open

    def counted(path: str, *arguments: int) -> int:
        opened.append(os.fspath(path))
        return real(path, *arguments)

    monkeypatch.setattr(LocalStorage, "read_bytes", CHUNK)
    monkeypatch.setattr(os, "open", counted)
    target = {"w": torch.zeros(1024, 1024)}
    ucpstore.load(tmp_path, target)
    monkeypatch.undo()
    assert torch.equal(target["w"], values)
    assert len([path for path in opened if path.endswith("/w/c.0.0")]) == 1


def test_compressed_arrays_count_as_they_are_without_compression(tmp_path: Path) -> None:
    ucpstore.save(tmp_path / "s", state(2.0), step=4, options=Options(codecs={"*": "zstd"}))
    report, told, _ = followed(tmp_path / "s", state())
    reads = [each for each in told if each.phase == "read"]
    assert reads[-1].done_bytes == reads[-1].total_bytes > 24_000_000
    assert reads[-1].done_objects == reads[-1].total_objects == 3
    assert report.bytes_read < 200_000


def load_with_a_callback_that_raises(url: str, phase: str) -> tuple[str, str, list[str], int, int]:
    rank = dist.get_rank()

    def callback(event: ProgressEvent) -> None:
        if event.phase == phase:
            raise ZeroDivisionError("the bar is broken")

    ucpstore.save(url, state(2.0), step=1)
    try:
        ucpstore.load(url, state(), progress=callback if rank else None)
    except Exception as error:
        found = (type(error).__name__, str(error), getattr(error, "__notes__", []))
    report = ucpstore.load(url, state())
    return (*found, report.bytes_read, report.total_bytes_read)


@pytest.mark.parametrize("phase", PHASES)
def test_a_callback_that_raises_on_one_rank_fails_the_load_on_all(
    ranks: Ranks, tmp_path: Path, phase: str
) -> None:
    url = str(tmp_path / "s")
    first, second = ranks.run(2, load_with_a_callback_that_raises, url, phase)
    assert second[:2] == ("ZeroDivisionError", "the bar is broken")
    assert "raised by the progress callback of this load" in second[2]
    assert first[0] == "AgreementError"
    assert "ZeroDivisionError: the bar is broken" in first[1]
    # The next load works, and both ranks know what was read.
    assert first[3] + second[3] == first[4] == second[4] > 2 * 24_000_000


def test_what_is_no_function_is_refused(tmp_path: Path) -> None:
    ucpstore.save(tmp_path / "s", state(), step=1)
    with pytest.raises(ucpstore.StateError, match="progress must be a function"):
        ucpstore.load(tmp_path / "s", state(), progress=1)  # type: ignore[arg-type]
