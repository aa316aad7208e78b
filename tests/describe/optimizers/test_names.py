"""Names of an optimizer's parameters."""

from __future__ import annotations

import pytest
import torch
from describe.engine import save
from describe.nets import Net, adamw
from torch import nn

from ucpstore.errors import StateError


def test_optimizers_need_the_module():
    net = Net()
    with pytest.raises(StateError, match=r"^optim: parameter 0 .*in no module of the state.*add"):
        save({"optim": adamw(net)})


def test_names_are_relative_to_the_module_and_prefixed_over_several():
    one, two = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    nested = save({"train": {"net": one}, "o": torch.optim.SGD(one.parameters())})
    assert nested.tree["dict"][1][1]["optimizer"]["names"] == ["weight"]
    both = torch.optim.SGD([*one.parameters(), *two.parameters()])
    checkpoint = save({"gen": one, "disc": two, "o": both})
    assert checkpoint.tree["dict"][2][1]["optimizer"]["names"] == ["gen.weight", "disc.weight"]
