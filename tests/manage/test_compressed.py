"""Steps with compressed arrays: what `verify`, `show` and `ls` tell of them, damage included."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from manage.samples import flip, step_folder
from typer.testing import CliRunner

import ucpstore
from ucpstore.cli.app import app
from ucpstore.errors import CorruptError
from ucpstore.format import record
from ucpstore.manage.contents import ArrayEntry, read_contents
from ucpstore.manage.verify import verify
from ucpstore.options import Options
from ucpstore.storage import open_storage

OPTIONS = Options(codecs={"m.none": None, "m.*": {"name": "zstd", "configuration": {"level": 3}}})
SHARDED, SMALL = "m/large/c.0.0", "m/small/c.0"
INDEX_BYTES = 2 * 16 + 4  # `large` is two chunks in one object


def state() -> dict[str, dict[str, torch.Tensor]]:
    large = (torch.arange(600 * 1000) // 7).float().reshape(600, 1000)
    return {"m": {"large": large, "small": torch.arange(40), "none": torch.ones(3)}}


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compressed") / "store"
    ucpstore.save(folder, state(), step=1, options=OPTIONS)
    return folder


@pytest.fixture
def store(compressed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(compressed, tmp_path / "store")


def keys(store: Path, *, data: bool) -> list[str]:
    """Keys below the step that `verify` names, one for each problem."""
    report = verify(open_storage(store), data=data)
    return [re.sub(r"^steps/[^/]+/", "", each.key) for each in report.problems]


def test_a_whole_step_is_whole(store: Path) -> None:
    folder = step_folder(store, 1)
    stored = sum((folder / key).stat().st_size for key in (SHARDED, SMALL, "m/none/c.0"))
    for data in (False, True):
        report = verify(open_storage(store), data=data)
        assert report.problems == ()
        assert (report.objects, report.bytes) == (3, stored)
    assert report.bytes_read == stored


def cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


@pytest.mark.parametrize(
    ("key", "damage", "found", "told"),
    [
        (SHARDED, "a chunk", False, "chunk 0 is damaged"),
        (SHARDED, "its checksum", False, "chunk 1 is damaged"),
        (SHARDED, "the index", True, "index is damaged"),
        (SHARDED, "the index's checksum", True, "index is damaged"),
        (SHARDED, "cut", True, "index is damaged"),
        (SHARDED, "cut to 9 bytes", True, "at least the 36 bytes of its index, found 9"),
        (SHARDED, "emptied", True, "at least the 36 bytes of its index, found 0"),
        (SHARDED, "longer", True, "index is damaged"),
        (SHARDED, "removed", True, "is missing"),
        (SMALL, "a chunk", False, "chunk 0 is damaged"),
        (SMALL, "the last checksum", False, "chunk 0 is damaged"),
        (SMALL, "cut", False, "chunk 0 is damaged"),
        (SMALL, "emptied", True, "its checksum, found 0"),
        (SMALL, "longer", False, "chunk 0 is damaged"),
        (SMALL, "removed", True, "is missing"),
    ],
)  # fmt: skip
def test_damage_is_found_and_never_loaded(
    store: Path, key: str, damage: str, found: bool, told: str
) -> None:
    """`found` says that presence and index tell it, so that no data has to be read."""
    path = step_folder(store, 1) / key
    size = path.stat().st_size
    if damage == "cut":
        cut(path, 1)
    elif damage == "cut to 9 bytes":
        cut(path, size - 9)
    elif damage == "emptied":
        cut(path, size)
    elif damage == "longer":
        append(path)
    elif damage == "removed":
        path.unlink()
    else:
        places = {
            "a chunk": 3,
            "its checksum": size - INDEX_BYTES - 2,
            "the index": size - INDEX_BYTES + 17,
            "the index's checksum": size - 1,
            "the last checksum": size - 1,
        }
        flip(path, places[damage], 5)
    assert keys(store, data=True) == [key]
    assert keys(store, data=False) == ([key] if found else [])
    assert told in str(verify(open_storage(store), data=True).problems[0].what)
    target = {name: torch.zeros_like(tensor) for name, tensor in state()["m"].items()}
    with pytest.raises(CorruptError, match=rf"{key}.*{told}"):
        ucpstore.load(store, {"m": target})


def test_every_bit_of_the_small_object_counts(store: Path) -> None:
    path = step_folder(store, 1) / SMALL
    for position in range(path.stat().st_size):
        flip(path, position, position % 8)
        assert keys(store, data=True) == [SMALL], position
        flip(path, position, position % 8)
    assert keys(store, data=True) == []


def test_what_it_holds_is_told_without_stored_bytes(store: Path) -> None:
    found = {
        entry.name: (entry.bytes, entry.stored_bytes, entry.codec)
        for entry in read_contents(open_storage(store), 1, Options()).entries
        if isinstance(entry, ArrayEntry)
    }
    zstd = '{"configuration":{"checksum":false,"level":3},"name":"zstd"}'
    assert found == {
        "m/large": (2_400_000, None, zstd),
        "m/small": (320, None, zstd),
        "m/none": (12, 16, None),
    }


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(each) for each in arguments])
    return done.exit_code, done.stdout


def test_the_command_line_names_the_codec(store: Path) -> None:
    code, page = run("show", store)
    assert code == 0
    lines = [re.sub(r" {2,}", "  ", line.strip()) for line in page.splitlines()]
    assert "large  float32  600 x 1000  chunks 600 x 500, zstd  2.3 MiB" in lines
    assert "small  int64  40  chunks 40, zstd  320 B" in lines
    assert "none  float32  3  chunks 3  12 B" in lines
    code, text = run("show", store, "--json")
    assert code == 0
    document = json.loads(text)
    arrays = {each["name"]: each for each in document["arrays"]}
    assert arrays["m/large"]["stored_bytes"] is None
    assert arrays["m/large"]["codec"] == {
        "name": "zstd",
        "configuration": {"level": 3, "checksum": False},
    }
    assert (arrays["m/none"]["stored_bytes"], arrays["m/none"]["codec"]) == (16, None)
    code, text = run("ls", store, "--json")
    (step,) = json.loads(text)["steps"]
    assert (step["features"], step["bytes"]) == (["packed-row-major", "codecs"], 2_400_332)
    assert run("verify", store, "--data")[0] == 0


def test_an_older_reader_lists_it_as_unreadable(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "_KNOWN", record.FEATURES)
    code, text = run("ls", store, "--json")
    assert code == 5
    (step,) = json.loads(text)["unreadable"]
    assert (step["step"], step["damaged"]) == (1, False)
    assert "needs codecs, which this ucpstore does not know" in step["why"]
    assert run("show", store)[0] == 5
