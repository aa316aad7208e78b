"""The job of the arrangement matrix: a model of odd sizes, trained, saved, loaded, compared.

Reference bytes are gathered with `full_tensor()` before the save and kept in a file of their own,
which no part of ucpstore writes or reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

import ucpstore
from ucpstore.geometry import Box, Grid, Piece
from ucpstore.loading import requests
from ucpstore.plan import ChunkRead, ObjectRead


@dataclass(frozen=True)
class Arrangement:
    """How many ranks, and over which meshes they split the model."""

    name: str
    ranks: int
    fsdp: int = 1
    tp: int = 1
    replicas: int = 1


ARRANGEMENTS = {
    each.name: each
    for each in (
        Arrangement("single", 1),
        Arrangement("fsdp2", 2, fsdp=2),
        Arrangement("fsdp3", 3, fsdp=3),
        Arrangement("fsdp4", 4, fsdp=4),
        Arrangement("tp2", 2, tp=2),
        Arrangement("tp4", 4, tp=4),
        Arrangement("fsdp2xtp2", 4, fsdp=2, tp=2),
        Arrangement("hsdp2x2", 4, fsdp=2, replicas=2),
    )
}


class Block(nn.Module):
    """A column-parallel and a row-parallel layer whose inner size is 17, with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(13)
        self.up = nn.Linear(13, 17)
        self.down = nn.Linear(17, 13)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Odd(nn.Module):
    """Sizes that do not divide: 17 rows, 1 element, fewer rows than ranks, prime lengths.

    `wide` and `even` are above 1 MiB, so their objects hold several chunks; the rows of `wide`
    (1031, a prime) are cut where no chunk ends, those of `even` where one does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 13)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.one = nn.Parameter(torch.randn(1))
        self.few = nn.Parameter(torch.randn(2, 3))
        self.prime = nn.Parameter(torch.randn(101))
        self.wide = nn.Linear(257, 1031)
        self.even = nn.Linear(512, 1024, bias=False)
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        direct = self.one.square().sum() + self.few.sin().sum() + self.prime.tanh().sum()
        ramp = torch.linspace(-1, 1, 512)
        wide = self.wide(ramp[:257]).square().mean()
        return x.square().mean() * self.scale + 0.01 * direct + wide + self.even(ramp).tanh().mean()


def build(name: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model under an arrangement, and an optimizer with two groups."""
    arrangement = ARRANGEMENTS[name]
    torch.manual_seed(seed)
    model = Odd()
    if arrangement.ranks > 1:
        _parallelize(model, arrangement)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": 0.1, "lr": 3e-3},
            {"params": others, "weight_decay": 0.0, "lr": 1e-3 * seed},
        ],
        betas=(0.8, 0.95),
    )
    return model, optimizer


def _parallelize(model: Odd, arrangement: Arrangement) -> None:
    sizes = {"replicas": arrangement.replicas, "fsdp": arrangement.fsdp, "tp": arrangement.tp}
    axes = {axis: size for axis, size in sizes.items() if size > 1}
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    if arrangement.tp > 1:
        plan: dict[str, ParallelStyle] = {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "wide": ColwiseParallel(output_layouts=Replicate()),
            "even": ColwiseParallel(output_layouts=Replicate()),
        }
        for number in range(2):
            plan[f"blocks.{number}.up"] = ColwiseParallel(use_local_output=False)
            plan[f"blocks.{number}.down"] = RowwiseParallel()
        parallelize_module(model, mesh["tp"], plan)
    if arrangement.fsdp > 1:
        names = tuple(axis for axis in ("replicas", "fsdp") if axis in axes)
        for block in model.blocks:
            fully_shard(block, mesh=mesh[names])
        fully_shard(model, mesh=mesh[names])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    """Real optimizer steps on the same batch on every rank."""
    tokens = torch.arange(20).reshape(4, 5) % 31
    for _ in range(steps):
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor, gathered without ucpstore."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def gather(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Everything that has to survive, as full tensors and plain values."""
    found: dict[str, object] = {}
    for name, buffer in model.named_buffers():
        found[f"buffer {name}"] = whole(buffer)
    groups = {}
    for group in optimizer.param_groups:
        values = {key: value for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            groups[id(parameter)] = values
    for name, parameter in model.named_parameters():
        found[f"parameter {name}"] = whole(parameter)
        found[f"group {name}"] = groups[id(parameter)]
        for key, value in optimizer.state[parameter].items():
            found[f"{key} {name}"] = whole(value)
    return found


def save_job(name: str, url: str, reference: str) -> list[str]:
    """Train under an arrangement, keep the reference bytes, save; what the save changed."""
    model, optimizer = build(name, seed=1)
    train(model, optimizer)
    before = gather(model, optimizer)
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(before, reference)
    ucpstore.save(url, {"model": model, "optim": optimizer}, step=3)
    return differences(before, gather(model, optimizer))


def load_job(name: str, url: str, reference: str) -> list[str]:
    """Load into fresh objects under an arrangement; what differs from the reference."""
    model, optimizer = build(name, seed=2)
    ucpstore.load(url, {"model": model, "optim": optimizer})
    expected = torch.load(reference)
    return differences(expected, gather(model, optimizer))


def differences(expected: dict[str, object], found: dict[str, object]) -> list[str]:
    """Names whose bytes, dtype, shape or value differ, missing and extra ones included."""
    names = sorted(set(expected) ^ set(found))
    for name in sorted(set(expected) & set(found)):
        left, right = expected[name], found[name]
        if isinstance(left, torch.Tensor):
            assert isinstance(right, torch.Tensor)
            same = (
                left.dtype == right.dtype
                and left.shape == right.shape
                and left.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                == right.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
        else:
            same = repr(left) == repr(right)
        if not same:
            names.append(name)
    return names


def load_job_with_shifted_reads(name: str, url: str, reference: str) -> list[str]:
    """The same with a fault: the planner takes values from one row further in each chunk."""
    sound = requests.plan_reads

    def shifted(views: Sequence[Sequence[Piece]], grid: Grid) -> tuple[ObjectRead, ...]:
        return tuple(
            replace(read, chunks=tuple(map(_one_row_on, read.chunks)))
            for read in sound(views, grid)
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests, "plan_reads", shifted)
        return load_job(name, url, reference)


def _one_row_on(chunk: ChunkRead) -> ChunkRead:
    copies = []
    for view, inside, local in chunk.copies:
        offset, shape = inside.offset, inside.shape
        if shape and offset[0] + shape[0] < chunk.chunk.shape[0]:
            offset = (offset[0] + 1, *offset[1:])
        elif shape and offset[0] > 0:
            offset = (offset[0] - 1, *offset[1:])
        copies.append((view, Box(offset, shape), local))
    return replace(chunk, copies=tuple(copies))
