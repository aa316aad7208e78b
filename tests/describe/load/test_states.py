"""States of single parameters: filled in place, or made anew as the optimizer wants them."""

from __future__ import annotations

import pytest
import torch
from describe.engine import ALONE, bits, load, save
from describe.nets import Net, adamw, train, trained
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ucpstore.describe import ArrayInfo, describe
from ucpstore.describe.load.narrow import Narrow
from ucpstore.describe.load.states import Destination, StateTarget, Steps
from ucpstore.describe.place import ROOT, Owner
from ucpstore.describe.ranks import Ranks
from ucpstore.describe.reads.reads import Reads


def test_existing_states_are_filled_in_place():
    net, optimizer = trained()
    checkpoint = save({"model": net, "optim": optimizer})
    other, target = trained()
    kept = target.state[other.a.weight]["exp_avg"]
    step = target.state[other.a.weight]["step"]
    load({"model": other, "optim": target}, checkpoint)
    assert target.state[other.a.weight]["exp_avg"] is kept
    assert target.state[other.a.weight]["step"] is step
    assert bits(kept) == bits(optimizer.state[net.a.weight]["exp_avg"])


def test_moments_keep_the_stored_dtype_under_a_bfloat16_parameter():
    net, optimizer = trained()
    checkpoint = save({"model": net, "optim": optimizer})
    low = Net().to(torch.bfloat16)
    resumed = adamw(low)
    load({"model": low, "optim": resumed}, checkpoint, cast="model.*")
    assert resumed.state[low.a.weight]["exp_avg"].dtype == torch.float32
    assert low.a.weight.dtype == torch.bfloat16
    assert bits(low.a.weight) == bits(net.a.weight.to(torch.bfloat16))


def test_b18_step_lies_where_the_group_wants_it():
    net = Net()
    fused = adamw(net, fused=True)
    train(net, fused, 3)
    checkpoint = save({"m": net, "o": fused})
    other = Net()
    plain = adamw(other, fused=False)
    load({"m": other, "o": plain}, checkpoint)
    train(other, plain, 1)
    assert plain.state[other.a.weight]["step"].item() == 4
    assert plain.state[other.a.weight]["step"].device.type == "cpu"


def test_b18_an_existing_step_moves_with_the_flags_of_the_group():
    net, optimizer = trained()
    checkpoint = save({"m": net, "o": optimizer})
    other = Net()
    fused = adamw(other, fused=True)
    train(other, fused, 1)
    before = fused.state[other.a.weight]["step"]
    load({"m": other, "o": fused}, checkpoint)
    assert fused.param_groups[0]["fused"] is None
    assert fused.state[other.a.weight]["step"] is not before
    assert fused.state[other.a.weight]["step"].item() == 2.0


def test_fresh_states_of_dtensor_parameters_take_their_placement(fake_ranks):
    fake_ranks(1, 2)
    ranks = {0: 0, 1: 1}
    mesh = DeviceMesh("cpu", [0, 1])

    def sharded() -> tuple[nn.Module, nn.Parameter]:
        net = nn.Linear(2, 3, bias=False)
        place = distribute_tensor(net.weight.detach(), mesh, [Shard(0)], src_data_rank=None)
        net.weight = nn.Parameter(place)
        return net, net.weight

    whole = nn.Linear(2, 3, bias=False)
    optimizer = adamw(whole)
    train_once = whole(torch.ones(1, 2)).sum()
    train_once.backward()
    optimizer.step()
    checkpoint = save({"m": whole, "o": optimizer})

    net, weight = sharded()
    target = adamw(net)
    load({"m": net, "o": target}, checkpoint, group_ranks=ranks)
    state = target.state[weight]
    assert isinstance(state["exp_avg"], DTensor)
    assert state["exp_avg"].placements == (Shard(0),)
    assert bits(state["exp_avg"]._local_tensor) == bits(
        optimizer.state[whole.weight]["exp_avg"][2:]
    )
    assert type(state["step"]) is torch.Tensor
    assert state["step"].item() == 1.0


def test_plain_states_of_a_dtensor_parameter_stay_plain(fake_ranks):
    fake_ranks(0, 2)
    mesh = DeviceMesh("cpu", [0, 1])
    net = nn.Linear(2, 3, bias=False)
    net.weight = nn.Parameter(
        distribute_tensor(net.weight.detach(), mesh, [Shard(0)], src_data_rank=None)
    )
    optimizer = torch.optim.SGD(net.parameters())
    optimizer.state[net.weight] = {"row_var": torch.tensor([1.0, 2.0, 3.0])}
    ranks = {0: 0, 1: 1}
    described = describe({"m": net, "o": optimizer}, group_ranks=ranks)
    by_path = {array.spec.path: array for array in described.arrays}
    assert by_path["o/row_var/weight"].plain
    assert not by_path["m/weight"].plain


def _target(optimizer: torch.optim.Optimizer, steps: Steps) -> StateTarget:
    """That of the one parameter, of which `optim/m` is stored."""
    place = ROOT.child("optim", ["optim"])
    reads = Reads(Ranks(0, ALONE), {"optim/m": ArrayInfo((2,), "float32")}, ())
    into = Destination(optimizer, place, reads, Narrow(place))
    ((parameter,),) = [group["params"] for group in optimizer.param_groups]
    return StateTarget(into, Owner(parameter, "w", "model.w"), into.now(parameter), steps)


def test_states_are_taken_from_the_optimizer_unless_something_else_is_read_into_them():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    ((parameter,),) = [group["params"] for group in optimizer.param_groups]
    own = optimizer.state[parameter]["one"] = optimizer.state[parameter]["two"] = torch.zeros(2)
    target = _target(optimizer, Steps())
    thunks = target.match({"one": {"array": "optim/m"}, "two": {"array": "optim/m"}})
    assert thunks["one"]() is own
    assert thunks["two"]() is not own
    assert [read.path for read in target.into.reads.found] == ["optim/m", "optim/m"]


def test_one_state_that_does_not_fit_keeps_no_other_from_being_matched():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    ((parameter,),) = [group["params"] for group in optimizer.param_groups]
    optimizer.state[parameter].update(bad="text", good=torch.zeros(2))
    target = _target(optimizer, Steps())
    thunks = target.match({"bad": {"array": "optim/m"}, "good": {"array": "optim/m"}})
    assert list(thunks) == ["good"]
    assert target.into.reads.differences.problems == [
        "optim.bad.w: the target is a str, but a tensor was saved"
    ]


@pytest.mark.parametrize(
    ("group", "loaded", "steps"),
    [
        ({}, {}, Steps(on_device=False, moves=False)),
        ({"fused": None}, {"lr": 1.0}, Steps(on_device=False, moves=False)),
        ({}, {"capturable": True}, Steps(on_device=True, moves=True)),
        ({"fused": True}, {"fused": False}, Steps(on_device=False, moves=True)),
        ({"fused": True}, {"capturable": True}, Steps(on_device=True, moves=False)),
    ],
)
def test_the_loaded_group_says_where_its_step_lies(group, loaded, steps):
    assert Steps.of(group, loaded) == steps
