"""Objects with a compressor: other readers, the bounds, the index, and damage."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import tensorstore
import zarr

import ucpstore.arrays.zdtypes  # noqa: F401  # registers bfloat16 and float8 with zarr
from ucpstore import dtypes
from ucpstore.arrays.chain import buffer_bytes, encoder
from ucpstore.arrays.compressed import (
    CompressedEncoder,
    Extent,
    check_order,
    decode_compressed,
    object_bound,
    parse_index,
)
from ucpstore.arrays.compressors import bound_bytes, settle
from ucpstore.arrays.metadata import array_document, parse, to_bytes
from ucpstore.arrays.packed import LEFT_OUT
from ucpstore.arrays.raw import RawArray, part, raw_dtype
from ucpstore.errors import CorruptError
from ucpstore.format.documents import crc32c
from ucpstore.geometry.box import Box, Index
from ucpstore.geometry.grid import Grid

GRIDS = [
    Grid((), (), (), False),
    Grid((5,), (5,), (5,), False),
    Grid((5, 7), (2, 3), (4, 6), True),
    Grid((3, 5, 4), (1, 2, 4), (2, 6, 4), True),
]
CODECS = ["zstd", "blosc", "gzip"]  # those that TensorStore knows
ZSTD = '{"name":"zstd"}'


def text(name: str, itemsize: int) -> str:
    return settle(json.dumps({"name": name}), itemsize)


def values_of(shape: Index, name: str) -> RawArray:
    """Random bits, real booleans."""
    size = dtypes.itemsize(name)
    limit = 2 if name == "bool" else 256
    raw = np.random.default_rng(1).integers(0, limit, math.prod(shape) * size, dtype=np.uint8)
    return raw.view(raw_dtype(size)).reshape(shape)


def encoded(grid: Grid, index: Index, name: str, values: RawArray, codec: str) -> bytes:
    """The object; its buffer is full of other bytes and no longer than it says."""
    buffer = np.full(buffer_bytes(grid, index, name, codec), 0xA5, np.uint8)
    made = encoder(buffer, grid, index, name, codec)
    box = grid.object_box(index)
    made.fill(box, part(values, box))
    return bytes(made.finish())


def write(folder: Path, grid: Grid, name: str, values: RawArray, codec: str) -> None:
    folder.mkdir()
    names = tuple(f"w:{dim}" for dim in range(len(grid.shape)))
    document = array_document(grid, name, names, codec)
    (folder / "zarr.json").write_bytes(to_bytes(document))
    for index in grid.object_indices():
        (folder / grid.key(index)).write_bytes(encoded(grid, index, name, values, codec))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", dtypes.NAMES)
def test_zarr_and_tensorstore_read_bit_for_bit(tmp_path: Path, name: str, codec: str) -> None:
    for number, grid in enumerate(GRIDS):
        values = values_of(grid.shape, name)
        folder = tmp_path / f"a{number}"
        write(folder, grid, name, values, text(codec, dtypes.itemsize(name)))
        read = np.asarray(zarr.open_array(folder, mode="r")[...])
        assert read.tobytes() == values.tobytes(), grid
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(folder)}}
        found: np.ndarray[tuple[int, ...], np.dtype[np.generic]] = (
            tensorstore.open(spec, read=True).result().read().result()
        )
        assert found.tobytes() == values.tobytes(), grid


@pytest.mark.parametrize("codec", [*CODECS, "numcodecs.lz4", "numcodecs.bz2", "numcodecs.zlib"])
def test_chunks_come_back_and_the_bounds_hold(codec: str) -> None:
    grid = Grid((90, 70), (40, 30), (80, 60), True)
    full = text(codec, 4)
    for values in (values_of(grid.shape, "float32"), np.zeros(grid.shape, "<u4")):
        for index in grid.object_indices():
            data = encoded(grid, index, "float32", values, full)
            assert len(data) <= object_bound(grid, index, 4)
            tail = data[-grid.index_bytes :]
            extents = parse_index(tail, grid, index, len(data), "w/c")
            check_order(tail, extents, grid, index, len(data), "w/c")
            for number, (box, here) in enumerate(zip(grid.chunks(index), extents, strict=True)):
                stored = np.frombuffer(data[here.offset : here.stop], np.uint8)
                chunk = decode_compressed(stored, grid, "float32", full, "w/c", number)
                inside = part(chunk, Box((0, 0), box.shape))
                assert np.array_equal(inside, part(values, box))


def test_parse_is_the_inverse() -> None:
    codec = text("blosc", 2)
    assert json.loads(codec)["configuration"]["typesize"] == 2
    for grid in GRIDS:
        names = tuple(f"w:{dim}" for dim in range(len(grid.shape)))
        document = json.loads(to_bytes(array_document(grid, "bfloat16", names, codec)))
        found = parse(document)
        assert (found.grid, found.codec) == (grid, codec)


def test_zarr_makes_the_same_metadata(tmp_path: Path) -> None:
    array = zarr.create_array(
        tmp_path,
        shape=(5, 7),
        chunks=(2, 3),
        shards=(4, 6),
        dtype="float32",
        compressors=[zarr.codecs.BloscCodec(), zarr.codecs.Crc32cCodec()],
    )
    theirs = json.loads((tmp_path / "zarr.json").read_bytes())["codecs"]
    ours = array_document(GRIDS[2], "float32", ("a", "b"), text("blosc", 4))["codecs"]
    assert ours == theirs
    assert array.shape == (5, 7)


GRID = Grid((5,), (2,), (8,), True)  # three chunks in an object of four
VALUES = np.arange(5, dtype="<u4")


def sealed(table: list[list[int]]) -> bytes:
    entries = np.array(table, "<u8").tobytes()
    return entries + crc32c(entries).to_bytes(4, "little")


def test_an_index_that_cannot_be_is_refused() -> None:
    data = encoded(GRID, (0,), "float32", VALUES, text("zstd", 4))
    tail = data[-GRID.index_bytes :]
    extents = parse_index(tail, GRID, (0,), len(data), "w/c.0")
    rows = [[each.offset, each.length] for each in extents]
    none = [LEFT_OUT, LEFT_OUT]
    assert sealed([*rows, none]) == tail
    for table, message in [
        ([rows[0], none, rows[2], none], "w/c.0: chunk 1 is missing"),
        ([rows[0], [0, 3], rows[2], none], "chunk 1 should lie in"),
        ([rows[0], [len(data) - 72, 24], rows[2], none], "chunk 1 should lie in"),
        ([rows[0], [2**64 - 8, 8], rows[2], none], "chunk 1 should lie in"),
    ]:
        with pytest.raises(CorruptError, match=message):
            parse_index(sealed(table), GRID, (0,), len(data), "w/c.0")
    with pytest.raises(CorruptError, match=r"w/c\.0: index is damaged"):
        parse_index(bytes(len(tail)), GRID, (0,), len(data), "w/c.0")
    swapped = sealed([rows[1], rows[0], rows[2], none])
    for bad, size, message in [
        (swapped, len(data), "chunk 0 should be at 0"),
        (tail, len(data) + 1, f"should have {len(data)} bytes by its index"),
        (sealed([*rows, [0, 8]]), len(data), "should name 3 chunks, found 4"),
    ]:
        found = parse_index(bad, GRID, (0,), size, "w/c.0")
        with pytest.raises(CorruptError, match=message):
            check_order(bad, found, GRID, (0,), size, "w/c.0")
    # Chunks in any order are read all the same, as zarr-python writes them.
    assert parse_index(swapped, GRID, (0,), len(data), "w/c.0")[0] == Extent(*rows[1])


def test_damage_is_named() -> None:
    codec = text("zstd", 4)
    data = encoded(Grid((5,), (5,), (5,), False), (0,), "float32", VALUES, codec)
    grid = Grid((5,), (5,), (5,), False)
    for position in range(len(data)):
        raw = np.frombuffer(data, np.uint8).copy()
        raw[position] ^= 4
        with pytest.raises(CorruptError, match=r"w/c\.0: chunk 0 is damaged"):
            decode_compressed(raw, grid, "float32", codec, "w/c.0", 0)
    with pytest.raises(CorruptError, match="chunk 0 should have its checksum, found 3 bytes"):
        decode_compressed(np.zeros(3, np.uint8), grid, "float32", codec, "w/c.0", 0)
    other = Grid((6,), (6,), (6,), False)
    with pytest.raises(CorruptError, match="should have 24 bytes decompressed, found 20"):
        decode_compressed(np.frombuffer(data, np.uint8), other, "float32", codec, "w/c.0", 0)
    junk = b"not zstd" + crc32c(b"not zstd").to_bytes(4, "little")
    with pytest.raises(CorruptError, match="chunk 0 is not what zstd reads"):
        decode_compressed(np.frombuffer(junk, np.uint8), grid, "float32", codec, "w/c.0", 0)


def test_parts_that_are_missing_are_refused() -> None:
    made = CompressedEncoder(
        np.empty(buffer_bytes(GRID, (0,), "float32", ZSTD), np.uint8), GRID, (0,), "float32", ZSTD
    )
    made.fill(Box((0,), (3,)), VALUES[:3])
    with pytest.raises(RuntimeError, match=r"chunk 1 at \(2,\) needs its 2 elements"):
        made.finish()
    with pytest.raises(ValueError, match="the object needs"):
        CompressedEncoder(np.empty(9, np.uint8), GRID, (0,), "float32", ZSTD)


def test_bound() -> None:
    assert bound_bytes(0) == 1024
    assert bound_bytes(1 << 20) == (1 << 20) + (1 << 16) + 1024
