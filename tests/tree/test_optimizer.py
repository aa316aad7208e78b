"""The optimizer node: its stored form and the rules of merging it over ranks."""

import json

import pytest

from ucpstore.errors import FormatError, StateError
from ucpstore.tree.merge import merge
from ucpstore.tree.optimizer import Group, OptimizerNode, from_node, leaves, to_node

STEP = {"scalar": {"dtype": "float32", "data": "AACAPw=="}}


def adam(names, lr=0.1, index=0, step=STEP):
    states = {
        name: {
            "step": step,
            "exp_avg": {"array": f"optim/exp_avg/{name}"},
            "exp_avg_sq": {"array": f"optim/exp_avg_sq/{name}"},
        }
        for name in names
    }
    return OptimizerNode("optim", (Group(index, tuple(names), {"lr": lr}),), states)


def test_names_and_equal_states_are_stored_once():
    names = [f"layers.{n}.weight" for n in range(1000)]
    node = to_node(adam(names))
    assert node["optimizer"]["states"] == [
        {
            "members": [[0, 1000]],
            "values": [["step", STEP], ["exp_avg", {"array": ""}], ["exp_avg_sq", {"array": ""}]],
        }
    ]
    assert json.dumps(node).count("layers.7.weight") == 1
    assert from_node(node) == adam(names)


def test_unusual_arrays_nested_states_and_empty_groups_survive():
    nested = {"dict": [[0, {"array": "optim/shampoo/b/factors/0"}], ["empty", {"dict": []}]]}
    optimizer = OptimizerNode(
        "optim",
        (
            Group(0, ("b", "a"), {"lr": 0.1, "betas": {"tuple": [0.9, 0.95]}}),
            Group(1, (), {"lr": 0.2}),
        ),
        {
            "b": {"exp_avg": {"array": "elsewhere"}, "shampoo": nested},
            "a": {"exp_avg": {"array": "optim/exp_avg/a"}},
            "not in a group": {"x": 1},
        },
        {"version": 3},
    )
    assert from_node(json.loads(json.dumps(to_node(optimizer)))) == optimizer


def test_the_path_of_a_state_is_escaped():
    optimizer = OptimizerNode(
        "optim", (Group(0, ("a/b",), {}),), {"a/b": {"m": {"array": "optim/m/a%2Fb"}}}
    )
    assert to_node(optimizer)["optimizer"]["states"][0]["values"] == [["m", {"array": ""}]]
    assert from_node(to_node(optimizer)) == optimizer


def test_leaves_have_readable_paths():
    assert dict(leaves(adam(["w"]), "optim")) == {
        "optim.param_groups.0.lr": 0.1,
        "optim.step.w": STEP,
        "optim.exp_avg.w": {"array": "optim/exp_avg/w"},
        "optim.exp_avg_sq.w": {"array": "optim/exp_avg_sq/w"},
    }


@pytest.mark.parametrize(
    "change",
    [
        {"names": ["a", 1]},
        {"states": [{"members": [[0, 2]], "values": []}]},
        {"groups": [{"index": 0, "members": [[-1, 1]], "values": []}]},
        {"groups": 5},
        {"future": 1},
    ],
)
def test_other_forms_are_refused(change):
    node = to_node(adam(["a"]))
    with pytest.raises(FormatError, match=r"optimizer|parameter"):
        from_node({"optimizer": {**node["optimizer"], **change}})


def merged(*optimizers):
    return from_node(merge([(3 * at, to_node(opt)) for at, opt in enumerate(optimizers)], "optim"))


def test_pipeline_stages_unite_names_of_equal_groups():
    assert merged(adam(["a", "b"]), adam(["c"])) == adam(["a", "b", "c"])


def test_groups_of_other_values_stay_apart():
    found = merged(adam(["a"], lr=0.1), adam(["b"], lr=0.2), adam(["c"], lr=0.1, index=1))
    assert [(g.index, g.names, g.values["lr"]) for g in found.groups] == [
        (0, ("a",), 0.1),
        (0, ("b",), 0.2),
        (1, ("c",), 0.1),
    ]


def test_the_order_of_a_groups_keys_does_not_matter():
    left = OptimizerNode("optim", (Group(0, ("a",), {"lr": 1, "eps": 2}),), {})
    right = OptimizerNode("optim", (Group(0, ("b",), {"eps": 2, "lr": 1}),), {})
    assert merged(left, right).groups == (Group(0, ("a", "b"), {"lr": 1, "eps": 2}),)


def test_states_of_one_parameter_unite():
    left = OptimizerNode("optim", (Group(0, ("a",), {}),), {"a": {"step": 1}})
    right = OptimizerNode("optim", (Group(0, ("a",), {}),), {"a": {"step": 1, "extra": 2}})
    assert merged(left, right).states == {"a": {"step": 1, "extra": 2}}


def test_another_learning_rate_of_a_parameter_is_refused():
    with pytest.raises(
        StateError, match=r"optim: parameter a: has lr = 0.1 on rank 0, 0.2 on r.*3"
    ):
        merged(adam(["a"], lr=0.1), adam(["a"], lr=0.2))


def test_a_parameter_in_other_groups_is_refused():
    with pytest.raises(StateError, match="parameter a: is in group 0 on rank 0, in group 1 on ra"):
        merged(adam(["a"]), adam(["a"], index=1))


def test_another_state_value_is_refused():
    with pytest.raises(StateError, match=r"optim\.step\.a: rank 0 has .*rank 3 has 5"):
        merged(adam(["a"]), adam(["a"], step=5))


def test_unequal_groups_without_parameters_are_refused():
    left = OptimizerNode("optim", (Group(1, (), {"lr": 0.1}),), {})
    right = OptimizerNode("optim", (Group(1, (), {"lr": 0.2, "x": None}),), {})
    with pytest.raises(StateError, match=r"param_groups\.1, which has no parameters: has lr"):
        merged(left, right)
    missing = OptimizerNode("optim", (Group(1, (), {"lr": 0.1, "x": None}),), {})
    with pytest.raises(StateError, match="has x = no such key on rank 0, null on rank 3"):
        merged(left, missing)
