"""Field cases of structure: B59 to B61: names by case, shapes without extent, items alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases.tools import attempt, line, refuse_load, refuse_save, same, sharded
from cases.tools import whole as gathered
from ranks.harness import Ranks
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import ucpstore
from ucpstore.storage.local import LocalStorage

# B59: names that differ by case alone.


def by_case() -> dict[str, torch.Tensor]:
    return {"Foo.weight": torch.zeros(2), "foo.weight": torch.ones(2)}


def test_b59_names_that_differ_by_case(tmp_path: Path) -> None:
    ucpstore.save(tmp_path, {"m": by_case(), "M": by_case()}, step=1)
    target = {name: torch.full((2,), 9.0) for name in by_case()}
    other = {name: torch.full((2,), 9.0) for name in by_case()}
    ucpstore.load(tmp_path, {"m": target, "M": other})
    for loaded in (target, other):
        assert all(same(loaded[name], value) for name, value in by_case().items())


@pytest.mark.parametrize("where", ["names", "items", "module"])
def test_b59_a_file_system_that_ignores_case_is_refused_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(LocalStorage, "case_insensitive", True)
    state: dict[str, object] = {"m": by_case()}
    words = ["m/Foo.weight", "m/foo.weight"]
    if where == "items":
        state, words = {"m": {"w": torch.ones(1)}, "M": {"w": torch.ones(1)}}, ["m/w", "M/w"]
    if where == "optimizer":
        model = nn.ModuleDict({"A": nn.Linear(1, 1), "a": nn.Linear(1, 1)})
        state, words = {"model": model}, ["model/A.weight", "model/a.weight"]
    refuse_save(tmp_path / "s", state, *words, "case")
    files = [path.name for path in (tmp_path / "s").rglob("*") if path.is_file()]
    assert files == []


def test_b59_a_real_case_sensitive_file_system_is_seen_as_such(tmp_path: Path) -> None:
    if (tmp_path.parent / tmp_path.name.upper()).exists():
        pytest.skip("this file system ignores case")
    storage = LocalStorage(str(tmp_path))
    storage.check_writable()
    assert storage.case_insensitive is False


NAMES = [
    "c",
    "c.0",
    "zarr.json",
    "",
    ".",
    "..",
    "a/b",
    "a%2Fb",
    "a%2fb",
    "__init__",
    "trailing.",
    "trailing ",
    "caf\u00e9",
    "cafe\u0301",
    "line\nbreak",
    "C:\\x",
    "con",
    "x" * 300,
    "X" * 300,
    "x" * 299 + "y",
    "\u00df",
    "ss",
    "0",
]
KEYS = [0, -1, 1.5, True, None, (1, "a"), b"0"]


def named(factor: float) -> dict[object, object]:
    leaves: dict[object, object] = {
        key: torch.full((2,), factor * number) for number, key in enumerate([*NAMES, *KEYS])
    }
    return {**leaves, "a": {"b": torch.full((2,), factor * 100), "c": torch.tensor([factor])}}


def test_b59_any_key_has_a_place_of_its_own(tmp_path: Path) -> None:
    ucpstore.save(tmp_path, {"m": named(1.0), **named(2.0)}, step=1)
    target = {"m": named(0.0), **named(0.0)}
    ucpstore.load(tmp_path, target)
    for found, expected in ((target["m"], named(1.0)), (target, named(2.0))):
        for key, value in expected.items():
            pairs = [(found[key], value)]
            if key == "a":
                pairs = [(found["a"][name], each) for name, each in value.items()]
            assert all(same(*pair) for pair in pairs), key
    outside = [path for path in tmp_path.parent.iterdir() if path != tmp_path]
    assert [path for path in outside if path.name in NAMES] == []


# B60: no extent.

NO_EXTENT = [(), (0,), (3, 0), (0, 0, 5), (0, 3), (2, 0, 3), (1,), (1, 1)]
OPTIONS = [
    ucpstore.Options(),
    ucpstore.Options(chunk_bytes=16, least_bytes=16, target_bytes=64),
]


def without_extent(factor: float) -> dict[str, torch.Tensor]:
    return {
        f"{dtype} {shape}".replace("torch.", ""): torch.full(shape, factor, dtype=dtype)
        for shape in NO_EXTENT
        for dtype in (torch.float32, torch.bfloat16, torch.int64)
    }


@pytest.mark.parametrize("options", OPTIONS, ids=["default", "tiny"])
def test_b60_shapes_without_extent(tmp_path: Path, options: ucpstore.Options) -> None:
    saved = without_extent(3.0)
    module = nn.Module()
    for number, value in enumerate(saved.values()):
        module.register_buffer(f"b{number}", value)
    state = {"m": saved, "module": module, **saved}
    ucpstore.save(tmp_path, state, step=1, options=options)
    other = nn.Module()
    for number, value in enumerate(saved.values()):
        other.register_buffer(f"b{number}", torch.zeros_like(value))
    inner = without_extent(0.0)
    target = {"m": inner, "module": other, **without_extent(0.0)}
    ucpstore.load(tmp_path, target, options=options)
    for number, (name, value) in enumerate(saved.items()):
        assert same(inner[name], value), name
        assert same(target[name], value), name
        assert same(other.get_buffer(f"b{number}"), value), name
    opened = ucpstore.CheckpointStore(tmp_path).open()
    assert opened["m"]["float32 (2, 0, 3)"].shape == (2, 0, 3)
    assert same(opened["m"]["float32 (2, 0, 3)"].read(), torch.zeros(2, 0, 3))
    assert same(opened["module"]["b0"][...], torch.tensor(3.0))


def dtensors_without_extent(factor: float) -> dict[str, torch.Tensor]:
    mesh = line()
    return {
        "columns": sharded(torch.full((3, 0), factor), mesh, Shard(1)),
        "rows": sharded(torch.full((0, 4), factor), mesh, Shard(0)),
        "rows of none": sharded(torch.full((3, 0), factor), mesh, Shard(0)),
        "few": sharded(torch.full((1, 4), factor), mesh, Shard(0)),
        "replicated": sharded(torch.full((0,), factor), mesh, Replicate()),
        "0-d": sharded(torch.tensor(factor), mesh, Replicate()),
    }


def dtensor_round_trip(url: str, tiny: bool) -> list[str]:
    options = OPTIONS[tiny]
    saved = dtensors_without_extent(2.0)
    ucpstore.save(url, {"m": saved, **saved}, step=1, options=options)
    inner, top = dtensors_without_extent(0.0), dtensors_without_extent(0.0)
    ucpstore.load(url, {"m": inner, **top}, options=options)
    wrong = []
    for name, value in saved.items():
        for found in (inner[name], top[name]):
            good = same(found.to_local(), value.to_local())
            good = good and same(gathered(found), gathered(value))
            wrong += [] if good else [name]
    return wrong


@pytest.mark.parametrize("tiny", [False, True])
def test_b60_dtensors_without_extent(ranks: Ranks, tmp_path: Path, tiny: bool) -> None:
    url = str(tmp_path / "s")
    assert ranks.run(2, dtensor_round_trip, url, tiny) == [[], []]
    target = {"columns": torch.zeros(3, 0), "few": torch.zeros(1, 4), "0-d": torch.tensor(0.0)}
    ucpstore.load(url, {"m": target}, strict=False)
    assert same(target["few"], torch.full((1, 4), 2.0))
    assert same(target["0-d"], torch.tensor(2.0))


def test_b60_an_empty_state_and_empty_items(tmp_path: Path) -> None:
    ucpstore.save(tmp_path, {}, step=1)
    assert ucpstore.load(tmp_path, {}).items == ()
    state = {"none": {}, "list": [], "module": nn.Module(), "null": None, "tuple": ()}
    ucpstore.save(tmp_path, state, step=2)
    target = {"none": {}, "list": [1], "module": nn.Module(), "null": 3, "tuple": (1, 2)}
    report = ucpstore.load(tmp_path, target)
    assert sorted(report.items) == sorted(state)
    assert (target["none"], target["list"], target["null"], target["tuple"]) == ({}, [], None, ())


# B61: items, with and without an optimizer.


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.head = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def run(seed: int) -> tuple[Layers, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Layers()
    return model, torch.optim.AdamW(model.parameters())


@pytest.fixture
def two_stores(tmp_path: Path) -> tuple[Path, Path, Layers]:
    """One store with the model alone, one with an optimizer and a batch besides; the model."""
    model, optimizer = run(1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    ucpstore.save(tmp_path / "model", {"model": model}, step=1)
    state = {"model": model, "optim": optimizer, "last_batch": {"x": torch.ones(2, 3), "n": 4}}
    ucpstore.save(tmp_path / "all", state, step=1)
    return tmp_path / "model", tmp_path / "all", model


def test_b61_the_model_alone_loads_from_both(two_stores: tuple[Path, Path, Layers]) -> None:
    for url in two_stores[:2]:
        model, _ = run(2)
        report = ucpstore.load(url, {"model": model})
        assert report.items == ("model",)
        assert (report.missing, report.unexpected) == ((), ())
        assert all(map(same, model.parameters(), two_stores[2].parameters()))


def test_b61_an_optimizer_that_was_not_saved_is_refused(
    two_stores: tuple[Path, Path, Layers],
) -> None:
    model, optimizer = run(2)
    target = {"model": model, "optim": optimizer}
    refuse_load(two_stores[0], target, "not in the checkpoint: optim")
    assert not optimizer.state
    report = ucpstore.load(two_stores[0], target, strict=False)
    assert (report.items, report.missing) == (("model",), ("optim",))
    assert all(map(same, model.parameters(), two_stores[2].parameters()))
    assert not optimizer.state


def test_b61_a_part_of_an_item(two_stores: tuple[Path, Path, Layers]) -> None:
    """Below an item everything is strict: a part of it is loaded without strict, or opened."""
    url, _, saved = two_stores
    part = {"layers.0.weight": torch.zeros(3, 3), "layers.0.bias": torch.zeros(3)}
    refuse_load(url, {"model": part}, "model.head.weight", "strict=False")
    report = ucpstore.load(url, {"model": part}, strict=False)
    assert report.missing == ()
    assert set(report.unexpected) == {
        f"model.{name}" for name in saved.state_dict() if not name.startswith("layers.0.")
    }
    assert all(same(value, saved.state_dict()[name]) for name, value in part.items())
    item = ucpstore.CheckpointStore(url).open()["model"]
    read = item.read(["layers.0.weight", "layers.0.bias"])
    assert all(same(read[name], part[name]) for name in part)


def test_b61_the_model_from_its_state_dict_and_back(two_stores: tuple[Path, Path, Layers]) -> None:
    model, _ = run(2)
    ucpstore.load(two_stores[0], {"model": model.state_dict()})
    assert all(map(same, model.parameters(), two_stores[2].parameters()))
    target = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    ucpstore.load(two_stores[0], {"model": target})
    assert all(same(target[name], value) for name, value in model.state_dict().items())


def different_items(url: str) -> tuple[str, object]:
    """Rank 0 asks for the model and the batch, rank 1 for the model alone."""
    model, _ = run(2)
    batch = {"x": torch.zeros(2, 3), "n": 0}
    target: dict[str, object] = {"model": model}
    if dist.get_rank() == 0:
        target["last_batch"] = batch
    ucpstore.load(url, target)
    missing = attempt(lambda: ucpstore.load(url, {"model": model, "nothing": torch.ones(1)}))
    return missing, batch["n"]


def test_b61_ranks_may_ask_for_different_items(
    ranks: Ranks, two_stores: tuple[Path, Path, Layers]
) -> None:
    results = ranks.run(2, different_items, str(two_stores[1]))
    assert [number for _, number in results] == [4, 0]
    assert all("nothing" in missing for missing, _ in results)
