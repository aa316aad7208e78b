"""An array's document: what it says, what zarr-python makes of it, and what is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tensorstore
import zarr
from hypothesis import given
from hypothesis import strategies as st

import ucpstore.arrays.zdtypes  # noqa: F401  # registers bfloat16 and float8 with zarr
from ucpstore import dtypes
from ucpstore.arrays.metadata import (
    ArrayMetadata,
    DocumentEncoder,
    array_document,
    dtype_of,
    grid_of,
    group_alike,
    parse,
    to_bytes,
)
from ucpstore.errors import FormatError
from ucpstore.geometry.grid import Grid

SHARDED = Grid((5, 7), (2, 3), (4, 6), True)
PLAIN = Grid((5, 7), (5, 7), (5, 7), False)
SCALAR = Grid((), (), (), False)
EMPTY = Grid((0, 3), (1, 3), (1, 3), False)

Change = Callable[[dict[str, object]], object]


def test_bytes_of_a_plain_array() -> None:
    assert to_bytes(array_document(PLAIN, "float32", ("w:0", "w:1"))) == (
        b'{"zarr_format":3,"node_type":"array","shape":[5,7],"data_type":"float32",'
        b'"chunk_grid":{"name":"regular","configuration":{"chunk_shape":[5,7]}},'
        b'"chunk_key_encoding":{"name":"default","configuration":{"separator":"."}},'
        b'"fill_value":"NaN",'
        b'"codecs":[{"name":"bytes","configuration":{"endian":"little"}},{"name":"crc32c"}],'
        b'"dimension_names":["w:0","w:1"]}'
    )


def test_codecs_of_a_sharded_array() -> None:
    document = array_document(SHARDED, "bool", ("w:0", "w:1"))
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    assert document["chunk_grid"] == {"name": "regular", "configuration": {"chunk_shape": [4, 6]}}
    assert document["codecs"] == [
        {
            "name": "sharding_indexed",
            "configuration": {
                "chunk_shape": [2, 3],
                "codecs": [{"name": "bytes"}, {"name": "crc32c"}],
                "index_codecs": [little, {"name": "crc32c"}],
                "index_location": "end",
            },
        }
    ]


@pytest.mark.parametrize("name", dtypes.NAMES)
@pytest.mark.parametrize("grid", [SHARDED, PLAIN, SCALAR, EMPTY])
def test_zarr_and_tensorstore_read_the_same_metadata(tmp_path: Path, grid: Grid, name: str) -> None:
    document = array_document(grid, name, ("a", "b")[: len(grid.shape)])
    (tmp_path / "zarr.json").write_bytes(to_bytes(document))
    read = zarr.open_array(tmp_path, mode="r").metadata.to_dict()
    written = json.loads(json.dumps(read, default=lambda value: value.to_dict()))
    assert {key: written[key] for key in document} == document
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(tmp_path)}}
    opened = tensorstore.open(spec, read=True).result()
    assert opened.shape == grid.shape
    if grid.shape:
        assert opened.chunk_layout.read_chunk.shape == grid.chunk
        assert opened.chunk_layout.write_chunk.shape == grid.object


@st.composite
def _grids(draw: st.DrawFn) -> Grid:
    rank = draw(st.integers(0, 4))

    def extents(least: int, most: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(least, most), min_size=rank, max_size=rank)))

    chunk, factor = extents(1, 9), extents(1, 3)
    sharded = draw(st.booleans())
    whole = tuple(c * f for c, f in zip(chunk, factor, strict=True)) if sharded else chunk
    return Grid(extents(0, 40), chunk, whole, sharded)


@given(_grids(), st.sampled_from(dtypes.NAMES))
def test_parse_is_the_inverse(grid: Grid, name: str) -> None:
    names = tuple(f"x:{dim}" for dim in range(len(grid.shape)))
    document = json.loads(to_bytes(array_document(grid, name, names)))
    assert parse(document) == ArrayMetadata(grid, name)
    assert grid_of(document) == grid
    assert dtype_of(document) == name


@given(st.lists(st.tuples(_grids(), st.sampled_from(dtypes.NAMES)), max_size=4))
def test_many_are_encoded_like_each_alone(arrays: list[tuple[Grid, str]]) -> None:
    encoder = DocumentEncoder()
    for number, (grid, dtype) in enumerate(2 * arrays):
        for codec in (None, '{"name":"zstd","configuration":{"level":3}}'):
            names = [f"{number}\u00e9:{dim}" for dim in range(len(grid.shape))]
            alone = to_bytes(array_document(grid, dtype, names, codec))
            assert encoder.encode(grid, dtype, names, codec) == alone


def test_the_encoder_wants_a_name_for_each_dimension() -> None:
    encoder = DocumentEncoder()
    encoder.encode(PLAIN, "int8", ["a", "b"])
    with pytest.raises(ValueError, match="as many dimension names"):
        encoder.encode(PLAIN, "int8", ["a"])


def test_many_are_parsed_like_each_alone() -> None:
    documents = {
        f"model/{number}": json.loads(to_bytes(array_document(grid, dtype, (f"{number}:0", "b"))))
        for number, (grid, dtype) in enumerate(
            [(SHARDED, "float32"), (PLAIN, "int8"), (SHARDED, "float32"), (SHARDED, "bfloat16")]
        )
    }
    documents["model/2"]["attributes"] = {"note": 1}
    found = group_alike(documents)
    assert {path: each.metadata for each in found for path in each.paths} == {
        path: parse(document) for path, document in documents.items()
    }
    assert [each.paths for each in found] == [["model/0"], ["model/1"], ["model/2"], ["model/3"]]
    del documents["model/2"]["attributes"]
    assert group_alike(documents)[0].paths == ["model/0", "model/2"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(shape=[5, True]), "shape should be"),
        (lambda d: d.update(zarr_format=3.0), "zarr_format"),
        (lambda d: d.update(dimension_names=["a"]), "dimension_names"),
        (lambda d: d.update(dimension_names="ab"), "dimension_names"),
        (lambda d: d.pop("dimension_names"), "dimension_names"),
    ],
)
def test_one_that_python_finds_equal_to_another_is_refused(change: Change, message: str) -> None:
    sound = json.loads(to_bytes(array_document(Grid((5, 1), (5, 1), (5, 1), False), "int8", "ab")))
    other = copy.deepcopy(sound)
    change(other)
    with pytest.raises(FormatError, match=rf"model/other: .*{message}"):
        group_alike({"model/sound": sound, "model/other": other})


def test_what_tools_add_is_allowed() -> None:
    document = array_document(PLAIN, "int8", ("a", "b"))
    added: dict[str, object] = {
        "attributes": {"note": 1},
        "storage_transformers": [],
        "hint": {"must_understand": False},
    }
    assert grid_of({**document, **added}) == PLAIN


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: d["codecs"].insert(0, {"name": "transpose", "configuration": {}}),
            r"codecs are \['transpose', 'bytes', 'crc32c'\]",
        ),
        (
            lambda d: d["codecs"].__setitem__(slice(1, 1), [{"name": "zstd"}, {"name": "gzip"}]),
            r"codecs are \['bytes', 'zstd', 'gzip', 'crc32c'\]",
        ),
        (lambda d: d["codecs"].insert(1, {"name": 3}), "codecs are"),
        (lambda d: d["codecs"].pop(), r"codecs are \['bytes'\]"),
        (lambda d: d["codecs"][0].update(configuration={"endian": "big"}), "'big'"),
        (lambda d: d.update(codecs="bytes"), "codecs are"),
        (lambda d: d.pop("codecs"), "codecs are"),
        (lambda d: d.update(data_type="string"), "data_type 'string' is not known"),
        (lambda d: d.update(data_type={"name": "r16"}), "data_type"),
        (lambda d: d.update(shape=[5, -7]), "shape should be"),
        (lambda d: d.update(shape=[5, True]), "shape should be"),
        (lambda d: d.update(shape=[5]), "in shape"),
        (lambda d: d["chunk_grid"].update(name="rectilinear"), "regular"),
        (lambda d: d["chunk_grid"]["configuration"].update(chunk_shape=[5, 0]), "chunk_grid"),
        (lambda d: d["chunk_key_encoding"]["configuration"].update(separator="/"), "separator"),
        (lambda d: d.update(fill_value=0.0), "fill_value should be 'NaN', found 0.0"),
        (lambda d: d.update(zarr_format=3.0), "zarr_format"),
        (lambda d: d.update(node_type="group"), "node_type"),
        (lambda d: d.pop("dimension_names"), "dimension_names"),
        (lambda d: d.update(storage_transformers=[{"name": "x"}]), "storage_transformers"),
        (lambda d: d.update(extension={"name": "x"}), "extension"),
    ],
)
def test_foreign_arrays_are_refused_by_name(change: Change, message: str) -> None:
    document = copy.deepcopy(array_document(PLAIN, "float32", ("a", "b")))
    change(document)
    with pytest.raises(FormatError, match=message) as raised:
        grid_of(document, "model/w")
    assert str(raised.value).startswith("model/w: ")


@pytest.mark.parametrize(
    "change",
    [
        {"chunk_shape": [3, 3]},
        {"index_location": "start"},
        {"codecs": [{"name": "bytes", "configuration": {"endian": "little"}}]},
        {"index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}]},
    ],
)
def test_foreign_shards_are_refused(change: dict[str, object]) -> None:
    document = json.loads(to_bytes(array_document(SHARDED, "float32", ("a", "b"))))
    document["codecs"][0]["configuration"].update(change)
    with pytest.raises(FormatError):
        grid_of(document)


def test_dimension_names_must_be_as_many_as_dimensions() -> None:
    with pytest.raises(ValueError, match="dimension names"):
        array_document(PLAIN, "float32", ("a",))
