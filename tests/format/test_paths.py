"""Segments: distinct for distinct siblings, valid as names everywhere."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ucpstore.errors import UnsupportedError
from ucpstore.format.paths import (
    MAX_PATH_BYTES,
    MAX_SEGMENT_BYTES,
    escape,
    find_clash,
    join,
    key_text,
    segment_of,
)

CASES = {
    "layers.0.wq.weight": "layers.0.wq.weight",
    "A-b_c.9": "A-b_c.9",
    "": "%.empty",
    ".": "%2E",
    "..": "%2E%2E",
    "...": "%2E%2E%2E",
    ".hidden": ".hidden",
    "a/b": "a%2Fb",
    "a\\b": "a%5Cb",
    "a b": "a%20b",
    "100%": "100%25",
    "%2F": "%252F",
    "é": "%C3%A9",
    "\0": "%00",
    "__init__": "%5F_init__",
    "_x": "_x",
    "zarr.json": "zarr%2Ejson",
    "Zarr.JSON": "Zarr%2EJSON",
    "c.0.0": "c.0.0",
    "\ud800": "%ED%A0%80",
}


@pytest.mark.parametrize(("key", "segment"), CASES.items())
def test_escape(key, segment):
    assert escape(key) == segment


def test_long_keys_end_in_a_hash():
    left, right = escape("a" * 300 + "x"), escape("a" * 300 + "y")
    assert left != right
    assert len(left) == len(right) == MAX_SEGMENT_BYTES
    assert re.fullmatch(r"a{166}%\.[0-9a-f]{32}", left)
    assert escape("a" * 200) == "a" * 200


def test_a_long_key_is_not_cut_inside_of_an_escape():
    for lead in range(3):
        head = escape("a" * lead + "é" * 100).partition("%.")[0]
        assert re.fullmatch(r"a*(%[0-9A-F]{2})+", head)


@given(st.sets(st.text(max_size=80) | st.text(alphabet="._%/aZ2F", max_size=8), max_size=20))
def test_segments_of_strings_are_distinct_valid_names(keys):
    segments = {escape(key) for key in keys}
    assert len(segments) == len(keys)
    for segment in segments:
        assert re.fullmatch(r"[A-Za-z0-9_.%-]{1,200}", segment)
        assert segment.strip(".")
        assert not segment.startswith("__")
        assert segment.lower() != "zarr.json"


KEYS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(allow_nan=False)
    | st.sampled_from(["0", "1", "True", "None", "1.0", "(1,)", "%.int.1", "'1'"])
    | st.text(max_size=3)
    | st.binary(max_size=3)
    | st.sampled_from([np.float32(0.1), np.int8(1), torch.float32, torch.device("cpu")]),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)


@given(st.dictionaries(KEYS, st.none(), max_size=30))
def test_two_siblings_never_share_a_segment(mapping):
    assert len({segment_of(key, mapping) for key in mapping}) == len(mapping)


def test_types_are_named_only_where_needed():
    assert segment_of(1, [1, 2]) == "1"
    assert segment_of(1, {1: 0, "1": 0}) == "%.int.1"
    assert segment_of("1", {1: 0, "1": 0}) == "1"
    assert segment_of(True, {True: 0, "True": 0}) == "%.bool.True"
    assert segment_of(None, {None: 0}) == "None"
    assert segment_of((1, "a"), [(1, "a")]) == "%281%2C%20%27a%27%29"


def test_texts_are_the_same_in_every_process():
    assert key_text(frozenset(["b", "a", "c"])) == "frozenset('a', 'b', 'c')"
    assert key_text(np.float32(0.5)) == "float32(0.5)"
    assert key_text(torch.Size([1, 2])) == "Size(torch.Size([1, 2]))"


def test_two_nans_cannot_be_told_apart():
    one, two = float("nan"), float("nan")
    assert segment_of(one, {one: 1}) == "nan"
    with pytest.raises(UnsupportedError, match="two keys"):
        segment_of(one, {one: 1, two: 2})


def test_other_keys_are_refused():
    with pytest.raises(UnsupportedError, match=r"builtins\.object"):
        segment_of(object(), [])


def test_join_leaves_out_empty_parts_and_refuses_long_paths():
    assert join("", "model", "a.b") == "model/a.b"
    with pytest.raises(UnsupportedError, match="shorten the keys"):
        join(*["a" * 200] * 4)
    assert len(join("a" * MAX_PATH_BYTES)) == MAX_PATH_BYTES


@pytest.mark.parametrize(
    ("paths", "exact", "folded"),
    [
        (["a/x", "a/y", "a.b"], None, None),
        (["a", "a"], ("a", "a"), ("a", "a")),
        (["a", "a/x"], ("a", "a/x"), ("a", "a/x")),
        (["Foo.weight", "foo.weight"], None, ("Foo.weight", "foo.weight")),
        (["A/x", "a/y"], None, ("A/x", "a/y")),
        (["A/x", "a"], None, ("A/x", "a")),
    ],
)
def test_find_clash(paths, exact, folded):
    assert find_clash(paths) == exact
    assert find_clash(paths, ignore_case=True) == folded
