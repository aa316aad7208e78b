"""Optimizers, saved and loaded: never stepped, cast or created as a side effect."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from describe.engine import bits, load, save
from describe.nets import A, Net, adamw, split, train, trained
from torch import nn

from ucpstore.errors import MismatchError

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


def _all_bits(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return (value.dtype, tuple(value.shape), bits(value))
    if isinstance(value, dict):
        return [(key, _all_bits(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return (type(value), [_all_bits(item) for item in value])
    return (type(value), value)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_b26_training_goes_on_bit_for_bit(name):
    torch.manual_seed(0)
    net = Net()
    optimizer = OPTIMIZERS[name](list(net.parameters()))
    train(net, optimizer, 3)
    before = copy.deepcopy(optimizer.state_dict())
    checkpoint = save({"model": net, "optim": optimizer})
    assert _all_bits(optimizer.state_dict()) == _all_bits(before)

    fresh = Net()
    resumed = OPTIMIZERS[name](list(fresh.parameters()))
    load({"model": fresh, "optim": resumed}, checkpoint)
    assert _all_bits(resumed.state_dict()) == _all_bits(before)
    assert all(parameter.grad is None for parameter in fresh.parameters())

    train(net, optimizer, 3, seed=1)
    train(fresh, resumed, 3, seed=1)
    for one, other in zip(net.parameters(), fresh.parameters(), strict=True):
        assert bits(one) == bits(other)


@pytest.mark.parametrize("name", ["momentum", "adamw", "adafactor"])
def test_taking_a_fresh_optimizer_creates_nothing(name):
    net = Net()
    optimizer = OPTIMIZERS[name](list(net.parameters()))
    checkpoint = save({"model": net, "optim": optimizer})
    assert dict(optimizer.state) == {}
    assert not any(path.startswith("optim/") for path in checkpoint.arrays)

    other = Net()
    trained = OPTIMIZERS[name](list(other.parameters()))
    train(other, trained, 1)
    load({"model": other, "optim": trained}, checkpoint)
    assert dict(trained.state) == {}


def test_b22_frozen_layers():
    def net(frozen: set[str]) -> Net:
        made = Net()
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(name.split(".")[0] not in frozen)
        return made

    source = net({"a"})
    optimizer = adamw(source)
    train(source, optimizer, 1)
    source.scale.requires_grad_(False)
    checkpoint = save({"m": source, "o": optimizer})

    same = net({"a"})
    target = adamw(same)
    load({"m": same, "o": target}, checkpoint)
    assert same.a.weight not in target.state
    assert bits(target.state[same.scale]["exp_avg"]) == bits(
        optimizer.state[source.scale]["exp_avg"]
    )

    thawed = net(set())
    target = adamw(thawed)
    with pytest.raises(MismatchError, match=r"checkpoint: o\.a\.weight, o\.a\.bias"):
        load({"m": thawed, "o": target}, checkpoint)
    done = load({"m": thawed, "o": target}, checkpoint, strict=False)
    assert done.missing == ("o.a.weight", "o.a.bias")
    assert set(target.state) == {thawed.b.weight, thawed.b.bias, thawed.scale}

    load({"m": net({"a", "b", "scale"})}, checkpoint)


def test_parameters_that_never_had_a_gradient_are_no_difference():
    net = Net()
    optimizer = adamw(net)
    net.b(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    other = Net()
    target = adamw(other)
    load({"m": other, "o": target}, save({"m": net, "o": optimizer}))
    assert set(target.state) == {other.b.weight, other.b.bias}


def test_parameters_without_a_saved_set_are_missing():
    net = Net()
    checkpoint = save({"m": net, "o": split(net, [A], [0.1])})
    target = split(net, [A, ["scale"]], [1.0, 2.0])
    with pytest.raises(MismatchError, match=r"not in the checkpoint: o\.scale"):
        load({"m": net, "o": target}, checkpoint)
    assert load({"m": net, "o": target}, checkpoint, strict=False).missing == ("o.scale",)
    assert [group["lr"] for group in target.param_groups] == [0.1, 2.0]
    with pytest.raises(MismatchError, match=r"not in the target: o\.a\.bias"):
        load({"m": net, "o": split(net, [["a.weight"]], [1.0])}, checkpoint)


class Tied(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        if tied:
            self.head.weight = self.emb.weight


def test_b10_tied_moments_are_one_set_and_both_get_them():
    source = Tied(True)
    optimizer = adamw(source)
    source.head(source.emb(torch.tensor([1, 2]))).sum().backward()
    optimizer.step()
    checkpoint = save({"m": source, "o": optimizer})
    assert "o/exp_avg/emb.weight" in checkpoint.arrays
    assert "o/exp_avg/head.weight" not in checkpoint.arrays

    saved = bits(optimizer.state[source.emb.weight]["exp_avg"])
    for tied in (True, False):
        target = Tied(tied)
        resumed = adamw(target)
        load({"m": target, "o": resumed}, checkpoint)
        assert bits(resumed.state[target.emb.weight]["exp_avg"]) == saved
        assert bits(resumed.state[target.head.weight]["exp_avg"]) == saved


def test_nothing_changes_where_something_is_refused():
    net, optimizer = trained()
    checkpoint = save({"m": net, "o": optimizer})
    other = Net()
    target = adamw(other, lr=5.0)
    before = bits(other.a.weight)
    with pytest.raises(MismatchError, match=r"not in the checkpoint: x"):
        load({"m": other, "o": target, "x": 1}, checkpoint)
    assert bits(other.a.weight) == before
    assert dict(target.state) == {}
    assert target.param_groups[0]["lr"] == 5.0
