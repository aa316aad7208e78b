"""Small networks, and optimizers of them."""

from __future__ import annotations

import torch
from torch import nn


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


def adamw(net: nn.Module, **options: object) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), **options)


def trained() -> tuple[Net, torch.optim.AdamW]:
    net = Net()
    optimizer = adamw(net, lr=0.01)
    train(net, optimizer, 2)
    return net, optimizer


def split(net: Net, names: list[list[str]], lrs: list[float]) -> torch.optim.SGD:
    found = dict(net.named_parameters())
    return torch.optim.SGD(
        [
            {"params": [found[name] for name in group], "lr": lr}
            for group, lr in zip(names, lrs, strict=True)
        ],
        momentum=0.9,
    )


A, B = ["a.weight", "a.bias"], ["b.weight", "b.bias", "scale"]


SHAPES = {"a": (3,), "b": (2,)}


class Shaped(nn.Module):
    """Parameters of these shapes, each with one value."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], *values: float) -> None:
        super().__init__()
        for (name, shape), value in zip(shapes.items(), values, strict=True):
            setattr(self, name, nn.Parameter(torch.full(shape, float(value))))
