"""Stores of every format version read for ever, and this version writes the same bytes for ever."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from golden.states import Model, state

import ucpstore
from ucpstore.format.record import FORMAT_VERSION
from ucpstore.manage.verify import verify
from ucpstore.storage import open_storage

HERE = Path(__file__).parent
VERSIONS = sorted(HERE.glob("format-*"))


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("folder", VERSIONS, ids=lambda folder: folder.name)
def test_it_loads_bit_for_bit(folder: Path) -> None:
    expected, target = state(), state(blank=True)
    report = ucpstore.load(folder, target)
    assert (report.step, report.missing, report.unexpected) == (100, (), ())
    for item in ("tables", "large"):
        for name, tensor in expected[item].items():  # type: ignore[attr-defined]
            found = target[item][name]  # type: ignore[index]
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
            assert raw(found) == raw(tensor), name
    assert raw(target["bias"]) == raw(expected["bias"])  # type: ignore[arg-type]
    model, other = expected["model"], target["model"]
    assert isinstance(model, Model)
    assert isinstance(other, Model)
    assert other.head.weight is other.embed.weight
    pairs = zip(model.state_dict().items(), other.state_dict().values(), strict=True)
    assert all(raw(a) == raw(b) for (_, a), b in pairs)
    wanted, found = (each["optim"].state_dict() for each in (expected, target))  # type: ignore[attr-defined]
    assert found["param_groups"] == wanted["param_groups"]
    for number, states in wanted["state"].items():
        assert {k: raw(v) for k, v in states.items()} == {
            k: raw(v) for k, v in found["state"][number].items()
        }
    assert repr(target["values"]) == repr(expected["values"])
    assert target["loader"].value == {"position": 17}  # type: ignore[attr-defined]


@pytest.mark.parametrize("folder", VERSIONS, ids=lambda folder: folder.name)
def test_it_verifies(folder: Path) -> None:
    report = verify(open_storage(folder), 100, data=True)
    assert report.problems == ()


def test_this_version_has_a_golden_store() -> None:
    assert HERE / f"format-{FORMAT_VERSION}" in VERSIONS


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    """All files of the step, documents and objects; names of folders and times are random."""
    ucpstore.save(tmp_path, state(), step=100, metadata={"note": "golden"})
    golden, fresh = (
        {
            str(file.relative_to(step)): file.read_bytes()
            for file in step.rglob("*")
            if file.is_file()
        }
        for step in (
            next((HERE / f"format-{FORMAT_VERSION}" / "steps").glob("*-*")),
            next((tmp_path / "steps").glob("*-*")),
        )
    )
    assert sorted(golden) == sorted(fresh)
    assert [name for name in golden if golden[name] != fresh[name]] == []
