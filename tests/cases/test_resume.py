"""Field cases of resuming: B21 to B26: scalers, frozen layers, schedulers, wrappers, optimizers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases.tools import bits, line, refuse_load, same
from cases.tools import whole as gathered
from ranks.harness import Ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ucpstore

# B21: what an object says about itself comes back exactly.


class Scaler:
    """As a loss scaler: an update after loading would change what was loaded."""

    def __init__(self, growth_tracker: int = 0) -> None:
        self.values: dict[str, object] = {"scale": 65536.0, "growth_tracker": growth_tracker}
        self.updates = 0

    def update(self) -> None:
        self.updates += 1
        self.values["growth_tracker"] = 0

    def state_dict(self) -> dict[str, object]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.values = dict(state)


def test_b21_a_scaler_is_loaded_and_not_updated(tmp_path: Path) -> None:
    plain = {"scale": 65536.0, "growth_factor": 2.0, "growth_tracker": 1999, "_per": None}
    torch_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    torch_scaler._growth_tracker = None
    state = {"plain": plain, "scaler": Scaler(1999), "torch": torch_scaler}
    ucpstore.save(tmp_path, state, step=1)
    target = {
        "plain": {"scale": 1.0, "growth_factor": 0.0, "growth_tracker": 0, "_per": 1},
        "scaler": Scaler(3),
        "torch": torch.amp.GradScaler("cpu", init_scale=1.0),
    }
    ucpstore.load(tmp_path, target)
    assert target["plain"] == plain
    assert type(target["plain"]["growth_tracker"]) is int
    assert target["scaler"].values == {"scale": 65536.0, "growth_tracker": 1999}
    assert target["scaler"].updates == 0
    assert target["torch"].state_dict() == torch_scaler.state_dict()
    assert target["torch"].state_dict()["scale"] == 1024.0


def test_b21_random_states_come_back_exactly(tmp_path: Path) -> None:
    torch.manual_seed(5)
    generator, numpy_generator = torch.Generator().manual_seed(9), np.random.RandomState(3)
    python = random.Random(7)
    state = {
        "torch": torch.get_rng_state(),
        "generator": generator,
        "numpy": numpy_generator.get_state(),
        "python": python.getstate(),
    }
    ucpstore.save(tmp_path, state, step=1)
    expected = (torch.rand(3, generator=generator), numpy_generator.rand(), python.random())
    other, third = torch.Generator(), random.Random(1)
    target = {
        "torch": torch.zeros_like(torch.get_rng_state()),
        "generator": other,
        "numpy": np.random.RandomState(1).get_state(),
        "python": third.getstate(),
    }
    ucpstore.load(tmp_path, target)
    assert same(target["torch"], state["torch"])
    again = np.random.RandomState()
    again.set_state(target["numpy"])
    third.setstate(target["python"])
    assert same(torch.rand(3, generator=other), expected[0])
    assert (again.rand(), third.random()) == expected[1:]


# B22: frozen and partly trained parameters.


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1, self.layer2, self.layer3 = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer3(self.layer2(self.layer1(x)))


def frozen_run(
    seed: int, *, frozen: Iterable[str], shard: bool = False
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Three()
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    if shard:
        fully_shard(model, mesh=line())
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def save_frozen(url: str) -> dict[str, bytes]:
    """Layer 1 was never trained, layer 2 was and is frozen now, layer 3 is trained."""
    model, optimizer = frozen_run(1, frozen=["layer1"], shard=dist.is_initialized())
    train(model, optimizer, 1)
    model.layer2.requires_grad_(False)
    train(model, optimizer, 1)
    ucpstore.save(url, {"model": model, "optim": optimizer}, step=2)
    return moments(model, optimizer)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.linspace(-1, 1, 6).reshape(2, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    return {
        f"{name} {key}": bits(gathered(value))
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_frozen(url: str, frozen: list[str]) -> dict[str, bytes]:
    model, optimizer = frozen_run(2, frozen=frozen, shard=dist.is_initialized())
    ucpstore.load(url, {"model": model, "optim": optimizer})
    return moments(model, optimizer)


@pytest.mark.parametrize("size", [1, 2])
def test_b22_frozen_layers_keep_what_they_have(ranks: Ranks, tmp_path: Path, size: int) -> None:
    url = str(tmp_path / "s")
    saved = save_frozen(url) if size == 1 else ranks.run(size, save_frozen, url)[0]
    assert {name.split()[0].split(".")[0] for name in saved} == {"layer2", "layer3"}
    for frozen in (["layer1", "layer2"], ["layer1"], ["layer1", "layer2", "layer3"]):
        assert load_frozen(url, frozen) == saved
    assert ranks.run(2, load_frozen, url, ["layer1", "layer2"]) == [saved, saved]


def test_b22_a_layer_that_is_trainable_now_has_no_state(tmp_path: Path) -> None:
    saved = save_frozen(str(tmp_path))
    model, optimizer = frozen_run(2, frozen=[])
    target = {"model": model, "optim": optimizer}
    refuse_load(tmp_path, target, "optim.layer1.weight", "optim.layer1.bias", "frozen")
    assert moments(model, optimizer) == {}
    report = ucpstore.load(tmp_path, target, strict=False)
    assert sorted(report.missing) == ["optim.layer1.bias", "optim.layer1.weight"]
    assert moments(model, optimizer) == saved
    train(model, optimizer, 1)
    assert {state["step"].item() for state in optimizer.state.values()} == {1.0, 2.0, 3.0}


def test_b22_all_frozen_takes_the_weights(tmp_path: Path) -> None:
    torch.manual_seed(4)
    source = Three()
    ucpstore.save(tmp_path, {"model": source}, step=1)
    model = Three().requires_grad_(False)
    ucpstore.load(tmp_path, {"model": model})
    assert all(map(same, model.parameters(), source.parameters()))
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_b22_an_optimizer_of_the_trained_parameters_alone(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Three()
    model.layer1.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    train(model, optimizer, 1)
    ucpstore.save(tmp_path, {"model": model, "optim": optimizer}, step=1)
    other, again = frozen_run(2, frozen=[])
    target = {"model": other, "optim": again}
    refuse_load(tmp_path, target, "optim.layer1.weight", "optim.layer1.bias")
    report = ucpstore.load(tmp_path, target, strict=False)
    assert sorted(report.missing) == ["optim.layer1.bias", "optim.layer1.weight"]
    assert moments(other, again) == moments(model, optimizer)


# B23: what a scheduler adds to the groups.

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], object]] = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.3, total_steps=20),
    "multi step": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 5, 6]),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(
        o, [lambda n: 0.9**n, lambda n: 1 / (n + 1)]
    ),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(
        o, 0.01, 0.1, step_size_up=3, cycle_momentum=False
    ),
    "restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 4, 2),
    "chained": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [
            torch.optim.lr_scheduler.ConstantLR(o, 0.1, 4),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ]
    ),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 4),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        [4],
    ),
}


def scheduled(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, object]:
    torch.manual_seed(seed)
    model = Three()
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": weights, "lr": 0.1 * seed}, {"params": biases, "lr": 0.01 * seed}]
    optimizer = torch.optim.AdamW(groups)
    return model, optimizer, SCHEDULERS[kind](optimizer)


def rates(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: object, steps: int
) -> list[str]:
    found = []
    for _ in range(steps):
        train(model, optimizer, 1)
        scheduler.step()
        found += [float(group["lr"]).hex() for group in optimizer.param_groups]
    return found


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_b23_a_scheduler_goes_on_to_the_last_bit(tmp_path: Path, kind: str) -> None:
    model, optimizer, scheduler = scheduled(kind, 1)
    rates(model, optimizer, scheduler, 3)
    state = {"model": model, "optim": optimizer, "sched": scheduler}
    ucpstore.save(tmp_path, state, step=3)
    keys = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    uninterrupted = rates(model, optimizer, scheduler, 5)
    other, again, schedule = scheduled(kind, 2)
    ucpstore.load(tmp_path, {"model": other, "optim": again, "sched": schedule})
    assert [{k: v for k, v in group.items() if k != "params"} for group in again.param_groups] == (
        keys
    )
    assert all("initial_lr" in group for group in again.param_groups)
    assert rates(other, again, schedule, 5) == uninterrupted
    assert all(map(same, other.parameters(), model.parameters()))


def test_b23_a_group_without_the_key_gets_it(tmp_path: Path) -> None:
    model, optimizer, scheduler = scheduled("cosine", 1)
    rates(model, optimizer, scheduler, 3)
    ucpstore.save(tmp_path, {"model": model, "optim": optimizer, "sched": scheduler}, step=3)
    other = Three()
    bare = torch.optim.AdamW(other.parameters(), lr=0.5)
    merged = {"model": other, "optim": bare}
    refuse_load(tmp_path, merged, "group 0", "initial_lr")
    weights = [p for p in other.parameters() if p.dim() > 1]
    biases = [p for p in other.parameters() if p.dim() == 1]
    swapped = torch.optim.AdamW([{"params": biases}, {"params": weights}], lr=0.5)
    ucpstore.load(tmp_path, {"model": other, "optim": swapped})
    assert [group["initial_lr"] for group in swapped.param_groups] == [0.01, 0.1]


# B24: state_dict() of an optimizer, passed as a dict.


def test_b24_an_optimizer_dict_into_a_stepped_one(tmp_path: Path) -> None:
    model, optimizer = frozen_run(1, frozen=[])
    train(model, optimizer, 2)
    ucpstore.save(tmp_path, {"optimizer": optimizer.state_dict()}, step=1)
    other, again = frozen_run(2, frozen=[])
    train(other, again, 1)
    state = again.state_dict()
    ucpstore.load(tmp_path, {"optimizer": state})
    again.load_state_dict(state)
    saved = optimizer.state_dict()["state"]
    assert sorted(saved) == [0, 1, 2, 3, 4, 5]
    for number, values in saved.items():
        for key, value in values.items():
            assert same(again.state_dict()["state"][number][key], value)


def test_b24_an_optimizer_dict_that_never_stepped_is_refused_with_advice(tmp_path: Path) -> None:
    model, optimizer = frozen_run(1, frozen=[])
    train(model, optimizer, 2)
    ucpstore.save(tmp_path, {"optimizer": optimizer.state_dict()}, step=1)
    other, again = frozen_run(2, frozen=[])
    text = refuse_load(tmp_path, {"optimizer": again.state_dict()}, "optimizer.state", "pass the")
    assert all(f"optimizer.state.{number}" in text for number in range(6))
    refuse_load(tmp_path, {"model": other, "optimizer": again}, "optimizer", "state_dict()")


def test_b24_the_optimizer_itself_needs_no_step(tmp_path: Path) -> None:
    model, optimizer = frozen_run(1, frozen=[])
    train(model, optimizer, 2)
    ucpstore.save(tmp_path, {"model": model, "optimizer": optimizer}, step=1)
    other, again = frozen_run(2, frozen=[])
    ucpstore.load(tmp_path, {"model": other, "optimizer": again})
    assert moments(other, again) == moments(model, optimizer)
    text = refuse_load(tmp_path, {"model": other, "optimizer": again.state_dict()}, "optimizer")
    assert "KeyError" not in text


# B25: prefixes of wrappers.


class Named(nn.Module):
    """Has a real submodule called `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(3, 2)
        self._orig = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._orig(self.module(x))


class Parent(nn.Module):
    """Holds wrapped modules as parts, next to a part that is called like a wrapper's."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.module, self.plain = Named(), nn.Linear(2, 2)
        self.inner = nn.Sequential(wrap(nn.Linear(2, 3)), wrap(nn.Linear(3, 2)))


def inner_moves(folder: str) -> list[str]:
    """Parts wrapped by DDP, torch.compile or activation checkpointing, each into each."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    wrappers = {**WRAPPERS, "checkpoint": checkpoint_wrapper}
    wrong = []
    for saved_as, wrap in wrappers.items():
        torch.manual_seed(1)
        model = Parent(wrap)
        url = f"{folder}/{saved_as.replace(' ', '-')}"
        ucpstore.save(url, {"model": model}, step=1)
        for loaded_as, again in wrappers.items():
            torch.manual_seed(2)
            other = Parent(again)
            ucpstore.load(url, {"model": other})
            good = all(map(same, other.parameters(), model.parameters()))
            wrong += [] if good else [f"{saved_as} -> {loaded_as}"]
    return wrong


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bare": lambda m: m,
    "ddp": DistributedDataParallel,
    "compile": torch.compile,
    "ddp of compile": lambda m: DistributedDataParallel(torch.compile(m)),
    "compile of ddp": lambda m: torch.compile(DistributedDataParallel(m)),
}


def wrapped(kind: str, seed: int) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    bare = Named()
    outer = WRAPPERS[kind](bare)
    optimizer = torch.optim.AdamW(outer.parameters(), lr=0.1)
    for parameter in bare.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    if seed == 1:
        optimizer.step()
    return bare, outer, optimizer


def wrapper_moves(folder: str) -> list[str]:
    wrong = []
    for saved_as in WRAPPERS:
        bare, outer, optimizer = wrapped(saved_as, 1)
        url = f"{folder}/{saved_as.replace(' ', '-')}"
        ucpstore.save(url, {"model": outer, "optim": optimizer}, step=1)
        for loaded_as in WRAPPERS:
            other, target, again = wrapped(loaded_as, 2)
            ucpstore.load(url, {"model": target, "optim": again})
            good = all(map(same, other.parameters(), bare.parameters()))
            good = good and moments(other, again) == moments(bare, optimizer)
            wrong += [] if good else [f"{saved_as} -> {loaded_as}"]
    return wrong


def test_b25_wrappers_are_seen_through_in_both_directions(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, wrapper_moves, str(tmp_path)) == [[], []]
    names = {
        tuple(ucpstore.CheckpointStore(url).open()["model"]) for url in sorted(tmp_path.iterdir())
    }
    assert names == {("module.weight", "module.bias", "_orig.weight", "_orig.bias")}


def test_b25_wrapped_parts_of_a_module(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, inner_moves, str(tmp_path)) == [[], []]
    for url in tmp_path.iterdir():
        assert list(ucpstore.CheckpointStore(url).open()["model"]) == [
            "module.module.weight",
            "module.module.bias",
            "module._orig.weight",
            "module._orig.bias",
            "plain.weight",
            "plain.bias",
            "inner.0.weight",
            "inner.0.bias",
            "inner.1.weight",
            "inner.1.bias",
        ]


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_b25_prefixes_in_dicts_are_pointed_at(tmp_path: Path, prefix: str) -> None:
    model = nn.Linear(3, 2)
    named = {f"{prefix}{name}": value for name, value in model.state_dict().items()}
    ucpstore.save(tmp_path / "with", {"model": named}, step=1)
    ucpstore.save(tmp_path / "without", {"model": model}, step=1)
    first = prefix.split(".")[0]
    refuse_load(tmp_path / "with", {"model": nn.Linear(3, 2)}, f"'{first}.", "prefix")
    target = {name: torch.zeros_like(value) for name, value in named.items()}
    refuse_load(tmp_path / "without", {"model": target}, f"'{first}.", "prefix")


# B26: train, save, train on, against fresh, load, train on.


class Sign8(torch.optim.Optimizer):
    """A toy whose state is uint8, quantised anew each step, with a scale and a list beside it."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["codes"] = torch.full_like(parameter, 128, dtype=torch.uint8)
                    state["absmax"] = torch.ones(())
                    state["recent"] = [0.0, 0.0]
                    state["count"] = 0
                past = (state["codes"].float() - 128) / 127 * state["absmax"]
                mean = 0.9 * past + parameter.grad
                largest = mean.abs().max()
                state["absmax"] = gathered(largest)  # of a DTensor it is not reduced yet
                state["codes"] = (mean / state["absmax"] * 127 + 128).round().to(torch.uint8)
                state["recent"] = [state["recent"][1], float(state["absmax"])]
                state["count"] += 1
                parameter.add_(mean, alpha=-group["lr"] / state["count"])


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd without state": lambda p: torch.optim.SGD(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, lr_decay=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01, t0=3),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
    "uint8 state": lambda p: Sign8(p),
}


class Small(nn.Module):
    """A matrix, vectors, a 0-d and a one-element parameter, batch statistics, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5)
        self.norm, self.drop = nn.BatchNorm1d(7), nn.Dropout(0.25)
        self.scale, self.one = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(torch.tanh(self.norm(self.up(x))))) * self.scale + self.one


class Run:
    """A training run of which every part is in its state."""

    def __init__(self, kind: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Small()
        self.optimizer = OPTIMIZERS[kind](list(self.model.parameters()))
        self.state = {
            "model": self.model,
            "optim": self.optimizer,
            "random": torch.get_rng_state(),
        }

    def train(self, steps: int) -> None:
        for _ in range(steps):
            x = torch.randn(4, 5)

            def loss(x: torch.Tensor = x) -> torch.Tensor:
                self.optimizer.zero_grad()
                value = (self.model(x) - x).square().mean()
                value.backward()
                return value

            if isinstance(self.optimizer, torch.optim.LBFGS):
                self.optimizer.step(loss)
            else:
                loss()
                self.optimizer.step()

    def bytes(self) -> dict[str, object]:
        found: dict[str, object] = {k: bits(v) for k, v in self.model.state_dict().items()}
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                found[f"{names[parameter]} {key}"] = plain(value)
        found["groups"] = [
            {key: plain(value) for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        return found


def plain(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), bits(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_b26_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, kind: str) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run = Run(kind, 1)
        run.train(10)
        run.state["random"] = torch.get_rng_state()
        saved = run.bytes()
        ucpstore.save(tmp_path, run.state, step=10)
        assert run.bytes() == saved
        run.train(10)
        fresh = Run(kind, 2)
        ucpstore.load(tmp_path, fresh.state)
        assert fresh.bytes() == saved
        torch.set_rng_state(fresh.state["random"])
        fresh.train(10)
        assert fresh.bytes() == run.bytes()
        stepped = Run(kind, 3)
        stepped.train(2)
        ucpstore.load(tmp_path, stepped.state)
        assert stepped.bytes() == saved
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("saved_as", "loaded_as", "words"),
    [
        ("sgd", "adamw", ["dampening, momentum", "AdamW", "betas, eps"]),
        ("adamw", "sgd", ["betas, eps", "SGD", "dampening, momentum"]),
        ("rmsprop", "adam", ["alpha", "Adam", "betas"]),
        ("adagrad", "nadam", ["lr_decay", "NAdam", "momentum_decay"]),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_b26_another_kind_of_optimizer_is_refused(
    tmp_path: Path, saved_as: str, loaded_as: str, words: list[str], strict: bool
) -> None:
    run, other = Run(saved_as, 1), Run(loaded_as, 2)
    run.train(2)
    ucpstore.save(tmp_path, run.state, step=2)
    other.train(1)
    before = other.bytes()
    refuse_load(tmp_path, other.state, "optim", *words, strict=strict)
    assert other.bytes() == before


# Adafactor and LBFGS cannot step DTensors in torch 2.13.
SHARDED = {
    **{kind: OPTIMIZERS[kind] for kind in ("sgd", "adamw", "adagrad", "nadam")},
    **{kind: OPTIMIZERS[kind] for kind in ("radam", "rmsprop", "asgd", "adamax", "uint8 state")},
}


def sharded_run(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
    if dist.is_initialized():
        fully_shard(model, mesh=line())
    return model, SHARDED[kind](list(model.parameters()))


def train_sharded(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for number in range(steps):
        x = torch.linspace(-1, 1 + number, 20).reshape(4, 5)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, parameter in model.named_parameters():
        found[name] = bits(gathered(parameter))
        for key, value in optimizer.state[parameter].items():
            full = gathered(value) if isinstance(value, torch.Tensor) else value
            found[f"{name} {key}"] = plain(full)
    return found


def resume_sharded(folder: str) -> dict[str, object]:
    """By kind, what should be and what was: right after the load and after training on."""
    found = {}
    for kind in SHARDED:
        model, optimizer = sharded_run(kind, 1)
        train_sharded(model, optimizer, 3)
        ucpstore.save(f"{folder}/{kind}", {"model": model, "optim": optimizer}, step=3)
        saved = sharded_bytes(model, optimizer)
        train_sharded(model, optimizer, 3)
        other, again = sharded_run(kind, 2)
        ucpstore.load(f"{folder}/{kind}", {"model": other, "optim": again})
        loaded = sharded_bytes(other, again)
        train_sharded(other, again, 3)
        same_end = sharded_bytes(other, again) == sharded_bytes(model, optimizer)
        found[kind] = (saved, loaded == saved, same_end)
    return found


def test_b26_resumed_runs_of_sharded_optimizers(ranks: Ranks, tmp_path: Path) -> None:
    for results in ranks.run(2, resume_sharded, str(tmp_path)):
        assert [kind for kind, each in results.items() if each[1:] != (True, True)] == []
    for kind, (saved, _, _) in results.items():
        model, optimizer = sharded_run(kind, 3)
        ucpstore.load(tmp_path / kind, {"model": model, "optim": optimizer})
        assert sharded_bytes(model, optimizer) == saved, kind
        train_sharded(model, optimizer, 1)
