"""docs/format.md says what the code does: its examples and numbers are taken from the page."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from ucpstore import dtypes
from ucpstore.arrays.compressors import settle
from ucpstore.arrays.metadata import array_document, to_bytes
from ucpstore.arrays.packed import ObjectEncoder
from ucpstore.format import documents, layout, paths, per_rank, record, step
from ucpstore.format.documents import canonical
from ucpstore.format.marks import Tag, WorkMark
from ucpstore.geometry.box import Box
from ucpstore.geometry.grid import PLAIN_LIMIT_BYTES, Grid
from ucpstore.tree import decode, nodes
from ucpstore.tree import documents as tree_documents
from ucpstore.tree.optimizer import Group, OptimizerNode, to_node

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
EXAMPLES = [
    line.encode()
    for block in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]


def test_every_example_is_canonical():
    assert len(EXAMPLES) == 8
    for raw in EXAMPLES:
        assert canonical(json.loads(raw)) == raw


def test_the_commit_record_parses():
    (raw,) = [raw for raw in EXAMPLES if b'"kind":"commit"' in raw]
    found = record.CommitRecord.from_bytes(raw, "commits/0000000100/zarr.json")
    assert (found.step, found.metadata) == (100, {"loss": 2.5})
    assert found.to_bytes() == raw
    listed = re.search(r"in this order, after `kind`:\n\n(.*?)\n\n", PAGE, re.DOTALL)[1]
    named = re.findall(r"`(\w+)`", " ".join(row.split("|")[1] for row in listed.splitlines()))
    assert named == [k for k in json.loads(raw)["attributes"]["ucpstore"] if k != "kind"]


def test_the_mark_and_the_tag_parse():
    (work,) = [raw for raw in EXAMPLES if b'"kind":"work"' in raw]
    assert WorkMark.from_bytes(work, "k").to_bytes() == work
    (tag,) = [raw for raw in EXAMPLES if b'"kind":"tag"' in raw]
    assert Tag.from_bytes(tag, "k").to_bytes() == tag


@pytest.mark.parametrize("name", ["root", "commits", "steps", "tags", "work", "tombstone", "plain"])
def test_fixed_groups(name):
    found = re.search(rf"^\| {name} \| `(.*)` \|$", PAGE, re.MULTILINE)[1]
    assert found.encode() == getattr(documents, name.upper())


def test_the_item_is_an_empty_one():
    (raw,) = [raw for raw in EXAMPLES if b'"kind":"item"' in raw]
    assert raw == step.build_item({})


def test_the_optimizer_is_what_the_code_writes():
    (raw,) = [raw for raw in EXAMPLES if raw.startswith(b'{"optimizer"')]
    scalar = {"scalar": {"dtype": "float32", "data": "AACAPw=="}}
    states = {
        name: {"step": scalar, "exp_avg": {"array": f"optim/exp_avg/{name}"}} for name in "ab"
    }
    optimizer = OptimizerNode("optim", (Group(0, ("a", "b", "c"), {"lr": 0.1}),), states)
    assert canonical(to_node(optimizer)) == raw


def test_the_arrays_are_what_the_code_writes():
    plain, packed, compressed = (raw for raw in EXAMPLES if b'"node_type":"array"' in raw)
    grid = Grid((768,), (768,), (768,), False)
    assert plain == to_bytes(array_document(grid, "bfloat16", ("norm.weight:0",)))
    grid = Grid((3,), (2,), (4,), True)
    assert packed == to_bytes(array_document(grid, "int16", ("w:0",)))
    codec = settle('{"name":"zstd","configuration":{"level":3}}', 2)
    assert compressed == to_bytes(array_document(grid, "int16", ("w:0",), codec))


def test_the_object_is_what_the_code_writes():
    block = re.search(r"is 52 bytes:\n\n```\n(.*?)```", PAGE, re.DOTALL)[1]
    listed = [re.match(r"((?:[0-9a-f]{2} {0,2})+)", line)[1] for line in block.splitlines()]
    encoder = ObjectEncoder(np.empty(52, np.uint8), Grid((3,), (2,), (4,), True), (0,), "int16")
    encoder.fill(Box((0,), (3,)), np.array([1, 2, 3], "<i2"))
    assert bytes(encoder.finish()) == bytes.fromhex("".join(listed))


def test_data_types_and_fill_bytes():
    table = re.search(r"### Data types\n\n(.*?)\n\n", PAGE, re.DOTALL)[1]
    rows = [row.split("|")[1:3] for row in table.splitlines()[2:]]
    names = [re.findall(r"`(\w+)`", row[0]) for row in rows]
    assert sorted(name for row in names for name in row) == sorted(dtypes.NAMES)
    for row in (1, 2):
        fills = re.findall(r"`(\w+)`", rows[row][1])
        assert [dtypes.fill_bytes(name).hex() for name in names[row]] == fills


def test_tags_of_nodes():
    table = re.search(r"\| tag \| body \| value \|\n(.*?)\n\n", PAGE, re.DOTALL)[1]
    cells = " ".join(row.split("|")[1] for row in table.splitlines()[1:])
    known = {*decode._LEAVES, *decode._MAPPINGS, *decode._SEQUENCES, *decode.ELSEWHERE, "deque"}
    assert set(re.findall(r"`(\w+)`", cells)) == known


def test_limits():
    table = re.search(r"## Limits\n\n(.*?)\n\n", PAGE, re.DOTALL)[1]
    found = [int(re.search(r"\| (\d+)", row)[1]) for row in table.splitlines()[2:]]
    assert found == [
        layout.MAX_STEP,
        paths.MAX_SEGMENT_BYTES,
        paths.MAX_PATH_BYTES,
        nodes.MAX_DEPTH,
        record.MAX_METADATA_BYTES,
        step.MAX_ITEM_BYTES,
        tree_documents.LIMIT_BYTES,
        per_rank.MAX_ROW_BYTES,
        PLAIN_LIMIT_BYTES,
    ]
    for number in (record.MAX_METADATA_BYTES, step.MAX_ITEM_BYTES, PLAIN_LIMIT_BYTES):
        assert f"{number:,}" in PAGE
    assert f"{per_rank.MAX_ROW_BYTES - per_rank.LENGTH_BYTES:,} bytes" in PAGE


def test_versions_and_features():
    assert PAGE.startswith(f"# Format, version {record.FORMAT_VERSION}\n")
    for feature in (*record.FEATURES, record.CODECS):
        assert f"The feature `{feature}`" in PAGE
