from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from services.faults import FaultyStorage
from services.steps import saved

from ucpstore import catalog
from ucpstore.agree import group_of
from ucpstore.arrays.metadata import parse
from ucpstore.errors import CorruptError, FormatError, StepNotFoundError
from ucpstore.format import layout
from ucpstore.format.documents import ROOT
from ucpstore.loading import LoadRequest, load_state
from ucpstore.options import Options
from ucpstore.storage.memory import MemoryStorage


def put(storage: MemoryStorage, step: int, *, overwrite: bool = False) -> None:
    state = {"m": {"w": torch.full((3,), float(step))}}
    saved(storage, state, step, overwrite=overwrite)


@pytest.fixture
def storage() -> MemoryStorage:
    storage = MemoryStorage()
    for step in (9, 10, 9000, 10000, 2**40):
        put(storage, step)
    return storage


def test_steps_are_numbers_not_texts(storage: MemoryStorage) -> None:
    assert sorted(catalog.generations(storage)) == [9, 10, 9000, 10000, 2**40]
    assert catalog.find_step(storage, None).record.step == 2**40


def test_an_overwritten_step_has_one_generation(storage: MemoryStorage) -> None:
    put(storage, 9, overwrite=True)
    assert catalog.generations(storage)[9] == [2]
    assert catalog.find_step(storage, 9).record.generation == 2


def test_only_the_document_of_a_commit_counts(storage: MemoryStorage) -> None:
    for key in (
        "commits/0000000600/c.0",
        "commits/step-abc/zarr.json",
        "commits/0000000700.tmp/zarr.json",
    ):
        storage.put(key, b"{}")
    assert 600 not in catalog.generations(storage)
    assert 700 not in catalog.generations(storage)


def test_a_step_that_is_not_there(storage: MemoryStorage) -> None:
    with pytest.raises(StepNotFoundError, match=r"step 11 is not in .*committed are 9, 10, 9000"):
        catalog.find_step(storage, 11)
    with pytest.raises(StepNotFoundError, match=r"no committed step .* is no checkpoint store"):
        catalog.find_step(MemoryStorage(), None)


def test_a_step_whose_save_did_not_finish(storage: MemoryStorage) -> None:
    storage.put("steps/0000000011-0123456789ab/m/w/c.0", b"x")
    with pytest.raises(StepNotFoundError, match=r"step 11 is not committed .*did not finish"):
        catalog.find_step(storage, 11)


def test_documents_are_checked_before_they_are_parsed(storage: MemoryStorage) -> None:
    ref = catalog.find_step(storage, 9)
    key = f"{ref.path}/m/{layout.DOCUMENT}"
    raw = bytearray(storage.get(key))
    raw[len(raw) // 2] ^= 1
    storage.put(key, bytes(raw))
    with pytest.raises(CorruptError, match=r"m/zarr\.json"):
        catalog.read_items(storage, ref, catalog.item_entries(ref, {"m"}))


def test_something_else_is_no_store() -> None:
    storage = MemoryStorage()
    storage.put(layout.ROOT_KEY, b'{"zarr_format":3,"node_type":"group"}')
    with pytest.raises(FormatError, match=r"something else lies there .* use an empty folder"):
        catalog.create_store(storage)
    assert [entry.key for entry in storage.list("")] == [layout.ROOT_KEY]


def test_a_store_is_made_once() -> None:
    storage = MemoryStorage()
    catalog.create_store(storage)
    assert storage.get(layout.ROOT_KEY) == ROOT
    before = sorted(entry.key for entry in storage.list(""))
    catalog.create_store(storage)
    assert sorted(entry.key for entry in storage.list("")) == before


def test_an_array_of_bytes_comes_back_verified() -> None:
    storage = MemoryStorage()
    data = bytes(range(256)) * 10_000  # 2.4 MiB: several chunks, the last one padded
    state = {"m": {"large": data}}
    ref = saved(storage, state)
    arrays = catalog.read_items(storage, ref, catalog.item_entries(ref, {"m"}))
    ((path, document),) = arrays.items()
    metadata = parse(document, path)
    assert catalog.read_bytes(storage, ref, path, metadata) == data
    key = f"{ref.path}/{path}/{metadata.grid.key((0,))}"
    raw = bytearray(storage.get(key))
    raw[1000] ^= 1
    storage.put(key, bytes(raw))
    with pytest.raises(CorruptError, match=re.escape(key)):
        catalog.read_bytes(storage, ref, path, metadata)
    storage.delete([key])
    with pytest.raises(CorruptError, match="is missing"):
        catalog.read_bytes(storage, ref, path, metadata)


def test_a_load_reads_each_document_once() -> None:
    storage = FaultyStorage(MemoryStorage())
    state = {"m": {"w": torch.ones(3)}, "n": {"w": torch.ones(3)}, "epoch": 5}
    saved(storage, state)
    storage.log.clear()
    target = {"m": {"w": torch.zeros(3)}, "epoch": 0}
    load_state(
        storage, group_of(None), lambda: LoadRequest.checked(target, None, True, None), Options()
    )
    assert target["epoch"] == 5
    # the record, the step group, the item that was asked for
    assert sorted(Counter(storage.keys("get")).values()) == [1, 1, 1]
    assert storage.count("list") == 1
