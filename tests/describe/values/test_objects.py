"""Objects with state_dict and load_state_dict."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from describe.engine import bits, join, load, read, save
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import lr_scheduler

from ucpstore import PerRank, Spec
from ucpstore.describe import describe, match
from ucpstore.errors import MismatchError, StateError, UnsupportedError
from ucpstore.spec import padded, replicate, scaled, shard


class Box:
    """Keeps whatever it is given."""

    def __init__(self, **values: object) -> None:
        self.values: dict[str, object] = values

    def state_dict(self) -> dict[str, object]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.values = state


SCHEDULERS = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 2)], [3]
    ),
    "warm": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_b23_learning_rates_go_on_to_the_last_bit(name):
    def made() -> tuple[nn.Module, torch.optim.Optimizer, object]:
        net = nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.123)
        return net, optimizer, SCHEDULERS[name](optimizer)

    def step(net, optimizer, scheduler) -> float:
        net(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        scheduler.step(1.0) if name == "plateau" else scheduler.step()
        return optimizer.param_groups[0]["lr"]

    one, other = made(), made()
    for _ in range(3):
        step(*one)
    keys = ("model", "optim", "sched")
    load(dict(zip(keys, other, strict=True)), save(dict(zip(keys, one, strict=True))))
    assert other[1].param_groups[0].get("initial_lr") == one[1].param_groups[0].get("initial_lr")
    assert [step(*other) for _ in range(5)] == [step(*one) for _ in range(5)]
    assert other[2].state_dict() == one[2].state_dict()


def test_b21_a_scaler_is_restored_and_not_updated():
    def scaler(scale: float) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=scale)

    source = scaler(1024.0)
    source.load_state_dict({**source.state_dict(), "_growth_tracker": 1999})
    target = scaler(2.0)
    load({"scaler": target}, save({"scaler": source}))
    assert target.state_dict() == source.state_dict()
    assert target.state_dict()["_growth_tracker"] == 1999


def test_tensors_come_in_the_current_layout_and_the_rest_as_saved(fake_ranks):
    checkpoint = save(
        {
            "x": Box(
                w=torch.arange(4.0),
                new=torch.ones(2),
                n=(1, 2),
                long=torch.ones(3),
                s=torch.tensor(2),
            )
        }
    )
    fake_ranks(1, 2)
    mesh = DeviceMesh("cpu", [0, 1])
    current = distribute_tensor(torch.zeros(4), mesh, [Shard(0)], src_data_rank=None)
    target = Box(w=current, long=torch.zeros(5), s=torch.tensor(0), gone=1)
    load({"x": target}, checkpoint, group_ranks={0: 0, 1: 1})
    values = target.values
    assert list(values) == ["w", "new", "n", "long", "s"]
    assert isinstance(values["w"], DTensor)
    assert values["w"]._local_tensor.tolist() == [2.0, 3.0]
    assert current._local_tensor.tolist() == [0.0, 0.0]
    assert values["new"].tolist() == [1.0, 1.0]
    assert values["n"] == (1, 2)
    assert values["long"].shape == (3,)
    assert values["s"].dtype == torch.int64 and values["s"].item() == 2


def test_dtypes_of_current_tensors_count():
    checkpoint = save({"x": Box(w=torch.ones(2))})
    with pytest.raises(MismatchError, match=r"x\.w: stored as float32, the target is bfloat16"):
        load({"x": Box(w=torch.zeros(2, dtype=torch.bfloat16))}, checkpoint)
    target = Box(w=torch.zeros(2, dtype=torch.bfloat16))
    load({"x": target}, checkpoint, cast="x.w")
    assert target.values["w"].dtype == torch.bfloat16


def test_an_object_that_refuses_is_named():
    class Picky(Box):
        def load_state_dict(self, state: dict[str, object]) -> None:
            raise RuntimeError("wrong version")

    with pytest.raises(StateError, match=r"^x: it refused .*RuntimeError: wrong version"):
        load({"x": Picky(a=1)}, save({"x": Box(a=1)}))


def test_functions_in_an_objects_state_are_refused():
    with pytest.raises(UnsupportedError, match=r"^s\.f\.0: functions and classes"):
        save({"s": Box(f=[lambda: 1])})


def test_objects_come_last():
    order: list[str] = []
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

    class Late(Box):
        def load_state_dict(self, state: dict[str, object]) -> None:
            order.append(f"object sees lr {optimizer.param_groups[0]['lr']} and n {values['n']}")

    values = {"n": 0}
    saved = save(
        {"obj": Box(a=1), "v": {"n": 7}, "m": net, "o": torch.optim.SGD(net.parameters(), lr=0.25)}
    )
    load({"obj": Late(a=1), "o": optimizer, "v": values, "m": net}, saved)
    assert order == ["object sees lr 0.25 and n 7"]


def test_an_object_may_hold_a_module_like_dict():
    shadow = nn.Linear(2, 2)
    target = Box(shadow=nn.Linear(2, 2).state_dict())
    load({"ema": target}, save({"ema": Box(shadow=shadow.state_dict())}))
    assert bits(target.values["shadow"]["weight"]) == bits(shadow.weight)


# ---- under a specification ----

TWO = {0: 0, 1: 1}


def on_ranks(make, spec: Spec, target, ranks=TWO) -> list[dict[str, object]]:
    """The values of the target's objects on each rank, loaded from what `make` gives each."""
    checkpoint = join(
        [describe({"o": make(rank)}, group_ranks=ranks, rank=rank, spec=spec) for rank in ranks]
    )
    found = []
    for rank in ranks:
        state = {"o": target(rank)}
        read(
            match(
                state,
                checkpoint.tree,
                checkpoint.infos,
                group_ranks=ranks,
                rank=rank,
                spec=spec,
            ),
            checkpoint,
        )
        found.append(state["o"].values)
    return found


@pytest.mark.parametrize("kind", [torch.tensor, lambda values: np.array(values, np.float32)])
def test_local_tensors_of_objects_go_by_the_rules(kind):
    whole = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    parts = [whole[:2], [whole[2], [0.0, 0.0]]]
    rules = {
        "o.rows": [shard(0, "tp"), padded(0, 3)],
        "o.half": scaled("tp"),
        "o.same": replicate("tp"),
    }

    def make(rank):
        return Box(rows=kind(parts[rank]), half=kind([1.5]), same=kind([7.0]))

    def target(rank):
        return Box(rows=kind([[9.0, 9.0]] * 2), half=kind([9.0]), same=kind([9.0] * 3))

    found = on_ranks(make, Spec({"tp": 2}, rules), target)
    for rank, values in enumerate(found):
        assert type(values["rows"]) is type(kind([1.0]))
        assert values["rows"].tolist() == parts[rank]
        assert (values["half"].tolist(), values["same"].tolist()) == ([1.5], [7.0])


@pytest.mark.parametrize(
    ("target", "has"),
    [(lambda rank: Box(), "none there"), (lambda rank: Box(x=torch.ones(4)), r"one of shape \(4,")],
)
def test_an_object_must_have_the_shape_of_its_part(target, has):
    spec = Spec({"tp": 2}, {"o.x": shard(0, "tp")})
    with pytest.raises(MismatchError, match=rf"o\.x: stored with shape \(4,\).*target has {has}"):
        on_ranks(lambda rank: Box(x=torch.ones(2)), spec, target)


class Marked(Box):
    """Says of one value that it differs by rank."""

    axis: object = "tp"

    def state_dict(self) -> dict[str, object]:
        return {"n": PerRank(self.values["n"], self.axis), "all": 3}


def test_values_per_rank_inside_of_objects():
    spec, four = Spec({"dp": 2, "tp": 2}, {}), {rank: rank for rank in range(4)}
    found = on_ranks(lambda rank: Marked(n=rank % 2), spec, lambda rank: Marked(n=9), four)
    assert found == [{"n": rank % 2, "all": 3} for rank in four]
