"""Walking and rebuilding nodes."""

import pytest
import torch

from ucpstore.errors import FormatError
from ucpstore.tree.encode import encode
from ucpstore.tree.nodes import children, rebuild, same, short, tag_of, walk


def test_walk_yields_every_leaf_in_order():
    tree = {"dict": [["m", [1, {"tuple": [{"array": "m/1/0"}]}]], [7, {"dict": []}], ["e", []]]}
    assert list(walk(tree)) == [
        ("m.0", 1),
        ("m.1.0", {"array": "m/1/0"}),
        ("7", {"dict": []}),
        ("e", []),
    ]


def test_rebuild_with_the_same_children_changes_nothing():
    value = {"a": [1, (2,), {3}], "b": torch.Size([1])}
    node = encode(value)
    assert rebuild(node, [child for _, child in children(node)]) == node


def test_same_tells_types_apart():
    assert same({"a": [1]}, {"a": [1]})
    for left, right in [(1, 1.0), (1, True), (0.0, -0.0), ([], {})]:
        assert not same(left, right)


def test_a_node_has_one_tag():
    assert tag_of({"tuple": []}) == "tuple"
    assert tag_of([]) is None
    with pytest.raises(FormatError, match=r"must have one tag, but has \['a', 'b'\]"):
        tag_of({"a": 1, "b": 2})


def test_short_cuts():
    assert short("x" * 100, 10) == '"xxxxxxxxx...'
