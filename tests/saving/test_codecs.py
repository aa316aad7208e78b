"""Compressed arrays from end to end: saved by several ranks, read by others and by other tools."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from cases.tools import bits
from ranks.harness import Ranks
from saving.compressing import CODECS, STORED, TENSORS, Scaled, chain, save_rows, split, values
from services.seaweed import S3Service

import ucpstore
from ucpstore.manage.open import Item
from ucpstore.options import Options

READERS = Path(__file__).parents[1] / "acceptance" / "plain_readers.py"


def load_split(url: str, dim: int) -> list[str]:
    """Load all tensors split along `dim`; the names of those that differ, whole or in part."""
    target = {name: split(torch.zeros_like(values(name)), dim) for name in TENSORS}
    module = Scaled(0.0)
    ucpstore.load(url, {"m": target, "plain": module})
    found = [
        n for n in TENSORS if bits(target[n].to_local()) != bits(split(values(n), dim).to_local())
    ]
    return found + [
        n for n, t in module.state_dict().items() if bits(t) != bits(Scaled(3.0).state_dict()[n])
    ]


@pytest.fixture(scope="module")
def rows(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What 3 ranks saved by rows; not to be changed."""
    folder = tmp_path_factory.mktemp("codecs") / "store"
    sent = ranks.run(3, save_rows, str(folder))
    assert sum(sent) > 513 * 513 * 4 // 4  # an array whose cuts meet no chunk
    return folder


def test_the_first_pattern_that_matches_gives_the_codec(rows: Path) -> None:
    for name, codec in STORED.items():
        expected = ["bytes", "crc32c"] if codec is None else ["bytes", codec, "crc32c"]
        assert chain(rows, f"m/{name}") == expected, name
    for name in ("scale", "none", "some"):
        assert chain(rows, f"plain/{name}") == ["bytes", "zstd", "crc32c"]
    (document,) = rows.glob("steps/*/m/bf16/zarr.json")
    assert '"typesize":2' in document.read_text()
    assert sum(p.stat().st_size for p in document.parent.glob("c.*")) < 1030 * 600 * 2 * 0.6


@pytest.mark.parametrize(("count", "dim"), [(2, 0), (4, 1), (4, 0)])
def test_other_ranks_load_it_bit_for_bit(ranks: Ranks, rows: Path, count: int, dim: int) -> None:
    assert ranks.run(count, load_split, str(rows), dim) == [[]] * count


def test_one_process_reads_it_bit_for_bit(rows: Path) -> None:
    step = ucpstore.CheckpointStore(rows).open()
    item, plain = step["m"], step["plain"]
    assert isinstance(item, Item)
    assert isinstance(plain, Item)
    for name, tensor in item.read().items():
        assert bits(tensor) == bits(values(name)), name
        assert bits(item[name][3:500, 1:3]) == bits(values(name)[3:500, 1:3]), name
    assert plain["scale"].read().item() == 3.0
    assert plain["none"].read().shape == (0, 3)
    assert plain["some"].read().tolist() == [0, 3, 6, 9, 12]


def save_here(url: str, storage: Mapping[str, object] | None = None) -> None:
    state = {"m": {name: values(name) for name in TENSORS}}
    ucpstore.save(url, state, step=1, options=Options(codecs=CODECS), storage_options=storage)
    target = {name: torch.zeros_like(tensor) for name, tensor in state["m"].items()}
    ucpstore.load(url, {"m": target}, storage_options=storage)
    assert [n for n in TENSORS if bits(target[n]) != bits(state["m"][n])] == []


def test_memory() -> None:
    save_here("memory://codecs")


def test_s3(ranks: Ranks, s3: S3Service, bucket: str) -> None:
    save_here(f"s3://{bucket}/one", s3.options("writer"))
    ranks.run(2, save_rows, f"s3://{bucket}/two", s3.options("writer"))
    store = ucpstore.CheckpointStore(f"s3://{bucket}/two", s3.options("reader"))
    for name, tensor in store.open(1)["m"].read().items():  # type: ignore[union-attr]
        assert bits(tensor) == bits(values(name)), name


# ---- other readers -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A store with the codecs that Zarr specifies, saved by 2 ranks, and its bytes in a file."""
    folder = tmp_path_factory.mktemp("plain")
    ranks.run(2, save_specified, str(folder / "store"))
    raw = {f"m/{n}": np.frombuffer(bits(values(n)), np.uint8) for n in TENSORS if n != "few"}
    np.savez(folder / "reference.npz", **raw)
    return folder / "store", folder / "reference.npz"


def save_specified(url: str) -> None:
    state = {"m": {name: split(values(name), 0) for name in TENSORS if name != "few"}}
    codecs = {"m.f*": "zstd", "m.b*": "blosc", "*": "gzip"}
    ucpstore.save(url, state, step=1, options=Options(codecs=codecs))


@pytest.mark.parametrize("reader", ["with_zarr", "with_tensorstore", "with_xarray"])
def test_other_tools_read_it(plain: tuple[Path, Path], reader: str) -> None:
    store, reference = plain
    done = subprocess.run(
        [sys.executable, str(READERS), reader, str(store), str(reference)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) == 9


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not")
def test_zarr_reads_codecs_of_numcodecs(rows: Path) -> None:
    (folder,) = rows.glob("steps/*/m")
    group = zarr.open_group(folder, mode="r")
    for name in ("bool", "f8", "few"):
        array = group[name]
        assert isinstance(array, zarr.Array)
        assert np.asarray(array[...]).tobytes() == bits(values(name))
