"""What an optimizer holds by name: each of its parameters, or parts of one that is a flat row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ucpstore.describe.optimizers.names import Name
from ucpstore.describe.tensors.held import Held

Hold = Callable[[torch.Tensor, str], Held]


@dataclass(frozen=True, slots=True, eq=False)
class Owned:
    """One named tensor whose states an optimizer has.

    `parameter` is the optimizer's, the key of its states. `weight` is the module's parameter of
    this name, None where no module of the state has it. `hold` tells what of the parameter, or of
    a state of its shape, belongs to this name; None where the parameter is the weight itself.
    `aliased` says that the weight is a part of the parameter's memory. `layers` are, where rules
    stack parameters under this name, all of them with their full names, in rising order of index;
    `parameter` and `weight` are then the first.
    """

    name: Name
    full_name: str
    parameter: torch.Tensor
    weight: torch.Tensor | None
    hold: Hold | None = None
    aliased: bool = False
    layers: tuple[tuple[str, torch.Tensor], ...] = ()

    @property
    def trained(self) -> bool:
        """Whether the weight is trained, as far as the state tells."""
        return self.weight is None or self.weight.requires_grad


@dataclass(frozen=True, slots=True, eq=False)
class Holding:
    """An optimizer and, for each of its groups in order, what the group holds.

    `loaded` is called at the end of a load.
    """

    optimizer: torch.optim.Optimizer
    groups: tuple[tuple[Owned, ...], ...]
    loaded: Callable[[], None] | None = None

    def __iter__(self) -> Iterator[Owned]:
        for group in self.groups:
            yield from group

    def by_parameter(self, group: int) -> dict[torch.Tensor, list[Owned]]:
        """The names of each parameter of one group."""
        found: dict[torch.Tensor, list[Owned]] = {}
        for owned in self.groups[group]:
            found.setdefault(owned.parameter, []).append(owned)
        return found
