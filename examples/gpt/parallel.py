"""Arrangements of ranks, and what the ranks along an axis tell each other, gradients included."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Arrangement:
    """How many ranks do what: `pp` stages x `dp` copies x `sp` parts of a sequence x `tp` blocks.

    `ep` is over how many of the `dp` copies the experts are spread, if the model has any.

    `zero` is what ranks with the same parameters divide among themselves: 1 the optimizer's state,
    2 the gradients too, 3 the parameters too.
    """

    pp: int = 1
    dp: int = 1
    ep: int = 1
    sp: int = 1
    tp: int = 1
    zero: int = 0

    def __post_init__(self) -> None:
        if self.dp % self.ep:
            raise ValueError(
                f"an arrangement of dp {self.dp} and ep {self.ep}: experts are spread over some of "
                "the copies, so dp must be a multiple of ep"
            )
        if self.zero == 3 and self.pp > 1:
            # As in DeepSpeed: the tied head's gradient would have to be summed with the
            # embedding's after both are scattered, each in its own way.
            raise ValueError(f"{self}: ZeRO-3 and pipeline stages do not go together here")

    @classmethod
    def parse(cls, text: str) -> Arrangement:
        """Read `tp2,pp2,dp2,zero1`; what is not named is 1 (`zero`: 0), and `one` names nothing."""
        if text == "one":
            return cls()
        found = re.findall(r"(zero(?=[0-3]\b)|(?:pp|dp|ep|sp|tp)(?!0))(\d+)", text)
        if not found or ",".join(map("".join, found)) != text or len(dict(found)) != len(found):
            raise ValueError(
                f"{text!r} is no arrangement; write e.g. tp2,pp2,dp2,zero1, or one; zero is 0 to 3"
            )
        return cls(**{name: int(number) for name, number in found})

    def __str__(self) -> str:
        named = {"pp": self.pp, "dp": self.dp, "ep": self.ep, "sp": self.sp, "tp": self.tp}
        parts = [f"{name}{number}" for name, number in named.items() if number > 1]
        parts += [f"zero{self.zero}"] if self.zero else []
        return ",".join(parts) or "one"

    @property
    def sizes(self) -> dict[str, int]:
        """The axes, the outermost first.

        The copies are two of them: `ep`, along which the experts differ, and `edp` (expert data
        parallel), along which they are the same.
        """
        edp = self.dp // self.ep
        return {"pp": self.pp, "edp": edp, "ep": self.ep, "sp": self.sp, "tp": self.tp}

    @property
    def ranks(self) -> int:
        """How many ranks it takes."""
        return math.prod(self.sizes.values())


class Axis:
    """This rank's place among the `size` ranks that differ along some axes only.

    With a single rank everything here does nothing, so that a model needs no other code for it.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        ranks: tuple[int, ...],
        place: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.names, self.ranks, self.size = names, ranks, len(ranks)
        self.place, self.group = place, group

    def copied(self, x: Tensor) -> Tensor:
        """`x`, which all ranks have, as the input of their different blocks."""
        return _Copied.apply(x, self) if self.size > 1 else x

    def summed(self, x: Tensor) -> Tensor:
        """The sum of the ranks' `x`."""
        return _Summed.apply(x, self) if self.size > 1 else x

    def joined(self, x: Tensor, dim: int) -> Tensor:
        """The ranks' `x` one behind the other."""
        return _Joined.apply(x, self, dim) if self.size > 1 else x

    def scattered(self, x: Tensor) -> Tensor:
        """This rank's part, along dimension 0, of the sum of the ranks' `x`."""
        return _Scattered.apply(x, self) if self.size > 1 else x

    def maximum(self, x: Tensor) -> Tensor:
        """The largest of the ranks' `x`, without a gradient."""
        x = x.detach().clone()
        if self.size > 1:
            dist.all_reduce(x, dist.ReduceOp.MAX, self.group)
        return x

    def share(self, x: Tensor, dim: int = 0) -> Tensor:
        """This rank's part of `x`, which all ranks have."""
        return x.chunk(self.size, dim)[self.place]


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.axis.group)
        return gradient, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        x = x.clone()
        dist.all_reduce(x, group=axis.group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, dim):
        ctx.axis, ctx.dim = axis, dim
        parts = [torch.empty_like(x) for _ in range(axis.size)]
        dist.all_gather(parts, x.contiguous(), axis.group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.axis.group)
        return ctx.axis.share(gradient, ctx.dim), None, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        x = x.clone()
        dist.all_reduce(x, group=axis.group)
        return axis.share(x).clone()

    @staticmethod
    def backward(ctx, gradient):
        parts = [torch.empty_like(gradient) for _ in range(ctx.axis.size)]
        dist.all_gather(parts, gradient.contiguous(), ctx.axis.group)
        return torch.cat(parts), None


class Place:
    """Where this rank stands in an arrangement, and the axes through its place."""

    def __init__(self, arrangement: Arrangement) -> None:
        self.arrangement = arrangement
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.pp = self._axis("pp")
        self.sp = self._axis("sp")
        self.tp = self._axis("tp")
        self.dp = self._axis("edp", "ep")
        self.ep = self._axis("ep")
        self.data = self._axis("edp", "ep", "sp")  # ranks with the same parameters,
        self.expert_data = self._axis("edp", "sp")  # and those with the same experts

    def _axis(self, *names: str) -> Axis:
        sizes = self.arrangement.sizes
        grid = torch.arange(self.arrangement.ranks).reshape(*sizes.values())
        dims = [list(sizes).index(name) for name in names]
        size = math.prod(sizes[name] for name in names)
        lines = grid.movedim(dims, list(range(-len(dims), 0))).reshape(-1, size).tolist()
        [line] = [line for line in lines if self.rank in line]
        group = dist.new_subgroups_by_enumeration(lines)[0] if size > 1 else None
        return Axis(names, tuple(line), line.index(self.rank), group)

    def close(self) -> None:
        """Give up the groups, where the processes live on; all ranks together."""
        if dist.is_initialized():
            dist.barrier()
        for axis in (self.pp, self.sp, self.tp, self.dp, self.ep, self.data, self.expert_data):
            if axis.group is not None:
                dist.destroy_process_group(axis.group)
                axis.group = None
