"""A small training job under DeepSpeed, and what DeepSpeed itself says that it holds.

Run by ranks of `tests/deepspeed/cells.py` and of the tests. Everything that is compared comes from
DeepSpeed's own functions, or from its buffers by its own offsets; nothing here calls ucpstore but
to save and load.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ucpstore

os.environ.setdefault("DS_ACCELERATOR", "cpu")

STATES = ("exp_avg", "exp_avg_sq")
Values = dict[str, torch.Tensor]


class Net(nn.Module):
    """Tied weights, a frozen parameter, a buffer, one parameter of one element, odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.first = nn.Linear(6, 13)
        self.frozen = nn.Linear(13, 13, bias=False)
        self.last = nn.Linear(13, 6)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(5))
        self.frozen.weight.requires_grad = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(self.embed(tokens)))
        hidden = self.last(hidden + self.frozen(hidden)) * self.scale
        return nn.functional.cross_entropy(
            self.head(hidden).flatten(0, 1).float(), tokens.flatten()
        )


@dataclass(frozen=True)
class Kind:
    """How an engine is set up."""

    stage: int
    dtype: str = "bf16"
    round_robin: bool = False
    persistent: int = 0
    """ZeRO-3 keeps parameters of fewer elements whole on all ranks."""
    fp32_gradients: bool = False
    accumulate: int = 1
    """Micro-batches of a step."""
    fused: bool = False
    """The optimizer that DeepSpeed takes for its own fused Adam, which it has to compile."""
    warmup: bool = False
    """A scheduler that raises the learning rate with each step."""


def quiet() -> contextlib.AbstractContextManager[object]:
    """DeepSpeed prints and warns a great deal."""
    stack = contextlib.ExitStack()
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")
    stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
    return stack


def started() -> Any:
    """DeepSpeed, in the process group of these ranks."""
    import deepspeed

    # All-reduces of inference have an operator of their own, which DeepSpeed compiles when it meets
    # a process group on the CPU: a minute, a compiler, and ninja in PATH, for nothing that trains.
    deepspeed.ops.__compatible_ops__ = {}
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    rank, count = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=count)
    deepspeed.init_distributed("gloo", verbose=False, dist_init_required=False)
    return deepspeed


def engine_of(
    kind: Kind,
    seed: int = 0,
    *,
    trained: bool = False,
    evaluates: bool = False,
    mpu: object = None,
) -> Any:
    """A fresh engine with two parameter groups; `trained` thaws what is frozen.

    One that `evaluates` has no optimizer. `mpu` tells DeepSpeed the groups, as Megatron's does.
    """
    with quiet():
        deepspeed = started()
        torch.manual_seed(seed)
        net = Net()
        net.frozen.weight.requires_grad = trained
        flat = [p for p in net.parameters() if p.dim() < 2]
        deep = [p for p in net.parameters() if p.dim() >= 2]
        optimizer = torch.optim.AdamW(
            [{"params": deep, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}], lr=0.01
        )
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": kind.accumulate,
            "bf16": {"enabled": kind.dtype == "bf16"},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": kind.stage,
                "round_robin_gradients": kind.round_robin,
                "stage3_param_persistence_threshold": kind.persistent,
                "overlap_comm": False,
            },
        }
        if kind.warmup:
            config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 50}}
        if kind.fp32_gradients:
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        engine, *_ = deepspeed.initialize(
            model=net, optimizer=None if evaluates else optimizer, config=config, mpu=mpu
        )
        if kind.fused:
            engine.optimizer = _fused(deep, flat)
    return engine


def _fused(*groups: list[nn.Parameter]) -> Any:
    """One that does not know its engine, which DeepSpeed allows."""
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer

    adam = torch.optim.AdamW([{"params": group} for group in groups], lr=0.01)
    return FP16_Optimizer(adam, low_precision_dtype=torch.bfloat16)


def train(engine: Any, steps: int, seed: int = 1) -> None:
    """Steps on a batch that is the same on any number of ranks."""
    with quiet():
        for step in range(steps):
            generator = torch.Generator().manual_seed(seed + step)
            tokens = torch.randint(0, 11, (1, 7), generator=generator)
            engine.backward(engine(tokens))
            engine.step()


def named(engine: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Each parameter once, under its first name."""
    yield from engine.module.named_parameters()


def reported(engine: Any, kind: Kind) -> tuple[Values, dict[str, Values]]:
    """Whole masters and states by name, as DeepSpeed's safe_get_full_* give them, on all ranks.

    Those are not there for stage 0, where the optimizer's own tensors are whole, and are wrong with
    round_robin_gradients, where the rows are gathered by the optimizer's offsets.
    """
    masters: Values = {}
    states: dict[str, Values] = {key: {} for key in STATES}
    optimizer = engine.optimizer
    if kind.fused:
        return _by_rows(engine, "fp32_groups_flat", "fp16_groups", 1, cut=False)
    if kind.stage == 0:
        pairs = zip(
            (p for g in _weights_of(engine) for p in g),
            (p for g in optimizer.param_groups for p in g["params"]),
            strict=True,
        )
        inner = getattr(optimizer, "optimizer", optimizer)
        names = {parameter: name for name, parameter in named(engine)}
        for weight, master in pairs:
            if not weight.requires_grad:
                continue
            masters[names[weight]] = master.detach().float().clone()
            for key in STATES:
                states[key][names[weight]] = inner.state[master][key].clone()
        return masters, states
    if kind.round_robin:
        align = 16 if optimizer.parameter_alignment else 1
        names = ("single_partition_of_fp32_groups", "round_robin_bit16_groups")
        return _by_rows(engine, *names, align)
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if hasattr(optimizer, "_hp_optimizer_states_linked"):
        # 0.19.8 links the states of the first group only, after the first step
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in named(engine):
        if not parameter.requires_grad:
            continue
        masters[name] = safe_get_full_fp32_param(parameter).detach().clone()
        for key in STATES:
            states[key][name] = safe_get_full_optimizer_state(parameter, key).clone()
    return masters, states


def linked_states(engine: Any) -> Values:
    """What DeepSpeed says of the first moments as they are linked now."""
    from deepspeed.utils import safe_get_full_optimizer_state

    trained = [(name, each) for name, each in named(engine) if each.requires_grad]
    return {name: safe_get_full_optimizer_state(each, "exp_avg").clone() for name, each in trained}


def _weights_of(engine: Any) -> list[list[nn.Parameter]]:
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp16_groups"):
        return optimizer.fp16_groups
    return [group["params"] for group in optimizer.param_groups]


def _by_rows(
    engine: Any, rows_name: str, groups_name: str, align_bytes: int, *, cut: bool = True
) -> tuple[Values, dict[str, Values]]:
    """From rows, or parts of them where `cut`, in which tensors begin at multiples of bytes."""
    optimizer = engine.optimizer
    masters: Values = {}
    states: dict[str, Values] = {key: {} for key in STATES}
    names = {parameter: name for name, parameter in named(engine)}
    groups = getattr(optimizer, groups_name)
    for row, group in zip(getattr(optimizer, rows_name), groups, strict=True):
        rows = {"": row.detach(), **{k: optimizer.optimizer.state[row][k] for k in STATES}}
        for key, part in rows.items():
            parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, part)
            parts = parts if cut else [part]
            whole = torch.cat(parts)
            into = states[key] if key else masters
            start = 0
            for parameter in group:
                stop = start + parameter.numel()
                into[names[parameter]] = whole[start:stop].view(parameter.shape).clone()
                step = max(align_bytes // parameter.element_size(), 1)
                start = -(-stop // step) * step
    return masters, states


def parameters(engine: Any) -> Values:
    """Whole parameters, frozen ones too, and buffers."""
    import deepspeed

    found: Values = {}
    for name, parameter in named(engine):
        with deepspeed.zero.GatheredParameters([parameter]):
            found[name] = parameter.detach().clone()
    found.update((name, buffer.clone()) for name, buffer in engine.module.named_buffers())
    return found


Told = tuple[Values, dict[str, Values], Values]
"""Masters, states by key, and parameters with buffers."""


def told_by(engine: Any, kind: Kind) -> Told:
    """All that is compared. Every rank calls it and gets the same."""
    return (*reported(engine, kind), parameters(engine))


def save_run(url: str, kind: Kind, steps: int = 3) -> Told:
    """Train, save, and tell what was saved."""
    engine = engine_of(kind)
    train(engine, steps)
    ucpstore.save(url, engine, step=steps)
    told = told_by(engine, kind)
    forget(engine)
    return told


def load_run(url: str, kind: Kind) -> tuple[Told, list[str]]:
    """Load into an engine that was made otherwise; what DeepSpeed then tells, and what is wrong."""
    engine = engine_of(kind, seed=5)
    if kind.persistent or kind.stage == 2:
        # From then on some are kept whole, and the states of the first group are linked.
        train(engine, 1, seed=70)
    # what is frozen has no master, and narrower engines have to say that they want it
    ucpstore.load(url, engine, cast="model.frozen.weight")
    kept = {n: p.detach().clone() for n, p in named(engine) if getattr(p, "ds_persist", False)}
    wrong = [] if engine.global_steps == 3 else [f"global_steps is {engine.global_steps}"]
    linked = linked_states(engine) if kind.stage in (1, 2) and not kind.round_robin else {}
    told = told_by(engine, kind)
    masters, states, weights = told
    wrong += [
        f"{name} is not linked"
        for name, tensor in linked.items()
        if not torch.equal(tensor, states["exp_avg"][name])
    ]
    wrong += [
        f"{name} is not its master"
        for name, master in masters.items()
        if not torch.equal(master.to(weights[name].dtype), weights[name])
    ]
    wrong += [
        f"rank {dist.get_rank()}: {name} is kept whole with other values"
        for name, whole in kept.items()
        if not torch.equal(whole, weights[name])
    ]
    forget(engine)
    return told, wrong


def continue_run(url: str, kind: Kind) -> list[bool]:
    """Whether two steps after a load are those of the uninterrupted run, bit for bit."""
    engine = engine_of(kind)
    train(engine, 5)
    expected = told_by(engine, kind)
    forget(engine)
    engine = engine_of(kind, seed=5)
    ucpstore.load(url, engine)
    train(engine, 2, seed=4)
    found = told_by(engine, kind)
    forget(engine)
    return [not differences(expected, found)]


def differences(expected: Told, found: Told) -> list[str]:
    """Names of what is not bit-equal, or only on one side."""
    pairs = [("master", expected[0], found[0]), ("parameter", expected[2], found[2])]
    pairs += [(key, expected[1][key], found[1][key]) for key in STATES]
    wrong = []
    for what, left, right in pairs:
        wrong += [f"{what} {name}" for name in left.keys() ^ right.keys()]
        wrong += [
            f"{what} {name}"
            for name in left.keys() & right.keys()
            if not torch.equal(left[name], right[name])
        ]
    return sorted(wrong)


def forget(engine: Any) -> None:
    with quiet():
        engine.destroy()
