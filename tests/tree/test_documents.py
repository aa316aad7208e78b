"""Large parts of a tree as documents."""

import pytest

from ucpstore.errors import CorruptError, FormatError
from ucpstore.format.documents import canonical
from ucpstore.tree.decode import decode
from ucpstore.tree.documents import LIMIT_BYTES, externalize, inline
from ucpstore.tree.encode import encode


def test_small_trees_stay_as_they_are():
    tree = encode({"model": {"w": 1}, "blob": b"x" * 40_000})
    assert externalize(tree) == (tree, {})


def test_large_leaves_become_documents_of_their_item():
    value = {
        "loader": {"blob": b"b" * 70_000, "text": "t" * 70_000, "small": 1},
        "a/b": b"c" * 65_537,
        "just": b"d" * 65_536,
    }
    tree, documents = externalize(encode(value))
    assert {path: len(data) for path, data in documents.items()} == {
        "loader/%.documents/0": 70_000,
        "loader/%.documents/1": 70_002,
        "a%2Fb/%.documents/0": 65_537,
    }
    assert documents["loader/%.documents/0"] == b"b" * 70_000
    assert documents["loader/%.documents/1"] == b'"' + b"t" * 70_000 + b'"'
    assert tree["dict"][0][1]["dict"] == [
        ["blob", {"document": {"path": "loader/%.documents/0", "of": "bytes"}}],
        ["text", {"document": {"path": "loader/%.documents/1", "of": "node"}}],
        ["small", 1],
    ]
    assert decode(inline(tree, documents.__getitem__)) == value


def test_large_containers_become_documents_inside_of_documents():
    value = {
        "history": {"loss": [n / 7 for n in range(20_000)], "note": ["x" * 60_000, "y" * 9000]}
    }
    tree, documents = externalize(encode(value))
    assert sorted(documents) == ["history/%.documents/0", "history/%.documents/1"]
    assert len(canonical(tree)) < LIMIT_BYTES
    assert decode(inline(tree, documents.__getitem__)) == value


def test_a_dict_of_many_small_values_becomes_one_document():
    value = {"m": {f"key{n}": n for n in range(10_000)}, "step": 1}
    tree, documents = externalize(encode(value))
    assert list(documents) == ["m/%.documents/0"]
    assert tree["dict"][1] == ["step", 1]


def test_only_documents_below_what_is_asked_for_are_fetched():
    tree, documents = externalize(encode({"a": "x" * 70_000, "b": "y" * 70_000}))
    fetched = []

    def fetch(path):
        fetched.append(path)
        return documents[path]

    assert inline(tree["dict"][1][1], fetch) == "y" * 70_000
    assert fetched == ["b/%.documents/0"]


def test_the_root_always_stays():
    tree, documents = externalize(encode({f"k{n}": 1 for n in range(20_000)}))
    assert len(tree["dict"]) == 20_000
    assert documents == {}
    assert externalize(encode([b"x" * 70_000]))[0] == [
        {"document": {"path": "%.documents/0", "of": "bytes"}}
    ]


def test_items_whose_keys_read_alike_keep_their_own_documents():
    _, documents = externalize(encode({1: b"x" * 70_000, "1": b"y" * 70_000}))
    assert {path: data[:1] for path, data in documents.items()} == {
        "%.int.1/%.documents/0": b"x",
        "1/%.documents/0": b"y",
    }


def test_other_documents_are_refused():
    with pytest.raises(FormatError, match="document of 'parquet'"):
        inline({"document": {"path": "p", "of": "parquet"}}, lambda path: b"")
    with pytest.raises(CorruptError, match="p holds no node"):
        inline({"document": {"path": "p", "of": "node"}}, lambda path: b"{")
