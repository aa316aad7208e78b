"""Jobs that load what an engine saved, and engines that load what others saved.

Run by ranks of the tests.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from zero_job import (  # beside this file
    STATES,
    Kind,
    Net,
    Told,
    differences,
    engine_of,
    forget,
    parameters,
    quiet,
    started,
    told_by,
    train,
)

import ucpstore
from ucpstore.spec import replicate


def other_job(told: Told | None, sharded: bool) -> dict[str, Any]:
    """The same model in fp32 with torch's AdamW of what is trained; zeros where `told` is None.

    Plain, or `sharded` by FSDP2 over all ranks.
    """
    net = Net()
    masters, moments, weights = told or ({}, {}, {})
    with torch.no_grad():
        for name, tensor in [*net.named_parameters(), *net.named_buffers()]:
            tensor.copy_(masters.get(name, weights.get(name, torch.zeros_like(tensor))))
    if sharded:
        fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    adam = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.5)
    for name, parameter in net.named_parameters():
        if told and parameter.requires_grad:
            states = {key: _like(parameter, moments[key][name]) for key in STATES}
            adam.state[parameter] = {"step": torch.tensor(3.0), **states}
    return {"model": net, "optim": adam}


def _like(parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A copy of whole values, cut as the parameter is."""
    if not isinstance(parameter, DTensor):
        return values.clone()
    return distribute_tensor(values, parameter.device_mesh, parameter.placements)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save_other(url: str, told: Told, sharded: bool) -> None:
    """Save such a job that has what an engine told."""
    ucpstore.save(url, other_job(told, sharded), step=3)


def load_other(url: str, told: Told, sharded: bool) -> list[str]:
    """What differs in such a job that loads what an engine saved."""
    job = other_job(None, sharded)
    net, adam = job["model"], job["optim"]
    ucpstore.load(url, job, cast="model.frozen.weight")
    wrong = []
    masters, states, weights = told
    for name, tensor in [*net.named_parameters(), *net.named_buffers()]:
        if not torch.equal(_whole(tensor), masters.get(name, weights[name]).to(tensor.dtype)):
            wrong.append(name)
        own = adam.state.get(tensor, {})
        if name in masters:
            wrong += [
                f"{key} {name}"
                for key in STATES
                if not torch.equal(_whole(own[key]), states[key][name])
            ]
            wrong += [] if own["step"] == 3.0 else [f"step {name}"]
    lr = [group["lr"] for group in adam.param_groups]
    return [*wrong, *(["lr"] if lr != [0.01] else [])]


def save_one_group(url: str, kind: Kind) -> Told:
    """As `save_run`, with groups alike, so that another job may have one."""
    engine = engine_of(kind)
    train(engine, 3)
    for group in engine.optimizer.param_groups:
        group["weight_decay"] = 0.0
    ucpstore.save(url, engine, step=3)
    told = told_by(engine, kind)
    forget(engine)
    return told


def load_from_other(url: str, kind: Kind) -> Told:
    """What an engine has that loaded what such a job saved."""
    engine = engine_of(kind, seed=5)
    ucpstore.load(url, engine, cast="model.frozen.weight")
    told = told_by(engine, kind)
    forget(engine)
    return told


def round_trip_as_an_item(url: str) -> list[str]:
    """An engine beside other items, and by the names of DeepSpeed's own calls."""
    from ucpstore.integrations.deepspeed import load_checkpoint, save_checkpoint

    kind = Kind(3)
    engine = engine_of(kind)
    train(engine, 2)
    expected = told_by(engine, kind)
    ucpstore.save(url, {"engine": engine, "epoch": 7}, step=1)
    save_checkpoint(engine, url, client_state={"seen": 11})
    train(engine, 1, seed=9)
    state = {"engine": engine, "epoch": 0}
    ucpstore.load(url, state, step=1)
    wrong = differences(expected, told_by(engine, kind))
    train(engine, 1, seed=9)
    client = {"seen": 0}
    load_checkpoint(engine, url, client_state=client)
    wrong += differences(expected, told_by(engine, kind))
    counters = f"step {engine.global_steps}, samples {engine.global_samples}"
    forget(engine)
    return [*wrong, f"epoch {state['epoch']}, seen {client['seen']}, {counters}"]


def refusals(url: str) -> list[str]:
    """What an engine with a specification, one of fp16, and one of a pipeline are told."""
    engine = engine_of(Kind(1))
    found = []
    rules = {"model.*": replicate("dp")}
    spec = ucpstore.Spec({"dp": dist.get_world_size()}, rules)
    changes = (
        lambda: None,
        lambda: setattr(engine, "fp16_enabled", lambda: True),
        lambda: setattr(engine, "__class__", type("PipelineEngine", (type(engine),), {})),
    )
    for change in changes:
        change()
        try:
            ucpstore.save(url, engine, step=1, spec=spec)
        except ucpstore.StateError as error:
            found.append(str(error))
    return found


def refusals_on_nvme(url: str) -> list[str]:
    """What an engine of ZeRO-3 is told whose parameters are on NVMe, and its module alone.

    DeepSpeed then puts one small buffer in the place of a parameter's part.
    """
    engine = engine_of(Kind(3))
    parameter = next(p for p in engine.module.parameters() if p.ds_tensor.numel() > 1)
    parameter.ds_tensor.data = parameter.ds_tensor.data[:1].clone()
    engine.optimizer.params_in_nvme_and_cpu = True
    found = []
    for state in (engine, {"model": engine.module}):
        try:
            ucpstore.save(url, state, step=1)
        except ucpstore.StateError as error:
            found.append(str(error))
    return found


def within_a_step(url: str, kind: Kind) -> list[str]:
    """Save and load an engine that has accumulated one micro-batch of two; then between steps."""
    engine = engine_of(kind)
    train(engine, 2)
    ucpstore.save(url, engine, step=1)
    found = []
    train(engine, 1)
    for action in (ucpstore.save, ucpstore.load):
        try:
            action(url, engine, step=1)
        except ucpstore.UnsupportedError as error:
            found.append(str(error))
    train(engine, 1)
    ucpstore.load(url, engine, step=1)
    found.append(f"{engine.global_steps} steps, {engine.micro_steps % 2} micro-batches")
    forget(engine)
    return found


def without_an_optimizer(url: str, kind: Kind) -> list[str]:
    """Engines for evaluation: load what one that trains saved, and save again."""
    trained = engine_of(kind)
    train(trained, 1)
    ucpstore.save(url, trained, step=1)
    expected = told_by(trained, kind)[2]
    forget(trained)
    engine = engine_of(kind, seed=5, evaluates=True)
    for step in (1, 2):
        report = ucpstore.load(url, engine, step=step)
        assert not report.missing
        found = parameters(engine)
        wrong = [name for name in expected if not torch.equal(expected[name], found[name])]
        assert wrong == [], (step, wrong)
        ucpstore.save(url, engine, step=2, overwrite=True)
    forget(engine)
    return [*ucpstore.CheckpointStore(url).open(2)]


class Halves:
    """What Megatron's `mpu` tells: every two ranks are a job of their own, with replicas alone."""

    def __init__(self) -> None:
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        singles = [dist.new_group([rank]) for rank in range(4)]
        self.own, self.single = halves[dist.get_rank() // 2], singles[dist.get_rank()]

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.single

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank() % 2

    def get_data_parallel_world_size(self) -> int:
        return 2

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.own


def two_jobs(url: str, kind: Kind) -> list[str]:
    """Two engines in one process group, each on half of the ranks; what differs after a load."""
    from deepspeed.utils import groups

    half, halves = dist.get_rank() // 2, Halves()
    place = f"{url}-{half}"
    try:
        engine = engine_of(kind, seed=half, mpu=halves)
        train(engine, 2, seed=10 * half)
        expected = parameters(engine), _rows(engine)
        ucpstore.save(place, engine, step=1, process_group=halves.own)
        forget(engine)
        engine = engine_of(kind, seed=7, mpu=halves)
        train(engine, 1)
        ucpstore.load(place, engine, process_group=halves.own)
        found = parameters(engine), _rows(engine)
        forget(engine)
    finally:
        groups.mpu = None
    dist.barrier()
    weights = [name for name, each in expected[0].items() if not torch.equal(each, found[0][name])]
    rows = [str(at) for at, row in enumerate(expected[1]) if not torch.equal(row, found[1][at])]
    return weights + rows


def _rows(engine: Any) -> list[torch.Tensor]:
    """Masters and moments as the optimizer has them on this rank."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    parameters = [each for group in inner.param_groups for each in group["params"]]
    states = [inner.state[each] for each in parameters]
    moments = [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]
    return [each.detach().clone() for each in (*parameters, *moments)]


def experts(url: str, ep_size: int) -> str:
    """Save a layer of experts; what it is told, or "saved" once it was loaded again."""
    with quiet():
        started()
        from deepspeed.moe.layer import MoE

        inner = nn.Linear(4, 4, bias=False)
        net = nn.ModuleDict({"moe": MoE(4, inner, num_experts=2, ep_size=ep_size)})
        net["moe"].set_deepspeed_parallelism()
    for parameter in net.parameters():
        dist.broadcast(parameter.detach(), 0)
    expected = {name: each.detach().clone() for name, each in net.named_parameters()}
    try:
        ucpstore.save(url, {"model": net}, step=1)
    except ucpstore.UnsupportedError as error:
        return str(error)
    for parameter in net.parameters():
        parameter.detach().zero_()
    ucpstore.load(url, {"model": net})
    assert all(torch.equal(each, expected[name]) for name, each in net.named_parameters())
    return "saved"


def train_what_was_frozen(url: str, kind: Kind) -> tuple[str, list[str], list[str]]:
    """Load what was saved with a frozen layer into an engine that trains that layer.

    The refusal, what a load that is not strict misses, and what is wrong then.
    """
    engine = engine_of(kind)
    train(engine, 3)
    ucpstore.save(url, engine, step=3)
    expected = told_by(engine, kind)
    forget(engine)
    engine = engine_of(kind, seed=5, trained=True)
    train(engine, 1)
    before = told_by(engine, kind)
    message = "it was loaded"
    try:
        ucpstore.load(url, engine)
    except ucpstore.MismatchError as error:
        message = str(error)
    wrong = [f"refused, but {each}" for each in differences(before, told_by(engine, kind))]
    report = ucpstore.load(url, engine, strict=False)
    found = told_by(engine, kind)
    forget(engine)
    # What was saved without states keeps those of the engine, and has its parameter as master.
    name = "frozen.weight"
    for key in STATES:
        expected[1][key][name] = before[1][key][name]
    expected[0][name] = expected[2][name].float()
    return message, sorted(report.missing), [*wrong, *differences(expected, found)]
