from __future__ import annotations

import pytest

from ucpstore.errors import FormatError, StateError
from ucpstore.tree import merge_nodes
from ucpstore.tree.names import array_names, check_paths, top_level
from ucpstore.tree.optimizer import Group, OptimizerNode, to_node


def test_names_are_keys_joined_by_slashes() -> None:
    node = {"dict": [["a.b", {"array": "m/a.b"}], ["c", [{"array": "m/c/0"}, 5]]]}
    assert array_names(node) == {"a.b": "m/a.b", "c/0": "m/c/0"}


def test_an_item_that_is_an_array_has_the_empty_name() -> None:
    assert array_names({"array": "w"}) == {"": "w"}
    assert array_names({"tuple": [1, 2]}) == {}


def test_every_name_of_a_tied_tensor_is_there() -> None:
    node = {"dict": [["a", {"array": "m/a"}], ["b", {"link": "m/a"}]]}
    assert array_names(node) == {"a": "m/a", "b": "m/a"}
    check_paths(node)


def test_a_tied_name_may_come_before_its_array() -> None:
    head = {"dict": [["m", {"dict": [["head", {"link": "m/embed"}]]}]]}
    embed = {"dict": [["m", {"dict": [["embed", {"array": "m/embed"}]]}]]}
    check_paths(merge_nodes([(0, head), (1, embed)]))


def test_states_of_an_optimizer_are_named_as_their_folders() -> None:
    states = {
        name: {"exp_avg": {"array": f"optim/exp_avg/{name}"}, "step": 3} for name in ("w", "b")
    }
    node = to_node(OptimizerNode("optim", (Group(0, ("w", "b"), {"lr": 0.5}),), states))
    assert array_names(node) == {
        "exp_avg/w": "optim/exp_avg/w",
        "exp_avg/b": "optim/exp_avg/b",
    }


def test_keys_of_two_ranks_that_share_a_path_are_refused() -> None:
    left = {"dict": [["m", {"dict": [[1, {"array": "m/1"}]]}]]}
    right = {"dict": [["m", {"dict": [["1", {"array": "m/1"}]]}]]}
    check_paths(left)
    with pytest.raises(StateError, match=r"m/1: keys of different types.*stored at m/1"):
        check_paths(merge_nodes([(0, left), (1, right)]))


def test_the_tree_of_a_step_is_a_dict() -> None:
    assert top_level({"dict": [["a", 1]]}) == {"a": 1}
    with pytest.raises(FormatError, match="must be a dict of items"):
        top_level([1])
