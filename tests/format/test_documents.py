"""Canonical JSON, checksums, group documents and the seal."""

import json

import numpy as np
import pytest

from ucpstore.errors import CorruptError, FormatError
from ucpstore.format import documents
from ucpstore.format.documents import (
    canonical,
    crc32c,
    expect,
    group,
    hex8,
    marked,
    parse,
    seal,
    unseal,
)


def test_canonical_keeps_order_and_is_ascii():
    assert canonical({"b": [1, 2.5, None, True], "a": "é"}) == (
        b'{"b":[1,2.5,null,true],"a":"\\u00e9"}'
    )
    assert canonical(-0.0) == b"-0.0"
    with pytest.raises(ValueError, match="JSON compliant"):
        canonical(float("nan"))


def test_crc32c_is_castagnoli_of_bytes_and_arrays():
    # the check value of the CRC catalogue
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(np.frombuffer(b"6789", np.uint8), crc32c(b"12345")) == 0xE3069283
    assert hex8(0xBEEF) == "0000beef"


def test_groups():
    assert group() == b'{"zarr_format":3,"node_type":"group","attributes":{}}'
    assert json.loads(group(b'{"x":1}', {"a": b'{"zarr_format":3}'})) == {
        "zarr_format": 3,
        "node_type": "group",
        "consolidated_metadata": {
            "kind": "inline",
            "must_understand": False,
            "metadata": {"a": {"zarr_format": 3}},
        },
        "attributes": {"x": 1},
    }


def test_fixed_documents_never_change():
    fixed = {
        "ROOT": b'{"kind":"store","layout":1}',
        "COMMITS": b'{"kind":"commits"}',
        "STEPS": b'{"kind":"steps"}',
        "TAGS": b'{"kind":"tags"}',
        "WORK": b'{"kind":"work"}',
        "TOMBSTONE": b'{"kind":"tombstone"}',
    }
    for name, attributes in fixed.items():
        whole = b'{"zarr_format":3,"node_type":"group","attributes":{"ucpstore":%b}}' % attributes
        assert getattr(documents, name) == whole


@pytest.mark.parametrize("raw", [b"", b"{", b'{"a":NaN}', b'{"a":-1e999}', b"\xff", b"[" * 100_000])
def test_parse_refuses_what_is_not_json(raw):
    with pytest.raises(CorruptError, match=r"steps/x/zarr\.json is not a JSON"):
        parse(raw, "steps/x/zarr.json")


def test_parse_refuses_what_is_not_an_object():
    with pytest.raises(CorruptError, match="JSON object, but holds a list"):
        parse(b"[]", "k")


def test_expect_does_not_take_true_for_a_number():
    assert expect(1, int, "it") == 1
    with pytest.raises(FormatError, match="it should be a JSON int, but is 'True'"):
        expect(True, int, "it")


def test_a_seal_is_the_last_attribute_over_zeros():
    raw = seal("tag", {"name": "best"})
    head = (
        b'{"zarr_format":3,"node_type":"group",'
        b'"attributes":{"ucpstore":{"kind":"tag","name":"best","crc32c":"'
    )
    digits = hex8(crc32c(head + b"00000000" + b'"}}}'))
    assert raw == head + digits.encode() + b'"}}}'
    assert raw[-12:-4] == digits.encode()
    assert unseal(raw, "k", "tag") == {"name": "best"}
    json.loads(raw)


def test_another_kind_is_refused_though_whole():
    with pytest.raises(CorruptError, match="should be a commit document of ucpstore, but has 'tag"):
        unseal(seal("tag", {}), "k", "commit")


@pytest.mark.parametrize("raw", [b"", b'"}}}', group(), marked("tag"), seal("tag", {}) + b"\n"])
def test_a_document_without_a_seal_is_refused(raw):
    with pytest.raises(CorruptError, match="k is damaged"):
        unseal(raw, "k", "tag")
