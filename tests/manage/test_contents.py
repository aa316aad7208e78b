from __future__ import annotations

from pathlib import Path

import pytest
import torch
from manage.samples import flip, opened, step_folder
from services.faults import WRITES, FaultyStorage

import ucpstore
from ucpstore.errors import CorruptError, StepNotFoundError
from ucpstore.manage.contents import ArrayEntry, ValueEntry, read_contents
from ucpstore.options import Options


def test_arrays_and_values_by_name(made: Path) -> None:
    found = read_contents(opened(made), 100, Options())
    arrays = {each.name: each for each in found.entries if isinstance(each, ArrayEntry)}
    values = {each.name: each for each in found.entries if isinstance(each, ValueEntry)}
    assert list(arrays)[:4] == [
        "model/0.weight",
        "model/0.bias",
        "model/1.weight",
        "model/1.bias",
    ]
    assert arrays["optim/exp_avg/1.bias"].shape == (8,)
    assert arrays["ema"] == ArrayEntry(
        ("ema",), "ema", "bfloat16", (3, 5), (3, 5), (3, 5), 1, 30, 34, False
    )
    table = arrays["large/table"]
    assert (table.bytes, table.objects, table.object) == (2_400_000, 1, (600, 1000))
    assert table.stored_bytes == 2 * (1_200_000 + 4) + 2 * 16 + 4
    assert values["optim/param_groups/0/lr"].node == 0.001
    assert values["optim/step"].count == 4
    assert values["scheduler/milestones"].node == [10, 20]
    assert values["rng"].node == {"per_rank": {"path": "rng", "axis": "rank", "count": 1}}
    assert found.url == f"{made}/steps/{step_folder(made, 100).name}"


def test_stored_bytes_are_those_of_the_files(made: Path) -> None:
    found = read_contents(opened(made), None, Options())
    assert found.record.step == 200
    for entry in found.entries:
        if isinstance(entry, ArrayEntry):
            files = [p for p in (Path(found.url) / entry.path).iterdir() if p.name != "zarr.json"]
            assert sum(path.stat().st_size for path in files) == entry.stored_bytes, entry.name
            assert len(files) == entry.objects


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("ema", ["ema"]),
        ("model/*.bias", ["model/0.bias", "model/1.bias"]),
        ("*/exp_avg/0.*", ["optim/exp_avg/0.weight", "optim/exp_avg/0.bias"]),
        ("scheduler", ["scheduler/last_epoch", "scheduler/milestones", "scheduler/best"]),
        ("model.*.bias", ["model/0.bias", "model/1.bias"]),
        ("optim.exp_avg.0.*", ["optim/exp_avg/0.weight", "optim/exp_avg/0.bias"]),
        ("Model", []),
    ],
)
def test_matching(made: Path, pattern: str, names: list[str]) -> None:
    found = read_contents(opened(made), None, Options())
    assert [each.name for each in found.matching(pattern)] == names


def test_tied_parameters_and_nested_lists(tmp_path: Path) -> None:
    first, second = torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    state = {
        "model": torch.nn.Sequential(first, second),
        "list": [torch.zeros(2), "text", {"deep": torch.ones(())[None]}],
        "empty": {},
    }
    ucpstore.save(tmp_path / "store", state, step=1)
    found = read_contents(opened(tmp_path / "store"), 1, Options())
    assert [(each.name, getattr(each, "tied", None)) for each in found.entries] == [
        ("model/0.weight", False),
        ("model/1.weight", True),
        ("list/0", False),
        ("list/1", None),
        ("list/2/deep", False),
        ("empty", None),
    ]
    tied = found.entries[1]
    assert isinstance(tied, ArrayEntry)
    assert tied.path == "model/0.weight"


def test_documents_are_checked_before_they_are_parsed(store: Path) -> None:
    path = step_folder(store, 100) / "optim/zarr.json"
    path.write_bytes(path.read_bytes().replace(b"exp_avg_sq", b"exp_avg_sQ"))
    with pytest.raises(CorruptError, match=r"optim/zarr\.json is damaged"):
        read_contents(opened(store), 100, Options())


def test_a_step_that_is_not_there(made: Path) -> None:
    with pytest.raises(StepNotFoundError, match="step 150 is not in"):
        read_contents(opened(made), 150, Options())


def test_nothing_is_written_and_no_object_is_read(made: Path) -> None:
    storage = FaultyStorage(opened(made))
    read_contents(storage, 100, Options())
    assert not {operation.kind for operation in storage.log} & (WRITES | {"check_writable"})
    assert all(key.endswith("zarr.json") for key in storage.keys("get"))
    assert storage.count("read_into") == 0


def large_model() -> dict[str, torch.Tensor]:
    """Names of more than 64 KiB together."""
    return {f"{'deep.' * 60}{n}": torch.zeros(2) for n in range(200)}


def test_parts_of_the_tree_that_are_stored_apart(tmp_path: Path) -> None:
    state = {
        "model": large_model(),
        "order": list(range(20_000)),
        "notes": "n" * 100_000,
        "blob": b"b" * 2_500_000,
        "history": {"losses": [0.5] * 300_000, "best": 3},
    }
    ucpstore.save(tmp_path / "store", state, step=1)
    found = read_contents(opened(tmp_path / "store"), 1, Options())
    names = [each.name for each in found.entries]
    assert names[0] == f"model/{'deep.' * 60}0"
    assert names[199] == f"model/{'deep.' * 60}199"
    assert names[200:] == ["order", "notes", "blob", "history/losses", "history/best"]
    # What is one value stays where it is.
    assert [each.node.keys() for each in found.entries[200:-1]] == [{"document"}] * 4


def test_a_damaged_part_of_the_tree(tmp_path: Path) -> None:
    state = {"model": large_model()}
    ucpstore.save(tmp_path / "store", state, step=1)
    path = step_folder(tmp_path / "store", 1) / "model/%.documents/0/c.0"
    flip(path, 20)
    with pytest.raises(CorruptError, match="chunk 0 is damaged"):
        read_contents(opened(tmp_path / "store"), 1, Options())
    path.unlink()
    with pytest.raises(CorruptError, match="is missing"):
        read_contents(opened(tmp_path / "store"), 1, Options())
