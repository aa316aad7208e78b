"""What one step holds: its arrays and Python values by name, from its metadata alone. Reads only.

Names are keys joined by `/`, as `Checkpoint` and the folders of the store have them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ucpstore import catalog, dtypes
from ucpstore.arrays.metadata import ArrayMetadata, parse
from ucpstore.arrays.packed import slot_bytes
from ucpstore.catalog import StepRef
from ucpstore.errors import CorruptError
from ucpstore.format.documents import Json, expect
from ucpstore.format.record import CommitRecord
from ucpstore.options import Options
from ucpstore.storage import Storage
from ucpstore.tree import Node, optimizer
from ucpstore.tree.names import top_level
from ucpstore.tree.nodes import MAPPINGS, body_of, children, same, tag_of


@dataclass(frozen=True, slots=True)
class ArrayEntry:
    """One array under one of its names, given as the keys that lead to it.

    `path` is the array below the step's folder, `chunk` and `object` are shapes in elements,
    `bytes` is the size of the values and `stored_bytes` that of the objects, checksums and padding
    included. With a compressor, `codec`, only the objects themselves tell that, and it is None.
    `tied` says that another name, the first, owns the array.
    """

    keys: tuple[str, ...]
    path: str
    dtype: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    object: tuple[int, ...]
    objects: int
    bytes: int
    stored_bytes: int | None
    tied: bool
    codec: str | None = None

    @property
    def name(self) -> str:
        """The keys joined."""
        return "/".join(self.keys)


@dataclass(frozen=True, slots=True)
class ValueEntry:
    """A Python value of the tree, as its node; `count` names have it alike.

    More than one only for states of an optimizer that are equal for several parameters.
    """

    keys: tuple[str, ...]
    node: Node
    count: int = 1

    @property
    def name(self) -> str:
        """The keys joined."""
        return "/".join(self.keys)


Entry = ArrayEntry | ValueEntry
Keys = tuple[str, ...]

_ELSEWHERE = frozenset({"array", "link", "optimizer"})


@dataclass(frozen=True, slots=True)
class Contents:
    """A step: its record, the URL of its folder (a plain Zarr group), and what it holds."""

    record: CommitRecord
    url: str
    entries: tuple[Entry, ...]

    def matching(self, pattern: str) -> tuple[Entry, ...]:
        """The entries of which the name, or a folder above it, matches the pattern.

        Keys are joined by `/` or, as in messages and in patterns of `cast`, by dots. `*` and `?`
        stand for any characters, `/` too.
        """
        return tuple(each for each in self.entries if _matches(each.keys, pattern))


def step_url(storage: Storage, record: CommitRecord) -> str:
    """Where the step's folder is, for a plain Zarr reader."""
    return f"{storage.url.rstrip('/')}/{record.path}"


def read_contents(storage: Storage, step: int | None, options: Options) -> Contents:
    """Everything about a step, the newest where `step` is None, but its values.

    Of the objects only those are read that hold large parts of the tree.
    """
    ref = catalog.find_step(storage, step)
    document = catalog.read_step_group(storage, ref)
    items = catalog.read_items(
        storage, ref, catalog.item_entries(ref), threads=options.threads or storage.requests
    )
    reader = _Reader(storage, ref, {**document.root_arrays, **items})
    entries = tuple(
        entry
        for name, node in top_level(document.tree).items()
        for entry in reader.entries((name,), node)
    )
    return Contents(ref.record, step_url(storage, ref.record), entries)


class _Reader:
    """From the nodes of a step's tree to entries."""

    def __init__(
        self, storage: Storage, ref: StepRef, arrays: Mapping[str, Mapping[str, Json]]
    ) -> None:
        self._storage = storage
        self._ref = ref
        self._arrays = arrays

    def entries(self, keys: Keys, node: Node) -> Iterator[Entry]:
        """The entries of a node, in the order of the tree."""
        tag = tag_of(node)
        if tag in ("array", "link"):
            path = expect(body_of(node), str, "the path of an array")
            yield self._array(keys, path, tied=tag == "link")
        elif tag == "optimizer":
            yield from self._optimizer(keys, optimizer.from_node(node))
        elif tag == "document":
            large = self._document(node)
            if _is_folder(large):
                yield from self.entries(keys, large)
            else:
                yield ValueEntry(keys, node)
        elif _is_folder(node):
            for key, child in children(node):
                yield from self.entries((*keys, key), child)
        else:
            yield ValueEntry(keys, node)

    def _optimizer(self, keys: Keys, found: optimizer.OptimizerNode) -> Iterator[Entry]:
        for group in found.groups:
            for key, node in group.values.items():
                yield from self.entries((*keys, "param_groups", str(group.index), key), node)
        states = dict.fromkeys(state for each in found.states.values() for state in each)
        for state in states:
            of_state = {
                parameter: values[state]
                for parameter, values in found.states.items()
                if state in values
            }
            nodes = list(of_state.values())
            alike = not _is_folder(nodes[0]) and all(same(each, nodes[0]) for each in nodes)
            if alike and len(nodes) > 1:
                yield ValueEntry((*keys, state), nodes[0], len(nodes))
                continue
            for parameter, node in of_state.items():
                yield from self.entries((*keys, state, parameter), node)
        for key, node in found.extra.items():
            yield from self.entries((*keys, key), node)

    def _array(self, keys: Keys, path: str, *, tied: bool) -> ArrayEntry:
        metadata = self._metadata(path)
        grid = metadata.grid
        return ArrayEntry(
            keys=keys,
            path=path,
            dtype=metadata.dtype,
            shape=grid.shape,
            chunk=grid.chunk,
            object=grid.object,
            objects=math.prod(grid.objects),
            bytes=math.prod(grid.shape) * dtypes.itemsize(metadata.dtype),
            stored_bytes=_stored_bytes(metadata),
            tied=tied,
            codec=metadata.codec,
        )

    def _metadata(self, path: str) -> ArrayMetadata:
        if path not in self._arrays:
            raise CorruptError(
                f"{path}: the tree of the step names this array, but the document of its item "
                "does not; run `ucpstore verify`"
            )
        return parse(self._arrays[path], path)

    def _document(self, node: Node) -> Node:
        """The part of the tree that was too large for it; bytes, which have no parts, as they are.

        A node is read even if it turns out to be one value: only its contents tell.
        """
        entry: dict[str, Node] = expect(body_of(node), dict, "a document node")
        if entry.get("of") != "node":
            return node
        path = expect(entry.get("path"), str, "the path of a document")
        raw = catalog.read_bytes(self._storage, self._ref, path, self._metadata(path))
        try:
            found: Node = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise CorruptError(f"{path} holds no node of a tree: {error}") from None
        return found


def _is_folder(node: Node) -> bool:
    """Whether a node is shown as lines of its own, not as one value.

    A list of plain values is one value to a reader, as `betas` and `milestones` are.
    """
    tag = tag_of(node)
    if tag in _ELSEWHERE:
        return True
    inside = children(node)
    return bool(inside) and (tag in MAPPINGS or any(_is_part(child) for _, child in inside))


def _is_part(node: Node) -> bool:
    return tag_of(node) in _ELSEWHERE or bool(children(node))


def _stored_bytes(metadata: ArrayMetadata) -> int | None:
    if metadata.codec is not None:
        return None
    grid, itemsize = metadata.grid, dtypes.itemsize(metadata.dtype)
    # Chunks of objects at the edge add up, along each dimension, to those of the whole array.
    chunks = math.prod(-(-n // c) for n, c in zip(grid.shape, grid.chunk, strict=True))
    return chunks * slot_bytes(grid, itemsize) + math.prod(grid.objects) * grid.index_bytes


def _matches(keys: Keys, pattern: str) -> bool:
    return any(
        fnmatchcase(joined.join(keys[:length]), pattern)
        for length in range(len(keys), 0, -1)
        for joined in "/."
    )
