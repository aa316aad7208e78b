"""Names of an optimizer's parameters, taken from the modules of the same state."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ucpstore.describe.modules.named import Named
from ucpstore.errors import StateError


@dataclass(frozen=True, slots=True)
class Name:
    """A parameter's name in the optimizer: `prefix` is the module's key where there are several.

    `module` is the one of the state that has the parameter, if any.
    """

    prefix: str
    fqn: str
    module: Named | None

    def __str__(self) -> str:
        return f"{self.prefix}.{self.fqn}" if self.prefix else self.fqn


def names_of(
    optimizer: torch.optim.Optimizer, modules: Sequence[Named], where: str
) -> dict[torch.Tensor, Name]:
    """A name for each parameter of the optimizer's groups.

    It is relative to the first module that holds all of them; where none does, each has the name
    in the first module that holds it, behind that module's key in the state.
    """
    parameters = [
        (parameter, at)
        for at, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    ]
    for module in modules:
        if all(parameter in module.names for parameter, _ in parameters):
            return {p: Name("", module.names[p], module) for p, _ in parameters}
    found: dict[torch.Tensor, Name] = {}
    for number, (parameter, at) in enumerate(parameters):
        holder = next((module for module in modules if parameter in module.names), None)
        if holder is None:
            raise StateError(
                f"{where}: parameter {number} of the optimizer (group {at}, shape "
                f"{tuple(parameter.shape)}) is in no module of the state, so it has no name; add "
                f"the module that holds it, e.g. {{'model': model, 'optim': optimizer}}{_engine()}"
            )
        found[parameter] = Name(holder.shown, holder.names[parameter], holder)
    return found


def _engine() -> str:
    """Advice for those who use DeepSpeed, whose optimizers hold copies and rows."""
    return ", or pass a DeepSpeed engine itself" if "deepspeed" in sys.modules else ""
