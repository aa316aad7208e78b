"""What `show` prints: a tree of arrays and values for people, or one JSON document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from ucpstore.cli import text, values
from ucpstore.cli.ls import record_fields
from ucpstore.manage.contents import ArrayEntry, Contents, Entry, ValueEntry
from ucpstore.units import size


def page(found: Contents, entries: Sequence[Entry]) -> Iterator[str]:
    """The lines for people."""
    record = found.record
    yield (
        f"step {record.step}, generation {record.generation}, saved "
        f"{text.moment(record.created)} UTC by {text.counted(record.world_size, 'rank')} "
        f"({text.printable(record.writer)})"
    )
    yield f"{text.counted(record.arrays, 'array')}, {size(record.bytes)}, in {found.url}"
    metadata = text.json_short(record.metadata, 200)
    if metadata:
        yield f"metadata {metadata}"
    yield ""
    yield from text.columns(list(_tree(entries)), frozenset((4,)))


def document(found: Contents, entries: tuple[Entry, ...]) -> dict[str, object]:
    """The JSON document; values are nodes of the tree."""
    return {
        "step": found.record.step,
        "url": found.url,
        "record": record_fields(found.record),
        "arrays": [_array(each) for each in entries if isinstance(each, ArrayEntry)],
        "values": [_value(each) for each in entries if isinstance(each, ValueEntry)],
    }


def _tree(entries: Sequence[Entry]) -> Iterator[tuple[str, ...]]:
    """Rows of an indented tree: a line per folder, array and value."""
    above: tuple[str, ...] = ()
    for entry in entries:
        folders, name = entry.keys[:-1], entry.keys[-1]
        shared = 0
        while shared < min(len(above), len(folders)) and above[shared] == folders[shared]:
            shared += 1
        for depth in range(shared, len(folders)):
            yield (f"{'  ' * depth}{text.printable(folders[depth])}/", "")
        above = folders
        yield _row(f"{'  ' * len(folders)}{text.printable(name)}", entry)


def _row(name: str, entry: Entry) -> tuple[str, ...]:
    if not isinstance(entry, ArrayEntry):
        shown = values.value(entry.node)
        return (name, f"{shown}, for each of {entry.count}" if entry.count > 1 else shown)
    tied = f"is {text.printable(entry.path)}" if entry.tied else ""
    chunks = f"chunks {text.shape(entry.chunk)}" if entry.shape else ""
    if entry.codec is not None:
        chunks = ", ".join(filter(None, (chunks, text.printable(json.loads(entry.codec)["name"]))))
    return (name, entry.dtype, text.shape(entry.shape), chunks, size(entry.bytes), tied)


def _array(entry: ArrayEntry) -> dict[str, object]:
    fields = asdict(entry)
    del fields["keys"]
    fields["codec"] = None if entry.codec is None else json.loads(entry.codec)
    return {"name": entry.name, **fields}


def _value(entry: ValueEntry) -> dict[str, object]:
    return {"name": entry.name, "value": entry.node, "count": entry.count}
