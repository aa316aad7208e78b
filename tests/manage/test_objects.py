from __future__ import annotations

import numpy as np
import pytest

from ucpstore import catalog
from ucpstore.arrays.chain import buffer_bytes, encoder
from ucpstore.arrays.metadata import ArrayMetadata
from ucpstore.errors import CorruptError
from ucpstore.format.record import CommitRecord
from ucpstore.geometry import Grid
from ucpstore.manage.objects import check_object, check_tail, objects_of
from ucpstore.staging import BufferPool
from ucpstore.storage.memory import MemoryStorage

RECORD = CommitRecord(
    step=1,
    generation=1,
    save_id="0123456789ab",
    created="2026-01-01T00:00:00+00:00",
    world_size=1,
    writer="test",
    arrays=1,
    bytes=0,
    documents=(),
    arrays_crc32c=0,
)
REF = catalog.StepRef(RECORD, RECORD.to_bytes())

GRIDS = [
    Grid((0,), (1,), (1,), False),
    Grid((10,), (10,), (10,), False),
    Grid((10,), (4,), (12,), True),  # one object, its last chunk cut
    Grid((22,), (4,), (8,), True),  # three objects, the last with one chunk and a cut one
    Grid((17,), (4,), (8,), True),
]
CODECS = [None, '{"configuration":{"checksum":false,"level":3},"name":"zstd"}']


def put_all(storage: MemoryStorage, metadata: ArrayMetadata, values: np.ndarray) -> None:
    grid = metadata.grid
    for each in objects_of("a", metadata):
        size = buffer_bytes(grid, each.index, metadata.dtype, metadata.codec)
        buffer = np.empty(size, np.uint8)
        made = encoder(buffer, grid, each.index, metadata.dtype, metadata.codec)
        box = grid.object_box(each.index)
        made.fill(box, values[box.slices()])
        storage.put(f"{REF.path}/{each.key}", made.finish())


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_bytes_come_back(grid: Grid, codec: str | None) -> None:
    storage, metadata = MemoryStorage(), ArrayMetadata(grid, "uint8", codec)
    values = np.arange(1, grid.shape[0] + 1, dtype=np.uint8)
    put_all(storage, metadata, values)
    if codec is None:
        assert catalog.read_bytes(storage, REF, "a", metadata) == values.tobytes()
    else:
        with pytest.raises(CorruptError, match=r"a should hold bytes, but is .*, compressed"):
            catalog.read_bytes(storage, REF, "a", metadata)
    for each in objects_of("a", metadata):
        key = f"{REF.path}/{each.key}"
        assert check_object(storage, key, each, storage.size(key), BufferPool(100)) == []


@pytest.mark.parametrize("codec", CODECS)
def test_every_byte_of_an_object_counts(codec: str | None) -> None:
    storage, metadata = MemoryStorage(), ArrayMetadata(GRIDS[3], "uint8", codec)
    put_all(storage, metadata, np.arange(22, dtype=np.uint8))
    for each in objects_of("a", metadata):
        key = f"{REF.path}/{each.key}"
        whole = storage.get(key)
        assert each.size == (len(whole) if codec is None else None)
        for position in range(len(whole)):
            raw = bytearray(whole)
            raw[position] ^= 0x10
            storage.put(key, raw)
            found = check_object(storage, key, each, len(raw), BufferPool(100))
            assert len(found) == 1, position
        storage.put(key, whole)


def test_the_index_alone_tells_a_cut_and_a_longer_object() -> None:
    storage, metadata = MemoryStorage(), ArrayMetadata(GRIDS[3], "uint8", CODECS[1])
    put_all(storage, metadata, np.arange(22, dtype=np.uint8))
    each = next(objects_of("a", metadata))
    key = f"{REF.path}/{each.key}"
    whole = storage.get(key)
    assert check_tail(storage, key, each, len(whole)) == []
    for raw in (whole[:-1], whole[1:], whole[:20], b"", whole + b"x", b"x" + whole):
        storage.put(key, raw)
        assert len(check_tail(storage, key, each, len(raw))) == 1


def test_what_holds_no_bytes() -> None:
    metadata = ArrayMetadata(GRIDS[1], "int16")
    with pytest.raises(CorruptError, match="a should hold bytes, but is a int16"):
        catalog.read_bytes(MemoryStorage(), REF, "a", metadata)
