"""Large parts of a tree as documents of their own.

A document is a uint8 array at `<item>/%.documents/<n>`, n counting from 0 in the order of the
tree: no key of a state has such a segment. Its bytes are those of a bytes value, or the canonical
JSON of a node.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Final

from ucpstore.errors import CorruptError, FormatError
from ucpstore.format.documents import canonical, expect
from ucpstore.format.paths import join, segment_of
from ucpstore.tree.decode import decode
from ucpstore.tree.nodes import Node, body_of, children, pairs_of, rebuild, tag_of

FOLDER: Final = "%.documents"
LIMIT_BYTES: Final = 64 * 1024
_NUMBERS: Final = frozenset({int, float, bool, type(None)})

Fetch = Callable[[str], bytes]
"""The bytes of the document at a path below the step, verified."""


def externalize(tree: Node, limit: int = LIMIT_BYTES) -> tuple[Node, dict[str, bytes]]:
    """The tree with every part of more than `limit` bytes replaced, and the documents by path.

    Leaves go first, then containers that are still too large; the root itself always stays.
    """
    documents: dict[str, bytes] = {}
    if tag_of(tree) != "dict":
        return _Writer("", limit, documents).inside(tree)[0], documents
    pairs = pairs_of(tree)
    keys = [decode(key) for key, _ in pairs]
    siblings = dict.fromkeys(keys)
    stored: list[Node] = []
    for key, (key_node, node) in zip(keys, pairs, strict=True):
        writer = _Writer(segment_of(key, siblings), limit, documents)
        stored.append([key_node, writer.reduce(node)[0]])
    return {"dict": stored}, documents


def inline(tree: Node, fetch: Fetch) -> Node:
    """The tree with its documents put back; only those below `tree` are fetched."""
    if tag_of(tree) == "document":
        entry: dict[str, Node] = expect(body_of(tree), dict, "a document node")
        path = expect(entry.get("path"), str, "the path of a document")
        kind = entry.get("of")
        data = fetch(path)
        if kind == "bytes":
            return {"bytes": base64.b64encode(data).decode("ascii")}
        if kind != "node":
            raise FormatError(
                f"{path} is a document of {kind!r}, which this ucpstore does not know; "
                "upgrade ucpstore to read this step"
            )
        try:
            node: Node = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise CorruptError(f"{path} holds no node of a tree: {error}") from None
        return inline(node, fetch)
    parts = children(tree)
    return rebuild(tree, [inline(part, fetch) for _, part in parts]) if parts else tree


class _Writer:
    """Writes the documents of one item."""

    def __init__(self, item: str, limit: int, documents: dict[str, bytes]) -> None:
        self._item = item
        self._limit = limit
        self._documents = documents
        self._count = 0

    def reduce(self, node: Node) -> tuple[Node, int]:
        """(node or the document in its place, its bytes as canonical JSON)."""
        kept, size = self.inside(node)
        if size <= self._limit:
            return kept, size
        if tag_of(kept) == "bytes":
            data, kind = base64.b64decode(expect(body_of(kept), str, "bytes")), "bytes"
            if len(data) <= self._limit:
                return kept, size
        else:
            data, kind = canonical(kept), "node"
        path = join(self._item, FOLDER, str(self._count))
        self._count += 1
        self._documents[path] = data
        replaced: Node = {"document": {"path": path, "of": kind}}
        return replaced, len(canonical(replaced))

    def inside(self, node: Node) -> tuple[Node, int]:
        """The node with its parts reduced, and its size; sizes are added up, not measured again."""
        # Long lists of numbers are common, and none of their parts is too large.
        flat = isinstance(node, list) and _NUMBERS.issuperset(map(type, node))
        parts = () if flat else children(node)
        if not parts:
            return node, len(canonical(node))
        reduced = [self.reduce(part) for _, part in parts]
        kept = rebuild(node, [part for part, _ in reduced])
        frame = len(canonical(rebuild(node, [None] * len(parts)))) - len("null") * len(parts)
        return kept, frame + sum(size for _, size in reduced)
