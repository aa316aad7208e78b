"""The optimizer inside of wrappers, whose state counts."""

from __future__ import annotations

import torch

from ucpstore.errors import UnsupportedError
from ucpstore.perrank import PerRank


def inner_optimizer(value: object, where: str) -> torch.optim.Optimizer | None:
    """The optimizer whose state counts, inside of wrappers; None for other values.

    Raises UnsupportedError for one whose `state_dict` shows that its state lies elsewhere.
    """
    if isinstance(value, PerRank):
        return None
    inner = getattr(value, "optimizer", None)
    if isinstance(value, torch.optim.Optimizer):
        plain = type(value).state_dict is torch.optim.Optimizer.state_dict
        if plain:
            return value
        if isinstance(inner, torch.optim.Optimizer):
            return inner_optimizer(inner, where)
        if _shows_own_state(value):
            return value
        raise UnsupportedError(
            f"{where}: {type(value).__qualname__} keeps state that its `state` does not hold; put "
            "the optimizers that it is made of into the state one by one"
        )
    wrapper = hasattr(value, "param_groups") and not isinstance(value, type)
    return (
        inner_optimizer(inner, where)
        if wrapper and isinstance(inner, torch.optim.Optimizer)
        else None
    )


def _shows_own_state(optimizer: torch.optim.Optimizer) -> bool:
    try:
        shown = optimizer.state_dict()
    except Exception:  # as ZeroRedundancyOptimizer, which must gather its state first
        return False
    states = shown.get("state") if isinstance(shown, dict) else None
    return (
        isinstance(states, dict)
        and set(shown) == {"state", "param_groups"}
        and len(states) == len(optimizer.state)
    )
