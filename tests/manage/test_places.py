"""Every face gives one answer for a folder that is no store, and for one inside a store."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from manage.samples import flip, opened, step_folder

import ucpstore
from ucpstore import catalog
from ucpstore.errors import CorruptError, FormatError, StepNotFoundError
from ucpstore.format.documents import ROOT, group, marked
from ucpstore.manage.listing import list_store
from ucpstore.manage.verify import verify
from ucpstore.options import Options

INSIDE = "{} lies inside a store; give the folder above `steps` and `commits`"
OTHER = "{} is a Zarr node, but not a checkpoint store"
ARRAY = b'{"zarr_format":3,"node_type":"array","shape":[]}'


def faces(place: Path) -> Iterator[Callable[[], object]]:
    """All that reads a place, for which it is no store."""
    yield lambda: list_store(opened(place), Options())
    yield lambda: catalog.require_store(opened(place))  # before a step is shown
    for step in (None, 3):
        yield lambda step=step: verify(opened(place), step)  # type: ignore[misc]
        yield lambda step=step: ucpstore.load(  # type: ignore[misc]
            place, {"m": {"w": torch.zeros(2)}}, step=step
        )
        yield lambda step=step: ucpstore.CheckpointStore(place).open(step)  # type: ignore[misc]


def written(root: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in root.rglob("*")}


def refused(place: Path, text: str) -> None:
    """Each face says this, a save too, and nothing is written."""
    before = written(place.parent)
    for face in faces(place):
        with pytest.raises(StepNotFoundError) as caught:
            face()
        assert str(caught.value).startswith(text.format(place))
    store = ucpstore.CheckpointStore(place)
    state = {"m": {"w": torch.zeros(2)}}
    for call in (store.steps, store.latest, lambda: store.save(state, step=3)):
        with pytest.raises(FormatError) as refusal:
            call()
        assert str(refusal.value).startswith(text.format(place))
    assert written(place.parent) == before


@pytest.mark.parametrize(
    "name",
    [
        *("commits", "steps", "tags", "work", "commits/0000000100"),
        *("STEP", "STEP/model", "STEP/model/0.bias", "STEP/optim/exp_avg", "STEP/ema"),
    ],
)
def test_a_folder_inside_a_store(store: Path, name: str) -> None:
    place = store / name.replace("STEP", f"steps/{step_folder(store, 100).name}")
    assert (place / "zarr.json").exists()
    refused(place, INSIDE)


def test_a_folder_without_a_document_inside_a_store(store: Path) -> None:
    place = step_folder(store, 100) / "more"
    place.mkdir()
    refused(place, INSIDE)


@pytest.mark.parametrize("raw", [group(b'{"title":"weather"}'), ARRAY], ids=["group", "array"])
def test_another_zarr_node(tmp_path: Path, raw: bytes) -> None:
    place = tmp_path / "other.zarr"
    place.mkdir()
    (place / "zarr.json").write_bytes(raw)
    refused(place, OTHER)


def test_an_empty_place_is_no_store_but_may_become_one(tmp_path: Path) -> None:
    place = tmp_path / "empty"
    for _ in range(2):
        for face in faces(place):
            with pytest.raises(StepNotFoundError, match="there is no checkpoint store"):
                face()
        # What a job asks before its first save.
        assert ucpstore.CheckpointStore(place).steps() == []
        assert ucpstore.CheckpointStore(place).latest() is None
        place.mkdir(exist_ok=True)
    assert list(place.iterdir()) == []
    ucpstore.save(place, {"m": {"w": torch.zeros(2)}}, step=3)
    assert ucpstore.CheckpointStore(place).steps() == [3]


def test_a_store_without_steps_is_one(store: Path) -> None:
    for step in (100, 200):
        ucpstore.CheckpointStore(store).delete(step)
    assert ucpstore.CheckpointStore(store).steps() == []
    assert list_store(opened(store), Options()).steps == ()
    assert verify(opened(store)).ok
    with pytest.raises(StepNotFoundError, match=r"no committed step in .*; save one first"):
        ucpstore.load(store, {"m": {"w": torch.zeros(2)}})


def test_a_store_of_a_newer_layout(store: Path) -> None:
    newer = marked("store", layout=9)
    (store / "zarr.json").write_bytes(newer)
    for face in (lambda: list_store(opened(store), Options()), lambda: verify(opened(store))):
        with pytest.raises(FormatError, match=r"marks a store of layout 9 .*upgrade ucpstore"):
            face()
    shutil.rmtree(store / "commits")
    with pytest.raises(FormatError, match="marks a store of layout 9"):
        ucpstore.CheckpointStore(store).steps()
    with pytest.raises(FormatError, match="marks a store of layout 9"):
        ucpstore.load(store, {"m": {"w": torch.zeros(2)}})


@pytest.mark.parametrize("at", [5, 50, ROOT.index(b'store"') + 2])
def test_a_damaged_root_is_damage_and_no_other_place(store: Path, at: int) -> None:
    flip(store / "zarr.json", at)
    (problem,) = verify(opened(store)).problems
    assert problem.key == "zarr.json"
    assert problem.what.startswith(f"is damaged: its byte {at} should be")
    with pytest.raises(CorruptError, match=r"zarr\.json"):
        list_store(opened(store), Options())
    assert ucpstore.CheckpointStore(store).steps() == [100, 200]
