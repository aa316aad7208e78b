"""Step, item and node documents; what zarr-python makes of an item."""

import json

import pytest
import zarr
import zarr.storage

from ucpstore.errors import CorruptError, FormatError, UnsupportedError
from ucpstore.format import step
from ucpstore.format.documents import PLAIN, TOMBSTONE, canonical
from ucpstore.format.step import (
    StepDocument,
    build_item,
    build_step,
    groups_of,
    parse_item,
    parse_step,
)

ARRAY = {
    "zarr_format": 3,
    "node_type": "array",
    "shape": [4],
    "data_type": "int32",
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4]}},
    "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
    "fill_value": 0,
    "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    "attributes": {},
}
RAW = canonical(ARRAY)
PATHS = ["w", "a/x", "a.b/x", "a-b", "a/y", "exp_avg/layers.0", "exp_avg/layers.1", "a/d/z", "B"]


def test_step_documents_come_back():
    tree = {"dict": [["step", 1], ["w", {"array": "w"}]]}
    raw = build_step(tree, {"w": RAW})
    assert parse_step(raw, "k") == StepDocument(tree, {"w": ARRAY})
    assert json.loads(raw)["attributes"]["ucpstore"]["tree"] == tree


def test_a_tombstone_is_no_step():
    with pytest.raises(CorruptError, match="is a tombstone"):
        parse_step(TOMBSTONE, "k")
    with pytest.raises(CorruptError, match="should be a step document"):
        parse_step(PLAIN, "k")


def test_item_documents_come_back_sorted_with_their_groups():
    raw = build_item(dict.fromkeys(PATHS, RAW))
    assert parse_item(raw, "k") == dict.fromkeys(PATHS, ARRAY)
    listed = list(json.loads(raw)["consolidated_metadata"]["metadata"])
    assert listed == sorted([*PATHS, "a", "a.b", "a/d", "exp_avg"])
    assert build_item(dict.fromkeys(reversed(PATHS), RAW)) == raw
    assert groups_of(PATHS) == ("a", "a.b", "a/d", "exp_avg")


def test_zarr_sees_every_array_of_an_item(tmp_path):
    (tmp_path / "zarr.json").write_bytes(build_item(dict.fromkeys(PATHS, RAW)))
    group = zarr.open_consolidated(zarr.storage.LocalStore(tmp_path))
    found = [path for path, node in group.members(max_depth=None) if isinstance(node, zarr.Array)]
    assert sorted(found) == sorted(PATHS)


def test_zarr_sees_the_same_without_consolidated_metadata(tmp_path):
    (tmp_path / "zarr.json").write_bytes(build_item(dict.fromkeys(PATHS, RAW)))
    for path in groups_of(PATHS):
        (tmp_path / path).mkdir()
        (tmp_path / path / "zarr.json").write_bytes(PLAIN)
    for path in PATHS:
        (tmp_path / path).mkdir()
        (tmp_path / path / "zarr.json").write_bytes(RAW)
    group = zarr.open_group(tmp_path, mode="r", use_consolidated=False)
    found = [path for path, node in group.members(max_depth=None) if isinstance(node, zarr.Array)]
    assert sorted(found) == sorted(PATHS)


def test_too_many_arrays_are_refused_with_advice(monkeypatch):
    monkeypatch.setattr(step, "MAX_ITEM_BYTES", 1000)
    with pytest.raises(UnsupportedError, match=r"9 arrays need .* stack tensors"):
        build_item(dict.fromkeys(PATHS, RAW))


def test_an_array_above_others_is_refused():
    with pytest.raises(CorruptError, match="array a would lie above"):
        build_item({"a": RAW, "a/b": RAW})


def test_an_item_of_something_else_is_refused():
    with pytest.raises(CorruptError, match="should be a item document"):
        parse_item(PLAIN, "k")
    other = json.dumps(
        {"zarr_format": 3, "node_type": "group", "attributes": {"ucpstore": {"kind": "item"}}}
    )
    with pytest.raises(FormatError, match="consolidated_metadata of k"):
        parse_item(other.encode(), "k")
