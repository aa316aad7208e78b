"""Keys of an optimizer's states and groups that mean the same to a save and to a load."""

from __future__ import annotations

import torch

FROZEN = "requires_grad"
"""State that is stored, as false, for a parameter that is frozen. It is no state of the optimizer:
load tells a parameter that was frozen from one that never had a gradient by it."""

MASTER = "master"
"""State as which a parameter of the optimizer is stored that is not the module's parameter, where
the module's has another dtype."""

IDENTITY = ("params", "param_names")
"""Keys of a group that say which parameters it has; never stored."""


def is_copy(optimizer: torch.optim.Optimizer, key: str) -> bool:
    """Whether a state is known to hold values of its parameter, as a mean or a master does.

    Others follow the gradient.
    """
    return "master" in key.lower() or (key == "ax" and isinstance(optimizer, torch.optim.ASGD))
