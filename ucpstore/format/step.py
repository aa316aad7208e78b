"""The documents inside a step's folder: its group with the tree, and its items."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from ucpstore.errors import CorruptError, FormatError, UnsupportedError
from ucpstore.format.documents import (
    TOMBSTONE,
    Json,
    attributes_of,
    expect,
    group,
    marked,
    parse,
)

ArrayDocuments = Mapping[str, Mapping[str, object]]
"""Paths of arrays and the contents of their `zarr.json`."""

MAX_ITEM_BYTES: Final = 128 * 1024 * 1024
"""Largest document of an item, about 250,000 arrays."""


@dataclass(frozen=True, slots=True)
class StepDocument:
    """What the step group holds: the tree of the state, and the arrays that lie in no item.

    `root_arrays` maps the path below the step of every array that is a top-level leaf of the
    state, or holds a large leaf of the tree, to its metadata.
    """

    tree: Json
    root_arrays: Mapping[str, dict[str, Json]]


def build_step(tree: Json, root_arrays: ArrayDocuments) -> bytes:
    """The `zarr.json` of a step group."""
    return marked("step", tree=tree, root_arrays=_sorted(root_arrays))


def parse_step(raw: bytes, key: str) -> StepDocument:
    """What a step group holds; CorruptError, naming `key`, for a tombstone or anything else."""
    if raw == TOMBSTONE:
        raise CorruptError(
            f"{key} is a tombstone: the save was given up and removed, yet its step is committed; "
            "use another step"
        )
    attributes = attributes_of(parse(raw, key), key, "step")
    if not attributes.keys() >= {"tree", "root_arrays"}:
        raise FormatError(f"{key} has no tree and root_arrays; it was not written by ucpstore")
    return StepDocument(attributes["tree"], _array_documents(attributes["root_arrays"], key))


def build_item(arrays: ArrayDocuments) -> bytes:
    """The `zarr.json` of an item: a group with the metadata of all `arrays` below it.

    Paths are relative to the item. Raises UnsupportedError where the document would be larger than
    `MAX_ITEM_BYTES`; the caller puts the item's name in front.
    """
    nodes: dict[str, Mapping[str, object]] = dict(arrays)
    plain: Mapping[str, object] = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    for path in groups_of(arrays):
        if path in nodes:
            raise CorruptError(f"array {path} would lie above other arrays of its item")
        nodes[path] = plain
    # zarr-python up to 3.1.6 drops children of a group that do not follow each other here.
    raw = group({"ucpstore": {"kind": "item"}}, _sorted(nodes))
    if len(raw) > MAX_ITEM_BYTES:
        raise UnsupportedError(
            f"{len(arrays)} arrays need {len(raw)} bytes of metadata, but an item can have at most "
            f"{MAX_ITEM_BYTES}; stack tensors of the same shape (experts, layers) into one tensor, "
            "or save them as several items"
        )
    return raw


def parse_item(raw: bytes, key: str) -> dict[str, dict[str, Json]]:
    """The metadata of an item's arrays by their path below the item."""
    document = parse(raw, key)
    attributes_of(document, key, "item")
    consolidated: dict[str, Json] = expect(
        document.get("consolidated_metadata"), dict, f"consolidated_metadata of {key}"
    )
    return {
        path: metadata
        for path, metadata in _array_documents(consolidated.get("metadata"), key).items()
        if metadata.get("node_type") == "array"
    }


def groups_of(arrays: Iterable[str]) -> tuple[str, ...]:
    """Paths of the groups above these arrays, sorted; each is stored as a plain group."""
    folders: set[str] = set()
    for path in arrays:
        end = path.find("/")
        while end != -1:
            folders.add(path[:end])
            end = path.find("/", end + 1)
    return tuple(sorted(folders))


def _sorted(documents: ArrayDocuments) -> dict[str, Mapping[str, object]]:
    return {path: documents[path] for path in sorted(documents)}


def _array_documents(value: Json, key: str) -> dict[str, dict[str, Json]]:
    found: dict[str, Json] = expect(value, dict, f"the arrays of {key}")
    return {path: expect(entry, dict, f"{path} in {key}") for path, entry in found.items()}
