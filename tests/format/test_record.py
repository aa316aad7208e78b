"""The commit record: its bytes, and that no damaged or newer one is taken for good."""

import dataclasses
import json
import random

import pytest

from ucpstore.errors import CorruptError, FormatError, StateError
from ucpstore.format.documents import crc32c, seal
from ucpstore.format.record import (
    CommitRecord,
    DocumentEntry,
    arrays_crc32c,
    check_metadata,
)

KEY = "commits/0000000100/zarr.json"
RECORD = CommitRecord(
    step=100,
    generation=1,
    save_id="8d41c0e2a7b3",
    created="2026-01-02T03:04:05Z",
    world_size=8,
    writer="ucpstore 0.1.0",
    arrays=2,
    bytes=4096,
    documents=(DocumentEntry("zarr.json", 10, 0xBEEF), DocumentEntry("model/zarr.json", 20, 1)),
    arrays_crc32c=7,
    metadata={"loss": 0.25, "tags": ["a"]},
)


def attributes():
    found = json.loads(RECORD.to_bytes())["attributes"]["ucpstore"]
    return {name: value for name, value in found.items() if name not in ("kind", "crc32c")}


def test_it_comes_back_from_a_valid_group_document():
    raw = RECORD.to_bytes()
    document = json.loads(raw)
    assert (document["zarr_format"], document["node_type"]) == (3, "group")
    assert list(document["attributes"]["ucpstore"])[-1] == "crc32c"
    assert document["attributes"]["ucpstore"]["path"] == "steps/0000000100-8d41c0e2a7b3"
    assert CommitRecord.from_bytes(raw, KEY) == RECORD


def test_200_random_bit_flips_are_refused_as_damage():
    raw = RECORD.to_bytes()
    for bit in random.Random(0).sample(range(8 * len(raw)), 200):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptError, match=KEY):
            CommitRecord.from_bytes(bytes(flipped), KEY)


def test_every_flip_of_the_digits_and_every_truncation_is_refused():
    raw = RECORD.to_bytes()
    for bit in range(8 * (len(raw) - 30), 8 * len(raw)):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptError):
            CommitRecord.from_bytes(bytes(flipped), KEY)
    for length in range(len(raw)):
        with pytest.raises(CorruptError):
            CommitRecord.from_bytes(raw[:length], KEY)


def test_the_checksum_is_looked_at_before_the_version():
    raw = RECORD.to_bytes().replace(b'"format_version":1', b'"format_version":9')
    with pytest.raises(CorruptError, match="damaged"):
        CommitRecord.from_bytes(raw, KEY)


def test_newer_versions_and_unknown_features_are_named():
    newer = seal("commit", {**attributes(), "format_version": 2, "more": 1})
    with pytest.raises(FormatError, match=r"has format version 2.*upgrade"):
        CommitRecord.from_bytes(newer, KEY)
    features = ["packed-row-major", "sparse", "delta"]
    with pytest.raises(FormatError, match="needs sparse, delta, which"):
        CommitRecord.from_bytes(seal("commit", {**attributes(), "features": features}), KEY)


def test_unknown_attributes_are_passed_over():
    raw = seal("commit", {**attributes(), "note": "from a later 1.x"})
    assert CommitRecord.from_bytes(raw, KEY) == RECORD


@pytest.mark.parametrize("name", sorted(attributes()))
def test_a_missing_attribute_is_no_record(name):
    less = {key: value for key, value in attributes().items() if key != name}
    with pytest.raises(FormatError):
        CommitRecord.from_bytes(seal("commit", less), KEY)


def test_a_record_under_another_key_is_refused():
    with pytest.raises(CorruptError, match="holds the record of step 100, generation 1"):
        CommitRecord.from_bytes(RECORD.to_bytes(), "commits/0000000200/zarr.json")
    overwritten = dataclasses.replace(RECORD, generation=2)
    with pytest.raises(CorruptError, match="generation 2"):
        CommitRecord.from_bytes(overwritten.to_bytes(), KEY)


def test_a_path_outside_of_the_steps_folder_is_refused():
    raw = seal("commit", {**attributes(), "path": "../elsewhere"})
    with pytest.raises(CorruptError, match="names the folder"):
        CommitRecord.from_bytes(raw, KEY)


def test_documents_are_checked():
    entry = DocumentEntry.of("model/zarr.json", b"abc")
    assert entry.check(b"abc") == b"abc"
    for damaged in (b"abd", b"ab", b"abcd"):
        with pytest.raises(CorruptError, match=r"model/zarr\.json is damaged"):
            entry.check(damaged)
    assert RECORD.document("model/zarr.json").bytes == 20
    with pytest.raises(CorruptError, match="does not list optim"):
        RECORD.document("optim/zarr.json")


def test_one_checksum_over_all_array_metadata():
    assert arrays_crc32c([("b", b"2"), ("a", b"1")]) == crc32c(b"a\n1\nb\n2\n")
    assert arrays_crc32c([]) == 0


def test_metadata_must_come_back_the_same():
    good = {"a": [1, 2.5, None, True, "x", {"b": {}}]}
    assert check_metadata(good) == good
    for bad, found in [
        ({"a": (1, 2)}, r"metadata\['a'\] is a tuple"),
        ({"a": [{1: 2}]}, r"metadata\['a'\]\[0\] has the key 1 of type int"),
        (float("nan"), "JSON compliant"),
        ({"a": b"x"}, "bytes"),
        ("x" * 65536, "at most 65536 bytes"),
    ]:
        with pytest.raises(StateError, match=found):
            check_metadata(bad)
