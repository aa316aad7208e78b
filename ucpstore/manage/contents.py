"""What one step holds: its arrays and Python values by name, from its metadata alone. Reads only.

Names are keys joined by `/`, as `Checkpoint` and the folders of the store have them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ucpstore import catalog, dtypes
from ucpstore.arrays.metadata import ArrayMetadata, parse
from ucpstore.arrays.packed import slot_bytes
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
    included. `tied` says that another name, the first, owns the array.
    """

    keys: tuple[str, ...]
    path: str
    dtype: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    object: tuple[int, ...]
    objects: int
    bytes: int
    stored_bytes: int
    tied: bool

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


@dataclass(frozen=True, slots=True)
class Contents:
    """A step: its record, the URL of its folder (a plain Zarr group), and what it holds."""

    record: CommitRecord
    url: str
    entries: tuple[Entry, ...]

    def matching(self, pattern: str) -> tuple[Entry, ...]:
        """The entries of which the name, or a folder above it, matches the pattern.

        `*` and `?` stand for any characters, `/` too.
        """
        return tuple(each for each in self.entries if _matches(each.keys, pattern))


def step_url(storage: Storage, record: CommitRecord) -> str:
    """Where the step's folder is, for a plain Zarr reader."""
    return f"{storage.url.rstrip('/')}/{record.path}"


def read_contents(storage: Storage, step: int | None, options: Options) -> Contents:
    """Everything about a step, the newest where `step` is None, but its values."""
    ref = catalog.find_step(storage, step)
    documents = catalog.read_documents(storage, ref, lambda _: True, threads=options.threads)
    document, arrays = catalog.parse_documents(documents)
    entries = tuple(
        entry
        for name, node in top_level(document.tree).items()
        for entry in _entries((name,), node, arrays)
    )
    return Contents(ref.record, step_url(storage, ref.record), entries)


def _entries(
    keys: tuple[str, ...], node: Node, arrays: Mapping[str, Mapping[str, Json]]
) -> Iterator[Entry]:
    tag = tag_of(node)
    if tag in ("array", "link"):
        path = expect(body_of(node), str, "the path of an array")
        yield _array(keys, path, arrays, tied=tag == "link")
    elif tag == "optimizer":
        yield from _optimizer(keys, optimizer.from_node(node), arrays)
    else:
        inside = children(node)
        # A list of plain values is one value to a reader, as `betas` and `milestones` are.
        if tag not in MAPPINGS and not any(_is_folder(child) for _, child in inside):
            inside = []
        if not inside:
            yield ValueEntry(keys, node)
        for key, child in inside:
            yield from _entries((*keys, key), child, arrays)


def _is_folder(node: Node) -> bool:
    return bool(children(node)) or tag_of(node) in ("array", "link", "optimizer")


def _optimizer(
    keys: tuple[str, ...], found: optimizer.OptimizerNode, arrays: Mapping[str, Mapping[str, Json]]
) -> Iterator[Entry]:
    for group in found.groups:
        for key, node in group.values.items():
            yield from _entries((*keys, "param_groups", str(group.index), key), node, arrays)
    states = dict.fromkeys(state for each in found.states.values() for state in each)
    for state in states:
        of_state = {
            parameter: values[state]
            for parameter, values in found.states.items()
            if state in values
        }
        nodes = list(of_state.values())
        if (
            len(nodes) > 1
            and not _is_folder(nodes[0])
            and all(same(each, nodes[0]) for each in nodes)
        ):
            yield ValueEntry((*keys, state), nodes[0], len(nodes))
            continue
        for parameter, node in of_state.items():
            yield from _entries((*keys, state, parameter), node, arrays)
    for key, node in found.extra.items():
        yield from _entries((*keys, key), node, arrays)


def _array(
    keys: tuple[str, ...], path: str, arrays: Mapping[str, Mapping[str, Json]], *, tied: bool
) -> ArrayEntry:
    if path not in arrays:
        raise CorruptError(
            f"{path}: the tree of the step names this array, but the document of its item does "
            "not; run `ucpstore verify`"
        )
    metadata = parse(arrays[path], path)
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
    )


def _stored_bytes(metadata: ArrayMetadata) -> int:
    grid, itemsize = metadata.grid, dtypes.itemsize(metadata.dtype)
    # Chunks of objects at the edge add up, along each dimension, to those of the whole array.
    chunks = math.prod(-(-n // c) for n, c in zip(grid.shape, grid.chunk, strict=True))
    return chunks * slot_bytes(grid, itemsize) + math.prod(grid.objects) * grid.index_bytes


def _matches(keys: tuple[str, ...], pattern: str) -> bool:
    return any(fnmatchcase("/".join(keys[:length]), pattern) for length in range(len(keys), 0, -1))
