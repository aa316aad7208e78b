"""Other implementations read what is written here, bit for bit, and write what is read here."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorstore
import xarray
import zarr
import zarr.codecs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ucpstore import dtypes
from ucpstore.arrays import zdtypes  # registers bfloat16 and float8 with zarr
from ucpstore.arrays.metadata import array_document, grid_of, to_bytes
from ucpstore.arrays.packed import (
    ObjectEncoder,
    check_index,
    decode_chunk,
    expected_index,
    slot_bytes,
)
from ucpstore.arrays.raw import RawArray, part, raw_dtype
from ucpstore.errors import CorruptError
from ucpstore.format.documents import group
from ucpstore.geometry.box import Index
from ucpstore.geometry.grid import Grid

GRIDS = [
    Grid((), (), (), False),
    Grid((0, 3), (1, 3), (1, 3), False),
    Grid((0, 3), (1, 3), (2, 3), True),
    Grid((5,), (5,), (5,), False),
    Grid((7,), (3,), (3,), True),
    Grid((5, 7), (2, 3), (4, 6), True),
    Grid((3, 5, 4), (1, 2, 4), (2, 6, 4), True),
]


def _values(shape: Index, name: str, seed: int = 0) -> RawArray:
    """Random bits, so NaNs of all kinds, -0.0 and infinities too; real booleans."""
    size = dtypes.itemsize(name)
    limit = 2 if name == "bool" else 256
    raw = np.random.default_rng(seed).integers(0, limit, math.prod(shape) * size, dtype=np.uint8)
    return raw.view(raw_dtype(size)).reshape(shape)


def _write(folder: Path, grid: Grid, name: str, values: RawArray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = tuple(f"{folder.name}:{dim}" for dim in range(len(grid.shape)))
    (folder / "zarr.json").write_bytes(to_bytes(array_document(grid, name, names)))
    for index in grid.object_indices():
        size = grid.object_bytes(index, dtypes.itemsize(name))
        encoder = ObjectEncoder(np.full(size, 0xA5, dtype=np.uint8), grid, index, name)
        box = grid.object_box(index)
        encoder.fill(box, part(values, box))
        (folder / grid.key(index)).write_bytes(encoder.finish())


def _with_zarr(folder: Path) -> bytes:
    return np.asarray(zarr.open_array(folder, mode="r")[...]).tobytes()


def _with_tensorstore(folder: Path) -> bytes:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(folder)}}
    read: np.ndarray[tuple[int, ...], np.dtype[np.generic]] = (
        tensorstore.open(spec, read=True).result().read().result()
    )
    return read.tobytes()


@pytest.mark.parametrize("name", dtypes.NAMES)
def test_every_dtype_and_shape_reads_bit_for_bit(tmp_path: Path, name: str) -> None:
    for number, grid in enumerate(GRIDS):
        values = _values(grid.shape, name, number)
        folder = tmp_path / f"a{number}"
        _write(folder, grid, name, values)
        assert _with_zarr(folder) == values.tobytes(), grid
        assert _with_tensorstore(folder) == values.tobytes(), grid


@st.composite
def _grids(draw: st.DrawFn) -> Grid:
    rank = draw(st.integers(1, 3))
    chunk = tuple(draw(st.integers(1, 4)) for _ in range(rank))
    factor = tuple(draw(st.integers(1, 3)) for _ in range(rank))
    shape = tuple(draw(st.integers(1, 9)) for _ in range(rank))
    whole = tuple(c * f for c, f in zip(chunk, factor, strict=True))
    return Grid(shape, chunk, whole, True)


@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(_grids(), st.sampled_from(dtypes.NAMES), st.integers(0, 2**16))
def test_random_shards_read_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, grid: Grid, name: str, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("random") / "w"
    values = _values(grid.shape, name, seed)
    _write(folder, grid, name, values)
    assert _with_zarr(folder) == values.tobytes()
    assert _with_tensorstore(folder) == values.tobytes()


@pytest.mark.parametrize(
    ("bits", "name"),
    [
        (np.array([0x7FC00001, 0xFFA12345, 0x80000000, 0x7F800000], "<u4"), "float32"),
        (np.array([0x7F81, 0xFFC1, 0x8000, 0x7FC0], "<u2"), "bfloat16"),
        (np.array([0x7FF0000000000001, 0xFFF8000000000002], "<u8"), "float64"),
    ],
)
def test_nan_payloads_and_negative_zero_survive(tmp_path: Path, bits: RawArray, name: str) -> None:
    _write(tmp_path / "w", Grid(bits.shape, (1,), (2,), True), name, bits)
    assert _with_zarr(tmp_path / "w") == bits.tobytes()
    assert _with_tensorstore(tmp_path / "w") == bits.tobytes()


def test_xarray_opens_a_group_bit_for_bit(tmp_path: Path) -> None:
    written, metadata = {}, {}
    for name in sorted(dtypes.NAMES):
        grid = Grid((5, 7), (2, 3), (4, 6), True)
        written[name] = _values(grid.shape, name)
        _write(tmp_path / name, grid, name, written[name])
        metadata[name] = to_bytes(array_document(grid, name, (f"{name}:0", f"{name}:1")))
    _write(tmp_path / "scalar", GRIDS[0], "float32", np.array(0x7FC00001, "<u4"))
    metadata["scalar"] = to_bytes(array_document(GRIDS[0], "float32", ()))
    (tmp_path / "zarr.json").write_bytes(group(consolidated=metadata))
    with xarray.open_zarr(tmp_path, consolidated=True, chunks=None) as dataset:
        assert dataset["scalar"].values.tobytes() == b"\x01\x00\xc0\x7f"
        for name, values in written.items():
            assert dataset[name].dims == (f"{name}:0", f"{name}:1")
            assert dataset[name].values.tobytes() == values.tobytes(), name


def test_a_process_that_knows_only_zarr_reads_bfloat16(tmp_path: Path) -> None:
    bits = np.arange(0, 0x10000, 7, dtype="<u2")
    _write(tmp_path / "w", Grid(bits.shape, (1000,), (4000,), True), "bfloat16", bits)
    (tmp_path / "zarr.json").write_bytes(group())
    script = (
        "import sys, zarr\n"
        "array = zarr.open_group(sys.argv[1], mode='r')['w']\n"
        "assert str(array.dtype) == 'bfloat16', array.dtype\n"
        "assert 'torch' not in sys.modules and 'ucpstore.dtypes' not in sys.modules\n"
        "sys.stdout.buffer.write(array[...].tobytes())\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(tmp_path)],
        capture_output=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == bits.tobytes()


def test_damage_is_found_by_other_readers_too(tmp_path: Path) -> None:
    grid = GRIDS[5]
    _write(tmp_path / "w", grid, "float32", _values(grid.shape, "float32"))
    stored = tmp_path / "w" / "c.0.0"
    data = bytearray(stored.read_bytes())
    data[30] ^= 1
    stored.write_bytes(data)
    with pytest.raises(ValueError, match="checksum"):
        _with_zarr(tmp_path / "w")
    with pytest.raises(ValueError, match="Digest mismatch"):
        _with_tensorstore(tmp_path / "w")


def _created_by_zarr(
    folder: Path, shape: Index, chunk: Index, whole: Index | None
) -> tuple[Grid, RawArray]:
    values = _values(shape, "float32")
    array = zarr.create_array(
        folder,
        shape=shape,
        chunks=chunk,
        shards=whole,
        dtype="float32",
        fill_value=np.nan,
        compressors=[zarr.codecs.Crc32cCodec()],
        dimension_names=[f"d{dim}" for dim in range(len(shape))],
        chunk_key_encoding={"name": "default", "separator": "."},
        config={"write_empty_chunks": True},
    )
    array[...] = values.view("<f4")
    return grid_of(json.loads((folder / "zarr.json").read_bytes())), values


def test_plain_and_one_dimensional_objects_of_zarr_are_the_same_bytes(tmp_path: Path) -> None:
    for number, (shape, chunk, whole) in enumerate([((5, 7), (5, 7), None), ((12,), (2,), (6,))]):
        theirs, ours = tmp_path / f"theirs{number}", tmp_path / f"ours{number}"
        grid, values = _created_by_zarr(theirs, shape, chunk, whole)
        assert grid == Grid(shape, chunk, whole or chunk, whole is not None)
        _write(ours, grid, "float32", values)
        for index in grid.object_indices():
            key = grid.key(index)
            assert (ours / key).read_bytes() == (theirs / key).read_bytes()


def test_shards_of_zarr_hold_the_same_chunks_but_not_in_row_major_order(tmp_path: Path) -> None:
    # zarr-python writes the chunks of a shard along a Morton curve: its index is needed to read.
    grid, values = _created_by_zarr(tmp_path / "w", (4, 8), (2, 2), (4, 8))
    assert grid == Grid((4, 8), (2, 2), (4, 8), True)
    data = (tmp_path / "w" / "c.0.0").read_bytes()
    tail = data[-len(expected_index(grid, (0, 0), 4)) :]
    with pytest.raises(CorruptError, match="index entry"):
        check_index(tail, grid, (0, 0), 4, "w/c.0.0")
    table = np.frombuffer(tail[:-4], "<u8").reshape(-1, 2).tolist()
    for number, box in enumerate(grid.chunks((0, 0))):
        offset, length = table[grid.chunk_slot((0, 0), number)]
        assert length == slot_bytes(grid, 4)
        chunk = decode_chunk(data[offset : offset + length], grid, "float32", "w/c.0.0", number)
        assert np.array_equal(chunk, part(values, box))


def test_arrays_that_zarr_creates_in_our_data_types_read_elsewhere(tmp_path: Path) -> None:
    for kind in (zdtypes.BFloat16, zdtypes.Float8E4M3FN):
        native = kind().to_native_dtype()
        folder = tmp_path / str(native)
        array = zarr.create_array(folder, shape=(4,), dtype=native, fill_value=float("nan"))
        array[:2] = np.array([1.5, -2.0], dtype=native)
        expected = np.array([1.5, -2.0, np.nan, np.nan]).astype(native)
        assert _with_tensorstore(folder) == expected.tobytes()
