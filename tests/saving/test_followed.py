"""A save that is followed: exact totals, and callbacks that raise."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks.harness import Ranks
from services.faults import FaultyStorage
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ucpstore
from ucpstore import Options, ProgressEvent
from ucpstore.options import MIB

PHASES = ["describe", "begin", "plan", "write", "commit"]


def state() -> dict[str, object]:
    """Several objects of one array, one of one chunk, per-rank values in a row and alone."""
    return {
        "m": {"large": torch.ones(3000, 2000), "small": torch.arange(7)},
        "rng": torch.Generator().manual_seed(1),
        "seen": ucpstore.PerRank("x" * 70_000),
    }


def followed(
    url: str, saved: dict[str, object], options: Options | None = None
) -> tuple[ucpstore.SaveReport, list[ProgressEvent], FaultyStorage]:
    store = ucpstore.CheckpointStore(url)
    storage = store._storage = FaultyStorage(store._storage)
    told: list[ProgressEvent] = []
    report = store.save(saved, step=4, progress=told.append, options=options).result()
    return report, told, storage


def put_bytes(storage: FaultyStorage) -> list[int]:
    """Sizes of the objects of arrays that were put."""
    return [
        each.bytes
        for each in storage.log
        if each.kind == "put" and re.search(r"/c(\.\d+)*$", each.key)
    ]


def test_the_totals_are_what_the_storage_gets(tmp_path: Path) -> None:
    report, told, storage = followed(str(tmp_path / "s"), state())
    assert list(dict.fromkeys(each.phase for each in told)) == PHASES
    assert {(each.action, each.step, each.rank) for each in told} == {("save", 4, 0)}
    writes = [each for each in told if each.phase == "write"]
    sizes = put_bytes(storage)
    assert {(each.total_bytes, each.total_objects) for each in writes} == {(sum(sizes), len(sizes))}
    assert (sum(sizes), len(sizes)) == (report.bytes, report.objects)
    # 2 objects of `large`, `small`, and rows of both per-rank values, of which one lies alone.
    assert len(sizes) == 2 + 1 + 1 + 1
    assert (writes[0].done_bytes, writes[0].done_objects) == (0, 0)
    assert (writes[-1].done_bytes, writes[-1].done_objects) == (sum(sizes), len(sizes))


def test_compressed_arrays_count_as_they_are_without_compression(tmp_path: Path) -> None:
    _, plain, _ = followed(str(tmp_path / "plain"), state())
    options = Options(codecs={"*": "zstd"})
    report, told, storage = followed(str(tmp_path / "s"), state(), options)
    (expected,) = {each.total_bytes for each in plain if each.phase == "write"}
    (total,) = {each.total_bytes for each in told if each.phase == "write"}
    assert (told[-2].done_bytes, total) == (expected, expected)
    assert sum(put_bytes(storage)) == report.bytes < 200_000 < expected


def save_shared_objects(url: str) -> tuple[int, int, int, set[int], int]:
    """Rows that no cut of objects follows, so that ranks exchange parts of them."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    rows = DTensor.from_local(
        torch.full((4001 - rank, 257), float(rank)),
        mesh,
        [Shard(0)],
        run_check=False,
        shape=torch.Size((8001, 257)),
        stride=(257, 1),
    )
    report, told, storage = followed(url, {"m": {"w": rows}}, Options(target_bytes=2 * MIB))
    assert sum(put_bytes(storage)) == report.bytes
    writes = [each for each in told if each.phase == "write"]
    assert writes[-1].total_bytes == writes[-1].done_bytes
    ranks = {each.rank for each in told}
    return report.bytes, writes[-1].done_bytes, report.total_bytes, ranks, report.exchanged_bytes


def test_objects_that_ranks_share_count_where_they_are_put(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(2, save_shared_objects, str(tmp_path / "s"))
    assert first[0] == first[1] > 0
    assert second[0] == second[1] > 0
    assert first[0] + second[0] == first[2] == second[2]
    assert (first[3], second[3]) == ({0}, {1})
    assert first[4] + second[4] > 0


def save_with_a_callback_that_raises(url: str, phase: str) -> tuple[str, str, list[int], int, int]:
    rank = dist.get_rank()

    def callback(event: ProgressEvent) -> None:
        if event.phase == phase:
            raise ZeroDivisionError("the bar is broken")

    state = {"m": {"w": torch.full((600, 1024), 1.0)}}
    try:
        ucpstore.save(url, state, step=1, progress=callback if rank else None)
    except Exception as error:
        found = (type(error).__name__, str(error))
    dist.barrier()
    steps = ucpstore.CheckpointStore(url).steps()
    left = sum(len(files) for _, _, files in os.walk(f"{url}/steps"))
    dist.barrier()
    told: list[ProgressEvent] = []
    ucpstore.save(url, state, step=2, progress=told.append if rank else None)
    return (*found, steps, left, len({each.phase for each in told}))


@pytest.mark.parametrize("phase", PHASES)
def test_a_callback_that_raises_on_one_rank_fails_the_save_on_all(
    ranks: Ranks, tmp_path: Path, phase: str
) -> None:
    url = str(tmp_path / "s")
    first, second = ranks.run(2, save_with_a_callback_that_raises, url, phase)
    assert second[:2] == ("ZeroDivisionError", "the bar is broken")
    assert first[0] == "AgreementError"
    assert "rank 1" in first[1]
    assert "ZeroDivisionError: the bar is broken" in first[1]
    for found in (first, second):
        assert found[2] == []  # nothing is committed
        assert found[3] <= 1  # and nothing is left but the group of all steps
    assert (first[4], second[4]) == (0, len(PHASES))  # the next save works
    assert ucpstore.CheckpointStore(url).steps() == [2]


def test_what_is_no_function_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ucpstore.StateError, match="progress must be a function"):
        ucpstore.save(tmp_path / "s", state(), step=1, progress="bar")  # type: ignore[arg-type]
    assert not (tmp_path / "s").exists()
