"""The union of the trees of several ranks, and what it refuses."""

import json
from collections import Counter, OrderedDict, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucpstore.errors import StateError
from ucpstore.format.documents import canonical
from ucpstore.tree.decode import decode
from ucpstore.tree.encode import encode
from ucpstore.tree.merge import merge


def merged(*values):
    return decode(merge([(2 * at, encode(value)) for at, value in enumerate(values)], "state"))


def test_pipeline_stages_become_one_dict_in_order():
    first = {"model": {"embed": 1, "layers.0": 2}, "step": 7}
    last = {"model": {"layers.1": 3, "head": 4}, "step": 7}
    both = merged(first, last)
    assert both == {"model": {"embed": 1, "layers.0": 2, "layers.1": 3, "head": 4}, "step": 7}
    assert list(both["model"]) == ["embed", "layers.0", "layers.1", "head"]


def test_keys_of_different_types_stay_apart():
    assert merged({1: "a"}, {"1": "b"}) == {1: "a", "1": "b"}


def test_parts_inside_of_lists_and_ordered_dicts_unite():
    found = merged([({"a": 1},)], [({"b": 2},)])
    assert found == [({"a": 1, "b": 2},)]
    assert type(merged(OrderedDict(a=1), OrderedDict(b=2))) is OrderedDict
    assert merged(deque([{"a": 1}], 3), deque([{"b": 2}], 3)) == deque([{"a": 1, "b": 2}], 3)


def test_counters_are_equal_in_any_order_but_not_united():
    assert merged(Counter("ab"), Counter("ba")) == Counter("ab")
    with pytest.raises(StateError, match=r"state: rank 0 has .*counter.*rank 2 has .*counter"):
        merged(Counter("ab"), Counter("abb"))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (1, 2),
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        (None, "None"),
        ([1], (1,)),
        ({}, OrderedDict()),
        ({"x": 1}, [1]),
        ({1}, {2}),
        (b"a", b"b"),
        (deque([1], 3), deque([1], 4)),
    ],
    ids=str,
)
def test_unequal_values_are_refused_by_path_and_ranks(left, right):
    with pytest.raises(StateError) as caught:
        merged({"train": {"v": left}}, {"train": {"v": left}}, {"train": {"v": right}})
    text = str(caught.value)
    shown = [canonical(encode(value)).decode() for value in (left, right)]
    assert text.startswith(f"state.train.v: rank 0 has {shown[0]}, rank 4 has {shown[1]}; ")
    assert "wrapped in PerRank" in text


def test_equal_nans_are_equal():
    assert str(merged([float("nan")], [float("nan")])) == "[nan]"


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(StateError, match=r"state\.a: rank 0 has 1 elements, rank 2 has 2; .*PerRa"):
        merged({"a": [1]}, {"a": [1, 2]})


def test_long_values_are_cut_in_messages():
    with pytest.raises(StateError) as caught:
        merged({"a": "x" * 10_000}, {"a": "y" * 10_000})
    assert len(str(caught.value)) < 500


def test_per_rank_nodes_and_arrays_are_equal_by_their_place():
    node = {"per_rank": {"path": "rng", "axis": "dp", "count": 4}}
    assert merge([(0, node), (1, json.loads(json.dumps(node)))]) == node
    with pytest.raises(StateError, match=r'w: rank 0 has \{"array":"w"\}, rank 1 has \{"link":"v"'):
        merge([(0, {"array": "w"}), (1, {"link": "v"})], "w")


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(st.text(max_size=2), st.lists(st.integers() | st.none(), max_size=3)),
    st.data(),
)
def test_parts_of_a_dict_unite_to_it(whole, data):
    nodes = []
    for rank in range(3):
        kept = data.draw(st.sets(st.sampled_from(sorted(whole)))) if whole else set()
        nodes.append((rank, encode({key: whole[key] for key in kept})))
    nodes.append((3, encode(whole)))
    assert decode(merge(nodes)) == whole
