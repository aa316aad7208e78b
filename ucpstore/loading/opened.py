"""A step's documents for a load: read and checked by rank 0, handed on, parsed by every rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache

from ucpstore import catalog
from ucpstore.arrays.metadata import ArrayMetadata, parse, parse_all
from ucpstore.catalog import Documents, StepRef
from ucpstore.describe import ArrayInfo
from ucpstore.format import layout
from ucpstore.format.documents import canonical
from ucpstore.format.paths import segment_of
from ucpstore.format.record import CommitRecord
from ucpstore.format.step import parse_step
from ucpstore.options import Options
from ucpstore.storage import Storage
from ucpstore.tree import Node, inline
from ucpstore.tree.decode import decode
from ucpstore.tree.encode import encode
from ucpstore.tree.nodes import pairs_of


def item_name(key: object) -> str:
    """A text for a top-level key of a state, by which ranks ask for items."""
    return canonical(encode(key)).decode()


@dataclass(frozen=True, slots=True)
class Opened:
    """The documents of a committed step and of the items that were asked for, parsed.

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
    raw = catalog.read_step_group(storage, ref)
    tree = parse_step(raw, f"{ref.path}/{layout.DOCUMENT}").tree
    paths = {path for name, path, _ in _items(tree) if name in items}
    documents = Documents(
        raw, catalog.read_items(storage, ref, paths.__contains__, threads=options.threads)
    )
    arrays = cache(lambda: catalog.parse_documents(documents)[1])  # few steps have large leaves
    large: dict[str, bytes] = {}

    def fetch(path: str) -> bytes:
        large[path] = catalog.read_bytes(storage, ref, path, parse(arrays()[path], path))
        return large[path]

    _inlined(tree, items, fetch)
    return _pack(ref, documents, large), len(ref.raw) + documents.size


def open_handed(data: bytes, items: Collection[str]) -> Opened:
    """Parse what rank 0 handed on."""
    ref, documents, large = _unpack(data)
    return _parse(ref, documents, items, large)


def _items(tree: Node) -> list[tuple[str, str, Node]]:
    """Name, path and node of every item."""
    pairs = pairs_of(tree)
    keys = dict.fromkeys(decode(key) for key, _ in pairs)
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


def _parse(
    ref: StepRef, documents: Documents, items: Collection[str], large: Mapping[str, bytes]
) -> Opened:
    step, arrays = catalog.parse_documents(documents)
    parsed = parse_all(arrays)
    return Opened(
        ref,
        _inlined(step.tree, items, large.__getitem__) if large else step.tree,
        parsed,
        {path: ArrayInfo(each.grid.shape, each.dtype) for path, each in parsed.items()},
    )


def _pack(ref: StepRef, documents: Documents, large: Mapping[str, bytes]) -> bytes:
    """Record and documents, as they are stored."""
    parts = [ref.raw, documents.step, *documents.items.values(), *large.values()]
    head = canonical(
        {
            "sizes": [len(part) for part in parts],
            "items": list(documents.items),
            "large": list(large),
        }
    )
    return b"".join([len(head).to_bytes(8, "little"), head, *parts])


def _unpack(data: bytes) -> tuple[StepRef, Documents, dict[str, bytes]]:
    start = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:start])
    parts = []
    for size in head["sizes"]:
        parts.append(data[start : start + size])
        start += size
    raw, step, *rest = parts
    record = CommitRecord.from_bytes(raw, "the commit record handed on by rank 0")
    names = head["items"]
    return (
        StepRef(record, raw),
        Documents(step, dict(zip(names, rest, strict=False))),
        dict(zip(head["large"], rest[len(names) :], strict=True)),
    )
