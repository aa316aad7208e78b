"""Schedulers that count on the groups of an optimizer."""

from __future__ import annotations

import pytest
import torch
from describe.engine import load, save
from describe.nets import A, B, Net, split

from ucpstore.errors import MismatchError


def test_schedulers_of_regrouped_optimizers_are_refused():
    net = Net()
    source = split(net, [A, B], [0.1, 0.2])
    scheduler = torch.optim.lr_scheduler.StepLR(source, 2)
    checkpoint = save({"m": net, "o": source, "s": scheduler})
    target = split(net, [B, A], [0.1, 0.2])
    state = {"m": net, "o": target, "s": torch.optim.lr_scheduler.StepLR(target, 2)}
    with pytest.raises(
        MismatchError, match=r"s: its saved lists s\.base_lrs, .*2 saved groups of o"
    ):
        load(state, checkpoint)
    del state["s"]
    load(state, checkpoint)
    assert [group["lr"] for group in target.param_groups] == [0.2, 0.1]
