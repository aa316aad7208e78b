"""Rows of per-rank documents."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucpstore.errors import CorruptError
from ucpstore.format.per_rank import (
    alone_path,
    from_row,
    layout_of,
    packed_path,
    to_row,
)


@pytest.mark.parametrize(
    ("lengths", "row_bytes", "alone"),
    [
        ([0], 64, ()),
        ([60, 3], 64, ()),
        ([61, 3], 128, ()),
        ([5056, 5056], 8192, ()),
        ([65532, 65533, 10], 65536, (1,)),
        ([70000, 80000], 0, (0, 1)),
    ],
)
def test_layouts(lengths, row_bytes, alone):
    found = layout_of(lengths)
    assert (found.count, found.row_bytes, found.alone) == (len(lengths), row_bytes, alone)


def test_rows_have_their_length_in_front():
    assert to_row(b"abc", 8) == b"\x03\0\0\0abc\0"
    assert to_row(b"x" * 70000, 8) == b"\xff\xff\xff\xff\0\0\0\0"
    assert packed_path("rng") == "rng/packed"
    assert alone_path("rng", 3) == "rng/3"


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=5))
def test_documents_come_back(documents):
    row_bytes = layout_of([len(data) for data in documents]).row_bytes
    for data in documents:
        row = to_row(data, row_bytes)
        assert len(row) == row_bytes
        assert from_row(row, "k") == data


def test_lone_documents_and_damage():
    assert from_row(to_row(b"x" * 70000, 64), "k") is None
    with pytest.raises(CorruptError, match="k: a document of 61 bytes cannot lie in a row of 64"):
        from_row(b"\x3d\0\0\0" + bytes(60), "k")
