"""Hyper-parameters follow the parameters into the groups of the target."""

from __future__ import annotations

import pytest
import torch
from describe.engine import load, save
from describe.nets import A, B, Net, adamw, split

from ucpstore.errors import MismatchError


def test_b19_hyper_parameters_come_back_with_their_types():
    net = Net()
    source = adamw(net, lr=0.123, betas=(0.8, 0.95), amsgrad=True)
    source.param_groups[0]["tag"] = "x"
    other = Net()
    target = adamw(other, lr=1.0)
    target.param_groups[0]["mine"] = 1
    load({"m": other, "o": target}, save({"m": net, "o": source}))
    group = target.param_groups[0]
    assert (group["lr"], group["betas"], group["amsgrad"], group["tag"], group["mine"]) == (
        0.123,
        (0.8, 0.95),
        True,
        "x",
        1,
    )
    assert type(group["betas"]) is tuple


def test_tensor_hyper_parameters_are_filled_and_numbers_stay_numbers():
    net = Net()
    for saved, now in ((0.5, torch.tensor(1.0)), (torch.tensor(0.5), 1.0)):
        checkpoint = save({"m": net, "o": adamw(net, lr=saved)})
        target = adamw(net, lr=now)
        load({"m": net, "o": target}, checkpoint)
        lr = target.param_groups[0]["lr"]
        assert lr is now if isinstance(now, torch.Tensor) else type(lr) is float
        assert float(lr) == 0.5


def test_groups_can_be_reordered_and_split():
    net = Net()
    source = split(net, [A, B], [0.1, 0.2])
    other = Net()
    target = split(other, [["scale"], ["a.bias"], B[:2], ["a.weight"]], [9.0] * 4)
    load({"m": other, "o": target}, save({"m": net, "o": source}))
    assert [group["lr"] for group in target.param_groups] == [0.2, 0.1, 0.2, 0.1]


def test_groups_whose_parameters_disagree_are_refused():
    net = Net()
    checkpoint = save({"m": net, "o": split(net, [A, B], [0.1, 0.2])})
    target = split(net, [A + B], [1.0])
    with pytest.raises(
        MismatchError, match=r"o: group 0 .*different lr \(such as a\.weight and b\."
    ):
        load({"m": net, "o": target}, checkpoint)
    assert target.param_groups[0]["lr"] == 1.0


def test_groups_without_parameters_go_by_index():
    net = Net()
    source = split(net, [A + B], [0.1])
    source.param_groups.append({**source.param_groups[0], "params": [], "lr": 7.0})
    target = split(net, [A + B], [0.3])
    target.param_groups.append({**target.param_groups[0], "params": [], "lr": 8.0})
    load({"m": net, "o": target}, save({"m": net, "o": source}))
    assert [group["lr"] for group in target.param_groups] == [0.1, 7.0]
