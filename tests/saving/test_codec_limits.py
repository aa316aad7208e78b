"""Compressed arrays: what a load reads, how much memory they take, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from acceptance.memory import peak_above_start
from cases.tools import attempt, bits, line
from ranks.harness import Ranks
from saving.compressing import TENSORS, Scaled, chain, save_rows, split, values
from services.faults import FaultyStorage
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import empty as dtensor_empty

import ucpstore
from ucpstore.arrays import compressors
from ucpstore.errors import FormatError, UnsupportedError
from ucpstore.format import record
from ucpstore.manage.open import Item
from ucpstore.options import MIB, Options


@pytest.fixture(scope="module")
def rows(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What 2 ranks saved; not to be changed."""
    folder = tmp_path_factory.mktemp("codecs") / "store"
    ranks.run(2, save_rows, str(folder))
    return folder


def test_only_the_chunks_that_are_needed_are_read(tmp_path: Path) -> None:
    """A slice costs the index and the chunks that it touches, by the numbers of the file itself."""
    tensor = (torch.arange(4096 * 1024, dtype=torch.int32) // 256).reshape(4096, 1024)
    options = Options(codecs={"*": "zstd"})
    ucpstore.save(tmp_path, {"m": {"w": tensor}}, step=1, options=options)
    (path,) = tmp_path.glob("steps/*/m/w/c.0.0")
    document = json.loads((path.parent / "zarr.json").read_bytes())
    rows, columns = document["codecs"][0]["configuration"]["chunk_shape"]
    wide, chunks = 1024 // columns, 4096 * 1024 // (rows * columns)
    assert (chunks, 4096 % rows) == (16, 0)
    index = np.frombuffer(path.read_bytes()[-16 * chunks - 4 : -4], "<u8").reshape(chunks, 2)
    store = ucpstore.CheckpointStore(tmp_path)
    faulty = FaultyStorage(store._storage)
    store._storage = faulty
    item = store.open(1)["m"]
    assert isinstance(item, Item)
    assert wide > 1  # so that the chunks of one column do not follow each other
    lengths = index[:, 1].reshape(4096 // rows, wide)
    for start, stop, end in ((0, 1, 1024), (rows - 1, rows + 1, 1024), (0, 4096, 7)):
        faulty.log.clear()
        assert torch.equal(item["w"][start:stop, :end], tensor[start:stop, :end])
        touched = lengths[start // rows : -(-stop // rows), : -(-end // columns)].sum()
        assert faulty.bytes("read_into", "/c.") == touched + 16 * chunks + 4
    assert index[:, 1].sum() < tensor.nbytes / 2


def measure(url: str) -> dict[str, int]:
    """The rank's bytes, and by how much memory grew while they were saved, and loaded otherwise."""
    options = Options(budget_bytes=96 * MIB, codecs={"*": "zstd"})
    mesh = line()

    def state(dim: int) -> dict[str, DTensor]:
        found = {}
        for name, rows in {"even": 65536, "uneven": 40003}.items():
            tensor = dtensor_empty(rows, 1024, device_mesh=mesh, placements=[Shard(dim)])
            tensor.to_local().view(torch.int32).random_()
            found[name] = tensor
        return found

    rows = state(0)
    size = sum(tensor.to_local().nbytes for tensor in rows.values())
    saved = peak_above_start(lambda: ucpstore.save(url, {"m": rows}, step=1, options=options))
    columns = state(1)
    loaded = peak_above_start(lambda: ucpstore.load(url, {"m": columns}, options=options))
    return {"state": size, "save": saved, "load": loaded}


def test_memory_stays_below_the_budget(ranks: Ranks, tmp_path: Path) -> None:
    with ranks.fresh(2) as pool:
        for peaks in pool.run(measure, str(tmp_path / "store"), timeout_s=240):
            assert peaks["state"] > 2 * 96 * MIB
            assert max(peaks["save"], peaks["load"]) < 96 * MIB, peaks


# ---- refusals ------------------------------------------------------------------------------------


def refused(url: str, kind: str) -> str:
    """What a save says on this rank; `kind` names what is wrong."""
    state = {"m": {"w": split(values("f32.uneven"), 0), "b": split(values("bool"), 0)}}
    if kind == "on one rank only":
        codecs: object = {"m.w": "zstd"} if dist.get_rank() == 1 else {}
    else:
        codecs = {"m.*": "gzip", "other.*": json.loads(kind)}
        if "elementsize" in kind:
            codecs = {"m.*": json.loads(kind)}
    return attempt(lambda: ucpstore.save(url, state, step=1, options=Options(codecs=codecs)))  # type: ignore[arg-type]


CODEC = '{{"name":"{}","configuration":{{{}}}}}'
OPTION = "option codecs['other.*']: "


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("on one rank only", "every rank must pass the same options"),
        ('"zst"', f"{OPTION}zarr-python knows no codec 'zst' here; did you mean 'zstd'?"),
        ('"lz4"', f"{OPTION}zarr-python knows no codec 'lz4' here; did you mean 'numcodecs.lz4'?"),
        (CODEC.format("zstd", '"level":99'), f"{OPTION}codec 'zstd' does not take"),
        (CODEC.format("transpose", '"order":[0]'), f"{OPTION}codec 'transpose' is no compressor"),
        (
            CODEC.format("numcodecs.shuffle", '"elementsize":8'),
            "m/b: codec 'numcodecs.shuffle' does not take chunks of this length",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_on_all_ranks_before_anything_is_written(
    ranks: Ranks, tmp_path: Path, kind: str, told: str
) -> None:
    for text in ranks.run(2, refused, str(tmp_path / "store"), kind):
        assert told in text
    assert list(tmp_path.iterdir()) == []


def test_patterns_that_match_nothing_are_no_error(tmp_path: Path) -> None:
    """One set of options may serve several models; what does not match is stored as it is."""
    state = {"m": {"w": torch.ones(3)}}
    options = Options(codecs={"m.v": "zstd", "m": "zstd", "m/w": "zstd", "optim.*": "gzip"})
    ucpstore.save(
        tmp_path, state, step=1, options=options, per_rank="x.*", cast={"m.v": torch.bfloat16}
    )
    assert chain(tmp_path, "m/w") == ["bytes", "crc32c"]
    ucpstore.load(tmp_path, {"m": {"w": torch.zeros(3)}}, cast="x.*")
    assert features(tmp_path) == ["packed-row-major"]


def features(folder: Path) -> list[str]:
    raw = json.loads((folder / "commits/0000000001/zarr.json").read_bytes())
    return list(raw["attributes"]["ucpstore"]["features"])


def test_a_reader_that_does_not_know_the_feature_refuses(
    rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert features(rows) == ["packed-row-major", "codecs"]
    monkeypatch.setattr(record, "_KNOWN", ("packed-row-major",))
    with pytest.raises(FormatError, match="needs codecs, which this ucpstore does not know"):
        ucpstore.load(rows, {"plain": Scaled(0.0)})


def test_a_codec_that_is_not_installed_closes_its_arrays_only(
    rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = compressors._codec_class

    def without(name: str) -> object:
        return sound("numcodecs.fast" if name == "numcodecs.lz4" else name)

    monkeypatch.setattr(compressors, "_codec_class", without)
    compressors.compressor.cache_clear()
    target = {name: torch.full_like(values(name), 1) for name in TENSORS}
    before = {name: bits(tensor) for name, tensor in target.items()}
    with pytest.raises(UnsupportedError, match=r"m/\w+: .* knows no codec 'numcodecs.fast' here"):
        ucpstore.load(rows, {"m": target})
    assert {name: bits(tensor) for name, tensor in target.items()} == before
    module = Scaled(0.0)
    ucpstore.load(rows, {"plain": module})
    assert module.scale.item() == 3.0  # type: ignore[operator]
    compressors.compressor.cache_clear()
