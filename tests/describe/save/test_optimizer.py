"""What is stored of an optimizer, and what is refused."""

from __future__ import annotations

import pytest
import torch
from describe.engine import ALONE, load, save
from describe.nets import Net, adamw, train, trained
from torch import nn

from ucpstore.describe import describe
from ucpstore.errors import StateError, UnsupportedError


def test_states_lie_by_name_and_parameter():
    net, optimizer = trained()
    state = describe({"model": net, "optim": optimizer}, group_ranks=ALONE)
    names = {array.spec.path: array.spec.dimension_names for array in state.arrays}
    assert names["optim/exp_avg/a.weight"] == ("a.weight:0", "a.weight:1")
    assert "optim/step/a.weight" not in names
    held = {array.spec.path: array for array in state.arrays}
    exp_avg = optimizer.state[net.a.weight]["exp_avg"]
    assert held["optim/exp_avg/a.weight"].views[0].tensor.data_ptr() == exp_avg.data_ptr()


def test_states_of_another_shape_have_their_own_dimension_names():
    net = nn.Sequential(nn.Linear(3, 4, bias=False))
    optimizer = torch.optim.Adafactor(net.parameters())
    train(net, optimizer, 1)
    state = describe({"m": net, "o": optimizer}, group_ranks=ALONE)
    names = {array.spec.path: array.spec.dimension_names for array in state.arrays}
    assert names["o/row_var/0.weight"] == ("row_var.0.weight:0", "row_var.0.weight:1")


def test_param_names_are_not_stored():
    net = Net()
    checkpoint = save({"m": net, "o": torch.optim.SGD(net.named_parameters(), lr=0.1)})
    assert "param_names" not in str(checkpoint.tree)
    load({"m": net, "o": torch.optim.SGD(net.parameters(), lr=0.2)}, checkpoint)


def test_state_of_parameters_in_no_group_is_refused():
    net = Net()
    optimizer = adamw(net)
    optimizer.state[nn.Parameter(torch.ones(5))] = {"exp_avg": torch.ones(5)}
    with pytest.raises(StateError, match=r"^o: .*shape \(5,\) .*in none of its groups"):
        save({"m": net, "o": optimizer})


def test_states_whose_names_are_no_strings_are_refused():
    net, optimizer = trained()
    optimizer.state[net.scale][7] = torch.tensor(1.0)
    with pytest.raises(UnsupportedError, match=r"^o: .* state of scale under the key 7; names of"):
        save({"m": net, "o": optimizer})
