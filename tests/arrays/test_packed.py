"""The bytes of an object: order, padding, checksums and index, and every damage found."""

from __future__ import annotations

import itertools
import math

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucpstore import dtypes
from ucpstore.arrays.packed import (
    ObjectEncoder,
    check_index,
    chunk_extent,
    decode_chunk,
    expected_index,
    slot_bytes,
)
from ucpstore.arrays.raw import RawArray, part, raw_dtype
from ucpstore.errors import CorruptError
from ucpstore.geometry.box import Box, Index
from ucpstore.geometry.grid import Grid

# 5 x 7 in objects of 4 x 6 and chunks of 2 x 3: the last object holds one chunk of four, 1 x 1.
EDGES = Grid((5, 7), (2, 3), (4, 6), True)


def _values(shape: Index, name: str, seed: int = 0) -> RawArray:
    size = dtypes.itemsize(name)
    raw = np.random.default_rng(seed).integers(0, 256, math.prod(shape) * size, dtype=np.uint8)
    return raw.view(raw_dtype(size)).reshape(shape)


def _encode(grid: Grid, index: Index, name: str, values: RawArray) -> bytes:
    dirty = np.full(grid.object_bytes(index, dtypes.itemsize(name)) + 3, 0xA5, dtype=np.uint8)
    encoder = ObjectEncoder(dirty, grid, index, name)
    box = grid.object_box(index)
    encoder.fill(box, part(values, box))
    return bytes(encoder.finish())


def _crc(data: bytes) -> bytes:
    return int(google_crc32c.value(data)).to_bytes(4, "little")


def test_a_plain_object_is_the_values_and_their_checksum() -> None:
    grid = Grid((2, 2), (2, 2), (2, 2), False)
    values = np.array([[1.0, 2.0], [3.0, 4.0]], dtype="<f4").view("<u4")
    data = values.tobytes()
    assert _encode(grid, (0, 0), "float32", values) == data + _crc(data)
    assert google_crc32c.value(b"123456789") == 0xE3069283  # the check value of Castagnoli's crc


def test_a_scalar_is_one_element_and_its_checksum() -> None:
    values = np.array(7, dtype="<u8")
    data = bytes([7, 0, 0, 0, 0, 0, 0, 0])
    assert _encode(Grid((), (), (), False), (), "int64", values) == data + _crc(data)


def test_edge_chunks_are_padded_and_outer_chunks_left_out() -> None:
    values = np.arange(35, dtype="<u2").reshape(5, 7)
    nan = b"\xc0\x7f"
    data = b"\x22\x00" + 5 * nan  # element (4, 6) is 34
    left_out = 16 * b"\xff"
    index = (0).to_bytes(8, "little") + (16).to_bytes(8, "little") + 3 * left_out
    expected = data + _crc(data) + index + _crc(index)
    assert _encode(EDGES, (1, 1), "bfloat16", values) == expected


def test_offsets_and_index_follow_from_the_grid() -> None:
    assert slot_bytes(EDGES, 4) == 2 * 3 * 4 + 4
    assert chunk_extent(EDGES, 3, 4).offset == 84
    for index in EDGES.object_indices():
        tail = expected_index(EDGES, index, 4)
        entries = np.frombuffer(tail[:-4], dtype="<u8").reshape(-1, 2).tolist()
        stored = {EDGES.chunk_slot(index, n): n for n in range(len(EDGES.chunks(index)))}
        for slot, entry in enumerate(entries):
            outside = [2**64 - 1, 2**64 - 1]
            assert entry == ([28 * stored[slot], 28] if slot in stored else outside)
        assert tail[-4:] == _crc(tail[:-4])
    assert expected_index(Grid((2,), (2,), (2,), False), (0,), 4) == b""


@st.composite
def _cases(draw: st.DrawFn) -> tuple[Grid, str, int]:
    rank = draw(st.integers(0, 3))
    chunk = tuple(draw(st.integers(1, 4)) for _ in range(rank))
    sharded = draw(st.booleans())
    factor = tuple(draw(st.integers(1, 3)) if sharded else 1 for _ in range(rank))
    shape = tuple(draw(st.integers(0, 9)) for _ in range(rank))
    whole = tuple(c * f for c, f in zip(chunk, factor, strict=True))
    name = draw(st.sampled_from(["bool", "bfloat16", "float32", "int64", "complex128"]))
    return Grid(shape, chunk, whole, sharded), name, draw(st.integers(0, 2**16))


@settings(deadline=None)
@given(_cases(), st.data())
def test_parts_in_any_order_decode_to_the_same_array(
    case: tuple[Grid, str, int], data: st.DataObject
) -> None:
    grid, name, seed = case
    size = dtypes.itemsize(name)
    values = _values(grid.shape, name, seed)
    restored = np.zeros_like(values)
    for index in grid.object_indices():
        box = grid.object_box(index)
        buffer = np.full(grid.object_bytes(index, size), 0xA5, dtype=np.uint8)
        encoder = ObjectEncoder(buffer, grid, index, name)
        for region in data.draw(st.permutations(_parts(data, box))):
            encoder.fill(region, part(values, region))
        stored = encoder.finish()
        assert len(stored) == grid.object_bytes(index, size)
        assert bytes(stored) == _encode(grid, index, name, values)
        fill = np.frombuffer(dtypes.fill_bytes(name), dtype=values.dtype)[0]
        chunks = grid.chunks(index)
        for number, chunk in enumerate(chunks):
            start = chunk_extent(grid, number, size).offset
            piece = stored[start : start + slot_bytes(grid, size)]
            decoded = decode_chunk(piece, grid, name, "w/c.0", number)
            inside = Box.whole(chunk.shape).slices()
            restored[chunk.slices()] = decoded[inside]
            padding = np.ones(grid.chunk, dtype=bool)
            padding[inside] = False
            assert all(item == fill for item in decoded[padding])
        tail = bytes(stored[len(chunks) * slot_bytes(grid, size) :])
        check_index(tail, grid, index, size, "w/c.0")
    assert restored.tobytes() == values.tobytes()


def _parts(data: st.DataObject, box: Box) -> list[Box]:
    """The box cut at one drawn place along every dimension."""
    spans = []
    for start, stop in zip(box.offset, box.stop, strict=True):
        cut = data.draw(st.integers(start, stop))
        spans.append([(start, cut), (cut, stop)])
    return [
        Box(tuple(a for a, _ in combination), tuple(b - a for a, b in combination))
        for combination in itertools.product(*spans)
    ]


def test_transposed_and_expanded_memory_is_stored_in_row_major_order() -> None:
    grid = Grid((300, 200), (150, 100), (300, 200), True)
    rows = _values((300, 200), "float32")
    columns = np.asfortranarray(rows)
    assert _encode(grid, (0, 0), "float32", columns) == _encode(grid, (0, 0), "float32", rows)
    same = np.broadcast_to(rows[0], (300, 200))
    assert _encode(grid, (0, 0), "float32", same) == _encode(grid, (0, 0), "float32", same.copy())


def test_typed_values_keep_their_bits() -> None:
    grid = Grid((4,), (4,), (4,), False)
    bits = np.array([0x7FA00001, 0xFFC12345, 0x80000000, 0x7FC00000], dtype="<u4")
    assert _encode(grid, (0,), "float32", bits.view("<f4"))[:16] == bits.tobytes()


@pytest.mark.parametrize("index", [(0, 0), (1, 1)])
def test_every_single_bit_flip_is_found(index: Index) -> None:
    values = _values(EDGES.shape, "float32")
    good = _encode(EDGES, index, "float32", values)
    slot = slot_bytes(EDGES, 4)
    count = len(EDGES.chunks(index))
    for bit in range(8 * len(good)):
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        number = bit // 8 // slot
        if number < count:
            piece = bytes(damaged[number * slot : (number + 1) * slot])
            with pytest.raises(CorruptError, match=rf"^w/c\.1\.1: chunk {number} is damaged"):
                decode_chunk(piece, EDGES, "float32", "w/c.1.1", number)
        else:
            with pytest.raises(CorruptError, match=r"^w/c\.1\.1: index is damaged"):
                check_index(bytes(damaged[count * slot :]), EDGES, index, 4, "w/c.1.1")


def test_a_sound_index_of_another_layout_is_found() -> None:
    tail = expected_index(EDGES, (0, 0), 4)
    with pytest.raises(CorruptError, match="entry 1 should be no chunk, found 28 bytes at 28"):
        check_index(tail, EDGES, (1, 1), 4, "w/c.1.1")
    with pytest.raises(CorruptError, match="68 bytes should follow the last chunk, found 67"):
        check_index(tail[:-1], EDGES, (0, 0), 4, "w/c.0.0")


def test_a_chunk_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(CorruptError, match="chunk 2 should have 28 bytes, found 27"):
        decode_chunk(bytes(27), EDGES, "float32", "w/c.0.0", 2)


def test_missing_and_doubled_parts_are_refused() -> None:
    values = _values(EDGES.shape, "float32")
    buffer = np.zeros(EDGES.object_bytes((0, 0), 4), dtype=np.uint8)
    encoder = ObjectEncoder(buffer, EDGES, (0, 0), "float32")
    region = Box((0, 0), (4, 5))
    encoder.fill(region, values[region.slices()])
    with pytest.raises(RuntimeError, match=r"chunk 1 at \(0, 3\) needs its 6 .* but 4 were given"):
        encoder.finish()
    encoder.fill(region, values[region.slices()])
    with pytest.raises(RuntimeError, match="but 12 were given"):
        encoder.finish()


def test_parts_outside_of_the_object_are_refused() -> None:
    buffer = np.zeros(EDGES.object_bytes((0, 0), 4), dtype=np.uint8)
    encoder = ObjectEncoder(buffer, EDGES, (0, 0), "float32")
    with pytest.raises(ValueError, match="not within"):
        encoder.fill(Box((0, 3), (1, 4)), np.zeros((1, 4), "<u4"))
    with pytest.raises(ValueError, match="values of its shape"):
        encoder.fill(Box((0, 3), (1, 3)), np.zeros((3,), "<u4"))
    with pytest.raises(ValueError, match="needs 180 bytes, but the buffer has 179"):
        ObjectEncoder(buffer[:-1], EDGES, (0, 0), "float32")
