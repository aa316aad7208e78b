"""The documents inside a step's folder: its group with the tree, and its items."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from ucpstore.errors import CorruptError, FormatError, UnsupportedError
from ucpstore.format.documents import (
    PLAIN,
    TOMBSTONE,
    Json,
    attributes_of,
    canonical,
    expect,
    group,
    members,
    parse,
)

ArrayDocuments = Mapping[str, bytes]
"""Paths of arrays and their `zarr.json`, in canonical form."""

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
    mine = {
        "kind": b'"step"',
        "tree": canonical(tree),
        "root_arrays": members(_sorted(root_arrays)),
    }
    return group(members({"ucpstore": members(mine)}))


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
    nodes = dict(arrays)
    for path in groups_of(arrays):
        if path in nodes:
            raise CorruptError(f"array {path} would lie above other arrays of its item")
        nodes[path] = PLAIN
    # zarr-python up to 3.1.6 drops children of a group that do not follow each other here.
    raw = group(canonical({"ucpstore": {"kind": "item"}}), _sorted(nodes))
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


def _sorted(documents: ArrayDocuments) -> dict[str, bytes]:
    return {path: documents[path] for path in sorted(documents)}


def _array_documents(value: Json, key: str) -> dict[str, dict[str, Json]]:
    found: dict[str, Json] = expect(value, dict, f"the arrays of {key}")
    return {path: expect(entry, dict, f"{path} in {key}") for path, entry in found.items()}
