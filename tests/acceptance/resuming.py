"""Rank functions of the resuming tests: train, save, go on; or load and go on."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import ucpstore

BATCH = 12
BEFORE, AFTER = 10, 50


class Net(nn.Module):
    """Residual layers with dropout between them."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(24, 64) for _ in range(3))
        self.downs = nn.ModuleList(nn.Linear(64, 24) for _ in range(3))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(24, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(torch.tanh(up(self.dropout(x))))
        return self.head(x)


class Job:
    """A job under `fsdp` x `tp`, with everything that it takes to go on."""

    def __init__(self, fsdp: int, tp: int, dropout: float, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Net(dropout)
        self.fsdp, self.dp_rank = fsdp, 0
        axes = {name: size for name, size in (("fsdp", fsdp), ("tp", tp)) if size > 1}
        if axes:
            mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
            if tp > 1:
                plan = {"ups.*": ColwiseParallel(), "downs.*": RowwiseParallel()}
                parallelize_module(self.model, mesh["tp"], plan)
            if fsdp > 1:
                self.dp_rank = mesh.get_local_rank("fsdp")
                fully_shard(self.model, mesh=mesh["fsdp"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 100)
        # Dropout draws from the default generator, and each rank of the data axis its own.
        torch.manual_seed(1000 * seed + self.dp_rank)
        self.seen = 0

    def state(self, *, random: bool) -> dict[str, object]:
        state: dict[str, object] = {
            "model": self.model,
            "optim": self.optimizer,
            "schedule": self.schedule,
            "progress": {"seen": self.seen},
        }
        if random:
            state["random"] = torch.default_generator
        return state

    def restore(self, url: str, *, random: bool) -> None:
        state = self.state(random=random)
        ucpstore.load(url, state)
        self.seen = state["progress"]["seen"]  # type: ignore[index]

    def train(self, steps: int) -> list[float]:
        """Losses over the global batch, which is the same under every arrangement."""
        losses = []
        for _ in range(steps):
            draw = torch.Generator().manual_seed(self.seen)
            x = torch.randn(BATCH, 24, generator=draw)
            y = x.square().mean(1, keepdim=True)
            size = BATCH // self.fsdp
            mine = slice(self.dp_rank * size, (self.dp_rank + 1) * size)
            loss = (self.model(x[mine]) - y[mine]).square().mean()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            total = loss.detach().double()
            if dist.is_initialized():
                dist.all_reduce(total)
                total /= dist.get_world_size()
            losses.append(total.item())
            self.seen += 1
        return losses


def uninterrupted(url: str, fsdp: int, tp: int, dropout: float) -> list[float]:
    """Train, save, go on: the losses after the save."""
    job = Job(fsdp, tp, dropout, seed=1)
    job.train(BEFORE)
    ucpstore.save(url, job.state(random=True), step=BEFORE)
    return job.train(AFTER)


def resumed(url: str, fsdp: int, tp: int, dropout: float, reset: str = "") -> list[float]:
    """Load into fresh objects and go on; `reset` spoils one state of the optimizer first."""
    job = Job(fsdp, tp, dropout, seed=2)
    job.restore(url, random=dropout > 0)
    if reset:
        for state in job.optimizer.state.values():
            state[reset].zero_()
    return job.train(AFTER)
