"""Flats and the parameters in whose memory they lie."""

from __future__ import annotations

import pytest
import torch
from describe.engine import save
from describe.nets import SHAPES, Shaped
from torch import nn

from ucpstore import Flat, FlatOptimizer
from ucpstore.errors import StateError


def test_flats_of_a_parameter_come_in_any_order() -> None:
    net = Shaped(SHAPES, 1, 2)
    row = nn.Parameter(torch.tensor([5.0, 5, 5, 6, 6]).double())
    flats = [Flat(row.detach()[3:], {"b": (2,)}), Flat(row.detach()[:3], {"a": (3,)})]
    optimizer = FlatOptimizer(torch.optim.SGD([row], lr=0.1), flats)
    saved = save({"model": net, "optim": optimizer})
    assert saved.arrays["optim/master/a"].tolist() == [5, 5, 5]
    assert saved.arrays["optim/master/b"].tolist() == [6, 6]


def test_a_flat_before_the_parameter_lies_in_none() -> None:
    memory = torch.zeros(5)
    parameter = nn.Parameter(memory[3:])
    flats = [Flat(memory[:3], {"a": (3,)}), Flat(parameter, {"b": (2,)})]
    optimizer = FlatOptimizer(torch.optim.SGD([parameter], lr=0.1), flats)
    with pytest.raises(StateError, match="with a lies in no parameter of the optimizer"):
        save({"model": Shaped(SHAPES, 1, 2), "optim": optimizer})
