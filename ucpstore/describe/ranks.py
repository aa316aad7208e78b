"""Which rank this process is in the call's process group, and how global ranks map to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from ucpstore.errors import StateError


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """The process group of a call, as one of its members sees it.

    `of_global` maps each global rank of the group to its rank in the group.
    """

    rank: int
    of_global: Mapping[int, int]

    @property
    def count(self) -> int:
        """Number of ranks in the process group."""
        return len(self.of_global)

    @staticmethod
    def here(of_global: Mapping[int, int], rank: int | None = None) -> Ranks:
        """This process's place; `rank` is asked for only where torch.distributed cannot tell."""
        if rank is not None:
            return Ranks(rank, of_global)
        if len(of_global) == 1:
            return Ranks(next(iter(of_global.values())), of_global)
        if dist.is_available() and dist.is_initialized():
            own = dist.get_rank()
            if own in of_global:
                return Ranks(of_global[own], of_global)
            raise StateError(
                f"this process has global rank {own}, which is not in the process group of the "
                f"call (global ranks {sorted(of_global)}); call from its members only"
            )
        raise StateError(
            f"the process group of the call has {len(of_global)} ranks, but torch.distributed is "
            "not initialised here; initialise it first"
        )
