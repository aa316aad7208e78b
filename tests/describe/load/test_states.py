"""States of single parameters: filled in place, or made anew as the optimizer wants them."""

from __future__ import annotations

import torch
from describe.engine import bits, load, save
from describe.nets import Net, adamw, train, trained
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ucpstore.describe import describe


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
