"""FSDP2 and tensor parallelism over real ranks, against what torch itself gathers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from describe.engine import join, load, read
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from ucpstore.describe import LocalState, describe, match


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.emb(tokens)
        hidden = hidden + self.down(torch.relu(self.up(hidden)))
        return self.head(self.norm(hidden))


def _sharded(kind: str) -> nn.Module:
    torch.manual_seed(0)
    net = Block()
    size = dist.get_world_size()
    if kind == "tp":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(net, mesh["tp"], plan)
        fully_shard(net, mesh=mesh["dp"])
    elif kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(net, mesh=mesh)
    else:
        fully_shard(net)
    return net


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _ranks() -> dict[int, int]:
    return {rank: rank for rank in range(dist.get_world_size())}


def _step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.tensor([[1, 2, 3]])).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _train_and_describe(kind: str) -> tuple[LocalState, dict[str, torch.Tensor]]:
    """This rank's description, and the whole tensors as torch gathers them."""
    net = _sharded(kind)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    _step(net, optimizer)
    with torch.no_grad():
        net(torch.tensor([[1]]))  # leaves the root's parameters gathered
    state = describe({"model": net, "optim": optimizer}, group_ranks=_ranks())
    expected = {f"model/{name}": _whole(value) for name, value in net.named_parameters()}
    for name, value in net.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            expected[f"optim/{key}/{name}"] = _whole(optimizer.state[value][key])
    return state, expected


def _load_and_gather(kind: str, checkpoint) -> dict[str, torch.Tensor]:
    net = _sharded(kind)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
    target = match(
        {"model": net, "optim": optimizer},
        checkpoint.tree,
        checkpoint.infos,
        group_ranks=_ranks(),
    )
    read(target, checkpoint)
    assert net.head.weight is net.emb.weight
    gathered = {f"model/{name}": _whole(value) for name, value in net.named_parameters()}
    for name, value in net.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            gathered[f"optim/{key}/{name}"] = _whole(optimizer.state[value][key])
        assert optimizer.state[value]["step"].item() == 1.0
    _step(net, optimizer)
    return gathered


def test_fsdp2_and_tensor_parallel_states_are_the_gathered_ones(ranks):
    for kind in ("fsdp", "tp", "hsdp"):
        results = ranks.run(4, _train_and_describe, kind)
        checkpoint = join([state for state, _ in results])
        expected = results[0][1]
        assert sorted(checkpoint.arrays) == sorted(expected)
        for path, whole in expected.items():
            assert torch.equal(checkpoint.arrays[path], whole), (kind, path)

        plain = Block()
        optimizer = torch.optim.AdamW(plain.parameters())
        load({"model": plain, "optim": optimizer}, checkpoint)
        assert torch.equal(plain.up.weight.detach(), expected["model/up.weight"])
        moment = optimizer.state[plain.up.weight]["exp_avg"]
        assert torch.equal(moment, expected["optim/exp_avg/up.weight"])

        for other in {"fsdp", "tp", "hsdp"} - {kind}:
            for gathered in ranks.run(4, _load_and_gather, other, checkpoint):
                for path, whole in expected.items():
                    assert torch.equal(gathered[path], whole), (kind, other, path)
