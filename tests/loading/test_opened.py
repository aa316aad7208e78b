"""What rank 0 makes of a step's documents that something else has changed."""

from __future__ import annotations

import json

import pytest
from services.steps import saved

from ucpstore import catalog
from ucpstore.errors import CorruptError, FormatError
from ucpstore.format.record import CommitRecord, DocumentEntry
from ucpstore.loading.opened import item_name, read_step
from ucpstore.options import Options
from ucpstore.storage.memory import MemoryStorage
from ucpstore.tree import Node


def changed(tree: Node) -> tuple[MemoryStorage, catalog.StepRef]:
    """A step with a large leaf whose tree is another, under a record that vouches for it."""
    storage = MemoryStorage()
    ref = saved(storage, {"m": {"large": "x" * 100_000}})
    key = f"{ref.path}/zarr.json"
    document = json.loads(storage.get(key))
    document["attributes"]["ucpstore"]["tree"] = tree
    raw = json.dumps(document).encode()
    storage.put(key, raw)
    entries = [each for each in ref.record.documents if each.path != "zarr.json"]
    fields = {name: getattr(ref.record, name) for name in CommitRecord.__slots__}
    fields["documents"] = (DocumentEntry.of("zarr.json", raw), *entries)
    record = CommitRecord(**fields)
    return storage, catalog.StepRef(record, record.to_bytes())


def test_two_items_of_one_name_are_refused() -> None:
    storage, ref = changed({"dict": [["m", 1], ["m", 2]]})
    with pytest.raises(FormatError, match="two items of one name"):
        read_step(storage, ref, {item_name("m")}, Options())


def test_a_document_that_is_not_there_is_named() -> None:
    storage, ref = changed({"dict": [["m", {"document": {"path": "m/nope", "of": "node"}}]]})
    with pytest.raises(CorruptError, match=r"^m/nope: the tree names a document"):
        read_step(storage, ref, {item_name("m")}, Options())
