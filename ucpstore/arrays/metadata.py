"""The `zarr.json` of an array, written and read without zarr, and the grid that it states.

Two forms exist. A plain array is one chunk per object, codecs `bytes` and `crc32c`. Any other has
`sharding_indexed`: the object is the outer chunk, its chunks have the same two codecs, and the
index at the object's end has them too. In both a compressor may stand between the two.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ucpstore import dtypes
from ucpstore.errors import FormatError
from ucpstore.format.documents import canonical
from ucpstore.geometry.box import Index
from ucpstore.geometry.grid import Grid

_SHARDING = "sharding_indexed"


@dataclass(frozen=True, slots=True)
class ArrayMetadata:
    """What an array's `zarr.json` says of its values; `codec` is the compressor as JSON text."""

    grid: Grid
    dtype: str
    codec: str | None = None


def array_document(
    grid: Grid, dtype: str, dimension_names: Sequence[str | None], codec: str | None = None
) -> dict[str, object]:
    """The content of the `zarr.json` of an array; keys in the order in which they are written.

    `codec` is a compressor with its whole configuration, as JSON text.
    """
    if len(dimension_names) != len(grid.shape):
        raise ValueError(
            f"an array of shape {grid.shape} needs as many dimension names, got {dimension_names}"
        )
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(grid.shape),
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(grid.object)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": dtypes.fill_value(dtype),
        "codecs": _codecs(grid, dtype, codec),
        "dimension_names": list(dimension_names),
    }


def to_bytes(document: Mapping[str, object]) -> bytes:
    """The stored bytes of a document: equal for equal documents."""
    return canonical(document)


class DocumentEncoder:
    """The stored bytes of the documents of many arrays; what arrays have alike is encoded once."""

    def __init__(self) -> None:
        self._heads: dict[tuple[Grid, str, str | None], bytes] = {}

    def encode(
        self,
        grid: Grid,
        dtype: str,
        dimension_names: Sequence[str | None],
        codec: str | None = None,
    ) -> bytes:
        """The bytes of one document: those of `to_bytes` of `array_document`."""
        head = self._heads.get((grid, dtype, codec))
        if head is None or len(dimension_names) != len(grid.shape):
            whole = to_bytes(array_document(grid, dtype, dimension_names, codec))
            names = canonical(list(dimension_names))  # the last entry
            head = self._heads[grid, dtype, codec] = whole.removesuffix(names + b"}")
        return head + canonical(list(dimension_names)) + b"}"


def parse(document: Mapping[str, object], path: str = "zarr.json") -> ArrayMetadata:
    """What a document says; the exact inverse of `array_document`.

    `attributes` and empty `storage_transformers`, which tools may add, are allowed. Raises
    FormatError, naming `path`, for every array that is not stored in one of the two forms.
    """
    dtype = document.get("data_type")
    if not isinstance(dtype, str) or dtype not in dtypes.NAMES:
        raise FormatError(
            f"{path}: data_type {dtype!r} is not known; known are {', '.join(dtypes.NAMES)}. "
            "Read the array with zarr-python, or upgrade ucpstore"
        )
    shape = _extents(document.get("shape"), 0, path, "shape")
    shard = _configuration(document.get("chunk_grid"), "regular", path, "chunk_grid")
    whole = _extents(shard.get("chunk_shape"), 1, path, "chunk_grid")
    chunk = whole
    codecs = document.get("codecs")
    sharded = _codec_names(codecs)[:1] == [_SHARDING]
    if sharded and isinstance(codecs, list):
        inner = _configuration(codecs[0], _SHARDING, path, "codecs")
        chunk = _extents(inner.get("chunk_shape"), 1, path, "codecs")
    codec = _codec_of(document)
    if not len(shape) == len(whole) == len(chunk) or any(
        n % c for n, c in zip(whole, chunk, strict=True)
    ):
        raise FormatError(
            f"{path}: chunks of {chunk} should divide objects of {whole} in shape {shape}"
        )
    names = document.get("dimension_names")
    if not isinstance(names, list) or len(names) != len(shape):
        raise FormatError(f"{path}: dimension_names should be one per dimension, found {names!r}")
    grid = Grid(shape, chunk, whole, sharded)
    _compare(document, array_document(grid, dtype, names, codec), path)
    return ArrayMetadata(grid, dtype, codec)


@dataclass(frozen=True, slots=True)
class Alike:
    """Arrays whose documents differ in nothing but their dimension names: one of these, parsed."""

    document: Mapping[str, object]
    metadata: ArrayMetadata
    paths: list[str]


def group_alike(documents: Mapping[str, Mapping[str, object]]) -> list[Alike]:
    """Arrays by what their documents say, for the layers of a model repeat a few shapes.

    Each kind is parsed once. Raises as `parse` does.
    """
    found: dict[str, Alike] = {}
    for path, document in documents.items():
        # Not compared as dicts, in which 1, 1.0 and True are equal.
        form = repr({**document, "dimension_names": None})
        names, known = document.get("dimension_names"), found.get(form)
        if known and isinstance(names, list) and len(names) == len(known.metadata.grid.shape):
            known.paths.append(path)
        else:
            found[form] = Alike(document, parse(document, path), [path])
    return list(found.values())


def grid_of(document: Mapping[str, object], path: str = "zarr.json") -> Grid:
    """The grid of an array; raises as `parse` does."""
    return parse(document, path).grid


def dtype_of(document: Mapping[str, object], path: str = "zarr.json") -> str:
    """The registry name of an array's data type; raises as `parse` does."""
    return parse(document, path).dtype


def _codec_of(document: Mapping[str, object]) -> str | None:
    """The compressor of an array as JSON text: what stands between `bytes` and `crc32c`."""
    codecs = document.get("codecs")
    if _codec_names(codecs)[:1] == [_SHARDING] and isinstance(codecs, list):
        configuration = codecs[0].get("configuration")
        codecs = configuration.get("codecs") if isinstance(configuration, Mapping) else None
    middle = codecs[1] if isinstance(codecs, list) and len(codecs) == 3 else None
    if isinstance(middle, Mapping) and isinstance(middle.get("name"), str):
        return json.dumps(middle, separators=(",", ":"), sort_keys=True)
    return None


def _codecs(grid: Grid, dtype: str, codec: str | None) -> list[dict[str, object]]:
    little: dict[str, object] = {"name": "bytes", "configuration": {"endian": "little"}}
    checksum: dict[str, object] = {"name": "crc32c"}
    # Readers write no byte order for items of one byte, so equal arrays have equal documents.
    values: dict[str, object] = {"name": "bytes"} if dtypes.itemsize(dtype) == 1 else little
    chain = [values, checksum] if codec is None else [values, json.loads(codec), checksum]
    if not grid.sharded:
        return chain
    configuration = {
        "chunk_shape": list(grid.chunk),
        "codecs": chain,
        "index_codecs": [little, checksum],
        "index_location": "end",
    }
    return [{"name": _SHARDING, "configuration": configuration}]


def _compare(found: Mapping[str, object], expected: Mapping[str, object], path: str) -> None:
    for key, value in expected.items():
        if key == "codecs" and found.get(key) != value:
            raise FormatError(
                f"{path}: its codecs are {_codec_names(found.get(key))}, in full "
                f"{found.get(key)!r}; this version reads {value!r}. Read the array with "
                "zarr-python, or upgrade ucpstore"
            )
        # 1 == True and 1.0 in Python, but not in JSON.
        if found.get(key) != value or type(found.get(key)) is not type(value):
            raise FormatError(f"{path}: {key} should be {value!r}, found {found.get(key)!r}")
    for key, added in found.items():
        optional = isinstance(added, Mapping) and added.get("must_understand") is False
        harmless = key == "attributes" or (key == "storage_transformers" and not added)
        if key not in expected and not harmless and not optional:
            raise FormatError(
                f"{path}: it has {key}, which this version does not know; upgrade ucpstore"
            )


def _codec_names(codecs: object) -> list[object]:
    if not isinstance(codecs, list):
        return []
    return [codec.get("name") if isinstance(codec, Mapping) else codec for codec in codecs]


def _configuration(found: object, name: str, path: str, key: str) -> Mapping[str, object]:
    if isinstance(found, Mapping) and found.get("name") == name:
        configuration = found.get("configuration")
        if isinstance(configuration, Mapping):
            return configuration
    raise FormatError(f"{path}: {key} should be {name} with a configuration, found {found!r}")


def _extents(found: object, least: int, path: str, key: str) -> Index:
    if isinstance(found, list) and all(type(n) is int and n >= least for n in found):
        return tuple(found)
    raise FormatError(
        f"{path}: {key} should be a list of whole numbers from {least}, found {found!r}"
    )
