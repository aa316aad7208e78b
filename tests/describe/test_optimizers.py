"""Optimizers, saved and loaded: never stepped, cast or created as a side effect."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from describe.engine import ALONE, bits, load, save
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ucpstore.describe import describe
from ucpstore.errors import MismatchError, StateError, UnsupportedError

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


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 4)
        self.b = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x))) * self.scale


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        data = torch.randn(5, 3, generator=generator)

        def closure(data: torch.Tensor = data) -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(data).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)


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


def _adamw(net: nn.Module, **options: object) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), **options)


def _trained() -> tuple[Net, torch.optim.AdamW]:
    net = Net()
    optimizer = _adamw(net, lr=0.01)
    train(net, optimizer, 2)
    return net, optimizer


def test_states_lie_by_name_and_parameter():
    net, optimizer = _trained()
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


def test_existing_states_are_filled_in_place():
    net, optimizer = _trained()
    checkpoint = save({"model": net, "optim": optimizer})
    other, target = _trained()
    kept = target.state[other.a.weight]["exp_avg"]
    step = target.state[other.a.weight]["step"]
    load({"model": other, "optim": target}, checkpoint)
    assert target.state[other.a.weight]["exp_avg"] is kept
    assert target.state[other.a.weight]["step"] is step
    assert bits(kept) == bits(optimizer.state[net.a.weight]["exp_avg"])


def test_moments_keep_the_stored_dtype_under_a_bfloat16_parameter():
    net, optimizer = _trained()
    checkpoint = save({"model": net, "optim": optimizer})
    low = Net().to(torch.bfloat16)
    resumed = _adamw(low)
    load({"model": low, "optim": resumed}, checkpoint, cast="model.*")
    assert resumed.state[low.a.weight]["exp_avg"].dtype == torch.float32
    assert low.a.weight.dtype == torch.bfloat16
    assert bits(low.a.weight) == bits(net.a.weight.to(torch.bfloat16))


def test_b18_step_lies_where_the_group_wants_it():
    net = Net()
    fused = _adamw(net, fused=True)
    train(net, fused, 3)
    checkpoint = save({"m": net, "o": fused})
    other = Net()
    plain = _adamw(other, fused=False)
    load({"m": other, "o": plain}, checkpoint)
    train(other, plain, 1)
    assert plain.state[other.a.weight]["step"].item() == 4
    assert plain.state[other.a.weight]["step"].device.type == "cpu"


def test_b18_an_existing_step_moves_with_the_flags_of_the_group():
    net, optimizer = _trained()
    checkpoint = save({"m": net, "o": optimizer})
    other = Net()
    fused = _adamw(other, fused=True)
    train(other, fused, 1)
    before = fused.state[other.a.weight]["step"]
    load({"m": other, "o": fused}, checkpoint)
    assert fused.param_groups[0]["fused"] is None
    assert fused.state[other.a.weight]["step"] is not before
    assert fused.state[other.a.weight]["step"].item() == 2.0


def test_b19_hyper_parameters_come_back_with_their_types():
    net = Net()
    source = _adamw(net, lr=0.123, betas=(0.8, 0.95), amsgrad=True)
    source.param_groups[0]["tag"] = "x"
    other = Net()
    target = _adamw(other, lr=1.0)
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
        checkpoint = save({"m": net, "o": _adamw(net, lr=saved)})
        target = _adamw(net, lr=now)
        load({"m": net, "o": target}, checkpoint)
        lr = target.param_groups[0]["lr"]
        assert lr is now if isinstance(now, torch.Tensor) else type(lr) is float
        assert float(lr) == 0.5


def _split(net: Net, names: list[list[str]], lrs: list[float]) -> torch.optim.SGD:
    found = dict(net.named_parameters())
    return torch.optim.SGD(
        [
            {"params": [found[name] for name in group], "lr": lr}
            for group, lr in zip(names, lrs, strict=True)
        ],
        momentum=0.9,
    )


A, B = ["a.weight", "a.bias"], ["b.weight", "b.bias", "scale"]


def test_groups_can_be_reordered_and_split():
    net = Net()
    source = _split(net, [A, B], [0.1, 0.2])
    other = Net()
    target = _split(other, [["scale"], ["a.bias"], B[:2], ["a.weight"]], [9.0] * 4)
    load({"m": other, "o": target}, save({"m": net, "o": source}))
    assert [group["lr"] for group in target.param_groups] == [0.2, 0.1, 0.2, 0.1]


def test_groups_whose_parameters_disagree_are_refused():
    net = Net()
    checkpoint = save({"m": net, "o": _split(net, [A, B], [0.1, 0.2])})
    target = _split(net, [A + B], [1.0])
    with pytest.raises(
        MismatchError, match=r"o: group 0 .*different lr \(such as a\.weight and b\."
    ):
        load({"m": net, "o": target}, checkpoint)
    assert target.param_groups[0]["lr"] == 1.0


def test_groups_without_parameters_go_by_index():
    net = Net()
    source = _split(net, [A + B], [0.1])
    source.param_groups.append({**source.param_groups[0], "params": [], "lr": 7.0})
    target = _split(net, [A + B], [0.3])
    target.param_groups.append({**target.param_groups[0], "params": [], "lr": 8.0})
    load({"m": net, "o": target}, save({"m": net, "o": source}))
    assert [group["lr"] for group in target.param_groups] == [0.1, 7.0]


def test_param_names_are_not_stored():
    net = Net()
    checkpoint = save({"m": net, "o": torch.optim.SGD(net.named_parameters(), lr=0.1)})
    assert "param_names" not in str(checkpoint.tree)
    load({"m": net, "o": torch.optim.SGD(net.parameters(), lr=0.2)}, checkpoint)


def test_schedulers_of_regrouped_optimizers_are_refused():
    net = Net()
    source = _split(net, [A, B], [0.1, 0.2])
    scheduler = torch.optim.lr_scheduler.StepLR(source, 2)
    checkpoint = save({"m": net, "o": source, "s": scheduler})
    target = _split(net, [B, A], [0.1, 0.2])
    state = {"m": net, "o": target, "s": torch.optim.lr_scheduler.StepLR(target, 2)}
    with pytest.raises(
        MismatchError, match=r"s: its saved lists s\.base_lrs, .*2 saved groups of o"
    ):
        load(state, checkpoint)
    del state["s"]
    load(state, checkpoint)
    assert [group["lr"] for group in target.param_groups] == [0.2, 0.1]


def test_b22_frozen_layers():
    def net(frozen: set[str]) -> Net:
        made = Net()
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(name.split(".")[0] not in frozen)
        return made

    source = net({"a"})
    optimizer = _adamw(source)
    train(source, optimizer, 1)
    source.scale.requires_grad_(False)
    checkpoint = save({"m": source, "o": optimizer})

    same = net({"a"})
    target = _adamw(same)
    load({"m": same, "o": target}, checkpoint)
    assert same.a.weight not in target.state
    assert bits(target.state[same.scale]["exp_avg"]) == bits(
        optimizer.state[source.scale]["exp_avg"]
    )

    thawed = net(set())
    target = _adamw(thawed)
    with pytest.raises(MismatchError, match=r"checkpoint: o\.a\.weight, o\.a\.bias"):
        load({"m": thawed, "o": target}, checkpoint)
    done = load({"m": thawed, "o": target}, checkpoint, strict=False)
    assert done.missing == ("o.a.weight", "o.a.bias")
    assert set(target.state) == {thawed.b.weight, thawed.b.bias, thawed.scale}

    load({"m": net({"a", "b", "scale"})}, checkpoint)


def test_parameters_that_never_had_a_gradient_are_no_difference():
    net = Net()
    optimizer = _adamw(net)
    net.b(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    other = Net()
    target = _adamw(other)
    load({"m": other, "o": target}, save({"m": net, "o": optimizer}))
    assert set(target.state) == {other.b.weight, other.b.bias}


def test_parameters_without_a_saved_set_are_missing():
    net = Net()
    checkpoint = save({"m": net, "o": _split(net, [A], [0.1])})
    target = _split(net, [A, ["scale"]], [1.0, 2.0])
    with pytest.raises(MismatchError, match=r"not in the checkpoint: o\.scale"):
        load({"m": net, "o": target}, checkpoint)
    assert load({"m": net, "o": target}, checkpoint, strict=False).missing == ("o.scale",)
    assert [group["lr"] for group in target.param_groups] == [0.1, 2.0]
    with pytest.raises(MismatchError, match=r"not in the target: o\.a\.bias"):
        load({"m": net, "o": _split(net, [["a.weight"]], [1.0])}, checkpoint)


def test_optimizers_need_the_module():
    net = Net()
    with pytest.raises(StateError, match=r"^optim: parameter 0 .*in no module of the state.*add"):
        save({"optim": _adamw(net)})


def test_state_of_parameters_in_no_group_is_refused():
    net = Net()
    optimizer = _adamw(net)
    optimizer.state[nn.Parameter(torch.ones(5))] = {"exp_avg": torch.ones(5)}
    with pytest.raises(StateError, match=r"^o: .*shape \(5,\) .*in none of its groups"):
        save({"m": net, "o": optimizer})


def test_states_whose_names_are_no_strings_are_refused():
    net, optimizer = _trained()
    optimizer.state[net.scale][7] = torch.tensor(1.0)
    with pytest.raises(UnsupportedError, match=r"^o: .* state of scale under the key 7; names of"):
        save({"m": net, "o": optimizer})


def test_names_are_relative_to_the_module_and_prefixed_over_several():
    one, two = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    nested = save({"train": {"net": one}, "o": torch.optim.SGD(one.parameters())})
    assert nested.tree["dict"][1][1]["optimizer"]["names"] == ["weight"]
    both = torch.optim.SGD([*one.parameters(), *two.parameters()])
    checkpoint = save({"gen": one, "disc": two, "o": both})
    assert checkpoint.tree["dict"][2][1]["optimizer"]["names"] == ["gen.weight", "disc.weight"]


class Tied(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        if tied:
            self.head.weight = self.emb.weight


def test_b10_tied_moments_are_one_set_and_both_get_them():
    source = Tied(True)
    optimizer = _adamw(source)
    source.head(source.emb(torch.tensor([1, 2]))).sum().backward()
    optimizer.step()
    checkpoint = save({"m": source, "o": optimizer})
    assert "o/exp_avg/emb.weight" in checkpoint.arrays
    assert "o/exp_avg/head.weight" not in checkpoint.arrays

    saved = bits(optimizer.state[source.emb.weight]["exp_avg"])
    for tied in (True, False):
        target = Tied(tied)
        resumed = _adamw(target)
        load({"m": target, "o": resumed}, checkpoint)
        assert bits(resumed.state[target.emb.weight]["exp_avg"]) == saved
        assert bits(resumed.state[target.head.weight]["exp_avg"]) == saved


class Holder(torch.optim.Optimizer):
    """As containers of several optimizers do: its own `state` is empty."""

    def __init__(self, inner: list[torch.optim.Optimizer]) -> None:
        self.inner = inner
        super().__init__([p for o in inner for g in o.param_groups for p in g["params"]], {})

    def state_dict(self):
        return {str(at): inner.state_dict() for at, inner in enumerate(self.inner)}


class Wrapper(torch.optim.Optimizer):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def state_dict(self):
        return self.optimizer.state_dict()


def test_wrappers_are_seen_through_and_containers_refused():
    net, optimizer = _trained()
    assert save({"m": net, "o": Wrapper(optimizer)}).tree == save({"m": net, "o": optimizer}).tree
    with pytest.raises(UnsupportedError, match=r"^o: Holder keeps state .*one by one"):
        save({"m": net, "o": Holder([optimizer])})


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
    optimizer = _adamw(whole)
    train_once = whole(torch.ones(1, 2)).sum()
    train_once.backward()
    optimizer.step()
    checkpoint = save({"m": whole, "o": optimizer})

    net, weight = sharded()
    target = _adamw(net)
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


def test_nothing_changes_where_something_is_refused():
    net, optimizer = _trained()
    checkpoint = save({"m": net, "o": optimizer})
    other = Net()
    target = _adamw(other, lr=5.0)
    before = bits(other.a.weight)
    with pytest.raises(MismatchError, match=r"not in the checkpoint: x"):
        load({"m": other, "o": target, "x": 1}, checkpoint)
    assert bits(other.a.weight) == before
    assert dict(target.state) == {}
    assert target.param_groups[0]["lr"] == 5.0


def test_states_that_are_narrower_than_their_parameter_are_told():
    def job(dtype: torch.dtype | None) -> dict[str, object]:
        net = nn.Linear(2, 2)
        optimizer = torch.optim.Adam(net.parameters())
        for parameter in net.parameters() if dtype is not None else ():
            moment = torch.ones_like(parameter, dtype=dtype)
            optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": moment}
        return {"model": net, "optim": optimizer}

    narrow = save(job(torch.bfloat16))
    with pytest.warns(UserWarning) as caught:
        load(job(None), narrow)
    assert [str(each.message) for each in caught] == [
        "optim: the optimizer has no states yet, and 2 of those it gets are of torch.bfloat16, as "
        "stored, narrower than their parameters; most optimizers cannot step so. Pass "
        "cast=['optim.exp_avg.*'] to the load for states as wide as the parameters"
    ]
    # without a warning, which would be an error
    load(job(None), narrow, cast=["optim.exp_avg.*"])
    load(job(torch.bfloat16), narrow)
    load(job(None), save(job(torch.float64)))
