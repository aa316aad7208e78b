"""Places: names as users see them, paths as they are stored."""

from __future__ import annotations

import pytest

from ucpstore.describe.place import ROOT, dimension_names, is_plain
from ucpstore.errors import StateError
from ucpstore.tree.nodes import MAX_DEPTH


def test_names_join_with_dots_and_paths_with_slashes() -> None:
    model = ROOT.child("model", ["model"])
    weight = model.child("layers.0.w", ["layers.0.w"])
    assert (model.shown, model.path, model.name) == ("model", "model", "model")
    assert (weight.shown, weight.path) == ("model.layers.0.w", "model/layers.0.w")
    assert weight.name == "layers.0.w"  # the same in every item
    assert dimension_names(weight.name, 2) == ("layers.0.w:0", "layers.0.w:1")


def test_all_top_level_leaves_are_one_item() -> None:
    model = ROOT.child("model", ["model"])
    assert (ROOT.item, model.item) == ("", "")
    assert model.child("w", ["w"]).item == "model"


def test_a_name_that_a_rule_gives_lies_below_the_same_place() -> None:
    model = ROOT.child("model", ["model"])
    assert model.full("w") == "model.w" and ROOT.full("w") == "w"
    assert model.inside("model.stack.w", "w") == "stack.w"
    with pytest.raises(StateError, match=r"^model\.w: .* must begin with 'model\.'"):
        model.inside("other.w", "w")


def test_states_do_not_nest_without_end() -> None:
    place = ROOT
    for _ in range(MAX_DEPTH):
        place = place.child("a", ["a"])
    with pytest.raises(StateError, match="nest deeper than"):
        place.child("a", ["a"])


@pytest.mark.parametrize(
    ("value", "plain"),
    [(1, True), ([1, "a", None], True), ((1.5, b""), True), ([[1]], False), ({}, False)],
)
def test_numbers_and_strings_need_no_walk(value: object, plain: bool) -> None:
    assert is_plain(value) is plain
