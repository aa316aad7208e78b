"""A step's documents for a load: read, checked and parsed by rank 0, which hands on their gist."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ucpstore import catalog
from ucpstore.arrays.metadata import Alike, ArrayMetadata, group_alike, parse
from ucpstore.catalog import StepRef
from ucpstore.describe import ArrayInfo
from ucpstore.errors import CorruptError, FormatError
from ucpstore.format import layout
from ucpstore.format.documents import canonical
from ucpstore.format.paths import segment_of
from ucpstore.format.record import CommitRecord
from ucpstore.options import Options
from ucpstore.storage import Storage
from ucpstore.tree import Node, inline
from ucpstore.tree.decode import decode
from ucpstore.tree.documents import FOLDER
from ucpstore.tree.encode import encode
from ucpstore.tree.nodes import pairs_of


def item_name(key: object) -> str:
    """A text for a top-level key of a state, by which ranks ask for items."""
    return canonical(encode(key)).decode()


@dataclass(frozen=True, slots=True)
class Opened:
    """A committed step, and of the items that were asked for what their documents say.

    `tree` has the large leaves of those items in their places.
    """

    ref: StepRef
    tree: Node
    arrays: Mapping[str, ArrayMetadata]
    infos: Mapping[str, ArrayInfo]


def read_step(
    storage: Storage, ref: StepRef, items: Collection[str], options: Options
) -> tuple[bytes, int]:
    """Read and check what a load of `items` needs: what to hand on, and bytes of documents."""
    step = catalog.read_step_group(storage, ref)
    entries = catalog.item_entries(
        ref, {path for name, path, _ in _items(step.tree) if name in items}
    )
    arrays = {
        **step.root_arrays,
        **catalog.read_items(storage, ref, entries, threads=options.threads or storage.requests),
    }
    tree = step.tree
    if any(FOLDER in path for path in arrays):

        def fetch(path: str) -> bytes:
            if path not in arrays:
                raise CorruptError(
                    f"{path}: the tree names a document whose array the metadata does not have"
                )
            return catalog.read_bytes(storage, ref, path, parse(arrays[path], path))

        tree = _inlined(tree, items, fetch)
    read = (ref.record.document(layout.DOCUMENT), *entries.values())
    size = len(ref.raw) + sum(entry.bytes for entry in read)
    return _pack(ref, tree, group_alike(arrays)), size


def open_handed(data: bytes) -> Opened:
    """Parse what rank 0 handed on."""
    handed = json.loads(data)
    raw = handed["record"].encode("latin-1")
    record = CommitRecord.from_bytes(raw, "the commit record handed on by rank 0")
    arrays: dict[str, ArrayMetadata] = {}
    infos: dict[str, ArrayInfo] = {}
    for document, paths in handed["arrays"]:
        metadata = parse(document, paths[0])
        arrays |= dict.fromkeys(paths, metadata)
        infos |= dict.fromkeys(paths, ArrayInfo(metadata.grid.shape, metadata.dtype))
    return Opened(StepRef(record, raw), handed["tree"], arrays, infos)


def _pack(ref: StepRef, tree: Node, arrays: Sequence[Alike]) -> bytes:
    """The record as it is stored, the tree, and a document for all arrays alike.

    Ranks need less than what is stored, in which nearly all that arrays have is the same.
    """
    return canonical(
        {
            "record": ref.raw.decode("latin-1"),
            "tree": tree,
            "arrays": [(each.document, each.paths) for each in arrays],
        }
    )


def _items(tree: Node) -> list[tuple[str, str, Node]]:
    """Name, path and node of every item."""
    pairs = pairs_of(tree)
    keys = dict.fromkeys(decode(key) for key, _ in pairs)
    if len(keys) != len(pairs):
        raise FormatError(
            "the tree of the step has two items of one name; it was written by something else"
        )
    return [
        (canonical(key_node).decode(), segment_of(key, keys), node)
        for key, (key_node, node) in zip(keys, pairs, strict=True)
    ]


def _inlined(tree: Node, items: Collection[str], fetch: Callable[[str], bytes]) -> Node:
    """The tree, the large leaves of the asked items put in their places."""
    return {
        "dict": [
            [json.loads(name), inline(node, fetch) if name in items else node]
            for name, _, node in _items(tree)
        ]
    }
