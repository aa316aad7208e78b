from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import zarr
from services.faults import FaultyStorage
from torch import nn

import ucpstore
from ucpstore.manage.open import Checkpoint, Item, StoredArray, open_step
from ucpstore.options import Options
from ucpstore.storage import open_storage


@pytest.fixture
def url(tmp_path: Path) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(700, 600), nn.Linear(600, 1, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {
        "model": model,
        "optim": optimizer,
        "table": torch.arange(12).reshape(3, 4),
        "nested": {"a": {"b.c": torch.ones(2)}, "list": [torch.zeros(1), 5]},
        "progress": {"epoch": 3, "name": "x" * 70_000},
    }
    ucpstore.save(tmp_path, state, step=7, metadata={"run": "a"})
    return str(tmp_path)


@pytest.fixture
def recorded(url: str) -> Iterator[tuple[FaultyStorage, Checkpoint]]:
    """The newest step, and the storage that counts what opening and reading it costs."""
    storage = FaultyStorage(open_storage(url))
    yield storage, open_step(storage, None, Options())
    storage.close()


def test_items_names_shapes_and_dtypes(url: str) -> None:
    step = ucpstore.CheckpointStore(url).open(7)
    assert list(step) == ["model", "optim", "table", "nested", "progress"]
    assert (step.step, step.metadata) == (7, {"run": "a"})
    model = step["model"]
    assert isinstance(model, Item)
    assert list(model) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert (model["0.weight"].shape, model["0.weight"].dtype) == ((600, 700), torch.float32)
    assert (model["1.bias"].shape, model["1.bias"].dtype) == ((1,), torch.bfloat16)
    assert len(model["0.weight"]) == 600
    assert "exp_avg_sq/1.weight" in step["optim"]  # type: ignore[operator]
    assert list(step["nested"]) == ["a/b.c", "list/0"]  # type: ignore[arg-type]


def test_an_item_that_is_a_tensor_is_an_array(url: str) -> None:
    table = ucpstore.CheckpointStore(url).open()["table"]
    assert isinstance(table, StoredArray)
    assert table[1:, ::3].tolist() == [[4, 7], [8, 11]]
    assert table.read().tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_values_that_are_no_arrays(url: str) -> None:
    step = ucpstore.CheckpointStore(url).open()
    assert step.value("progress") == {"epoch": 3, "name": "x" * 70_000}
    assert step.value("nested") == {"a": {"b.c": None}, "list": [None, 5]}
    assert len(step["progress"]) == 0  # type: ignore[arg-type]


def test_opening_reads_names_and_a_slice_reads_its_chunks(
    recorded: tuple[FaultyStorage, Checkpoint],
) -> None:
    storage, step = recorded
    assert storage.count("list") == 1
    assert storage.count("get") == 2  # the record and the step group
    array = step["model"]["0.weight"]  # type: ignore[index]
    assert storage.count("get") == 3  # the item's document
    assert storage.count("read_into") == 0
    part = array[0:2, 0:3]
    assert part.shape == (2, 3)
    (chunk_rows, chunk_columns) = array.chunks
    assert storage.count("read_into") == 1
    assert storage.bytes("read_into") == chunk_rows * chunk_columns * 4 + 4
    assert array[5:5].shape == (0, 700)
    assert storage.count("read_into") == 1, "an empty slice reads nothing"


def test_many_arrays_at_once(url: str) -> None:
    model = ucpstore.CheckpointStore(url).open()["model"]
    assert isinstance(model, Item)
    found = model.read()
    assert list(found) == list(model)
    assert torch.equal(found["0.weight"][3:5], model["0.weight"][3:5])
    assert list(model.read(["1.bias"], device="cpu")) == ["1.bias"]


def test_the_path_is_that_of_a_plain_zarr_group(url: str) -> None:
    step = ucpstore.CheckpointStore(url).open()
    group = zarr.open_group(f"{url}/{step.path}", mode="r")
    assert group["model/0.weight"].shape == (600, 700)  # type: ignore[union-attr]


def test_wrong_names_say_what_there_is(url: str) -> None:
    step = ucpstore.CheckpointStore(url).open()
    with pytest.raises(KeyError, match="no item 'modle'; it has model, optim"):
        step["modle"]
    with pytest.raises(KeyError, match=r"no array 'weight' among 4; there is 0\.weight"):
        step["model"]["weight"]  # type: ignore[index]
    with pytest.raises(ucpstore.StepNotFoundError, match=r"step 8 is not in .*; committed are 7"):
        ucpstore.CheckpointStore(url).open(8)


def test_an_array_is_no_value(tmp_path: Path) -> None:
    store = ucpstore.CheckpointStore(tmp_path)
    store.save({"t": torch.ones(2), "n": {"t": torch.ones(2), "epoch": 3}}, step=1)
    with pytest.raises(KeyError, match="'t' is an array; take"):
        store.open().value("t")
    assert store.open().value("n") == {"t": None, "epoch": 3}
