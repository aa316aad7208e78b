"""Optimizers inside of wrappers."""

from __future__ import annotations

import pytest
import torch
from describe.engine import save
from describe.nets import trained

from ucpstore.errors import UnsupportedError


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
    net, optimizer = trained()
    assert save({"m": net, "o": Wrapper(optimizer)}).tree == save({"m": net, "o": optimizer}).tree
    with pytest.raises(UnsupportedError, match=r"^o: Holder keeps state .*one by one"):
        save({"m": net, "o": Holder([optimizer])})
