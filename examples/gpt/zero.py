"""ZeRO by hand: one row of flattened parameters, cut anywhere over the ranks that share them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from gpt.parallel import Axis

ALONE = Axis((), (0,), 0, None)


class Row:
    """Parameters of a rank end to end, which the ranks of `data` have too, and its part of the row.

    `own` is the part that this rank's optimizer updates: all of the row with ZeRO-0. Up to ZeRO-2
    the parameters are views of the row. With ZeRO-3 a rank has its part only; `run` puts a layer's
    parameters together for as long as the layer computes.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], data: Axis, zero: int) -> None:
        self.data, self.zero = data, zero
        self.parts = data if zero else ALONE
        self.names = {id(parameter): name for name, parameter in named.items()}
        self.shapes = {name: tuple(parameter.shape) for name, parameter in named.items()}
        self.offsets: dict[str, int] = {}
        end = 0
        for name, shape in self.shapes.items():
            self.offsets[name] = end
            end += math.prod(shape)
        self.part = -(-end // self.parts.size)
        self.parameters = list(named.values())

        self.values = torch.zeros(self.part * self.parts.size, dtype=self.parameters[0].dtype)
        for name, parameter in named.items():
            view = self.member(self.values, name)
            view.copy_(parameter.detach())
            parameter.data = view
        self.own = self.values[self.parts.place * self.part :][: self.part]
        if self.zero == 3:
            self.own = self.own.clone().requires_grad_()
            self.values = self.own.detach()
            for parameter in self.parameters:
                parameter.data = torch.empty(0, dtype=parameter.dtype)  # it keeps its name only

    def member(self, row: Tensor, name: str) -> Tensor:
        """A tensor's place in a whole row."""
        shape = self.shapes[name]
        return row[self.offsets[name] :][: math.prod(shape)].view(shape)

    def run(self, module: nn.Module, *inputs: Tensor) -> Tensor:
        """`module(*inputs)`, a part of the model that is gathered for its run if need be."""
        if self.zero < 3:
            return module(*inputs)
        names = {key: self.names[id(p)] for key, p in module.named_parameters()}
        spans = self.spans(set(names.values()))

        def gathered(*inputs: Tensor) -> Tensor:
            found: dict[str, Tensor] = {}
            for span, members in spans.items():
                row = _Gathered.apply(self.own, self, span)
                for name in members:
                    start = self.offsets[name] - span[0]
                    shape = self.shapes[name]
                    found[name] = row[start : start + math.prod(shape)].view(shape)
            whole = {key: found[name] for key, name in names.items()}
            return functional_call(module, whole, inputs)

        # What is gathered is forgotten after the forward pass, and gathered again for the backward.
        return checkpoint(gathered, *inputs, use_reentrant=False)

    def spans(self, names: set[str]) -> dict[tuple[int, int], list[str]]:
        """Ranges of the row in which tensors follow each other, with their names."""
        found: dict[tuple[int, int], list[str]] = {}
        start = stop = 0
        for name in (name for name in self.shapes if name in names):
            members = found.pop((start, stop), []) if stop == self.offsets[name] else []
            start = start if members else self.offsets[name]
            stop = self.offsets[name] + math.prod(self.shapes[name])
            found[start, stop] = [*members, name]
        return found

    def pieces(self, start: int, stop: int) -> list[tuple[int, slice, slice]]:
        """Who holds a range of the row: (part, where in that part, where in the range)."""
        found = []
        for part in range(start // self.part, -(-stop // self.part)):
            first, last = max(start, part * self.part), min(stop, (part + 1) * self.part)
            inside = slice(first - part * self.part, last - part * self.part)
            found.append((part, inside, slice(first - start, last - start)))
        return found

    def gradient(self) -> Tensor:
        """The gradient of `own` in float32, summed over the ranks that share the parameters."""
        if self.zero == 3:  # it was summed layer by layer
            found, self.own.grad = self.own.grad, None
            return found.float()
        row = torch.zeros(len(self.values))
        for parameter, name in zip(self.parameters, self.shapes, strict=True):
            self.member(row, name).copy_(parameter.grad)
            parameter.grad = None
        if self.data.size == 1:
            return row
        if self.zero == 2:
            # Where memory counts, this is done for each layer as the backward pass leaves it.
            part = torch.empty(self.part)
            dist.reduce_scatter(part, list(row.chunk(self.data.size)), group=self.data.group)
            return part
        dist.all_reduce(row, group=self.data.group)
        return self.parts.share(row)

    def update(self, values: Tensor) -> None:
        """Give `own` new values, and have the other parts from their ranks."""
        with torch.no_grad():
            self.own.copy_(values)
        if self.zero in (1, 2) and self.parts.size > 1:
            parts = list(self.values.chunk(self.parts.size))
            dist.all_gather(parts, self.own.clone(), self.parts.group)


class _Gathered(torch.autograd.Function):
    """A range of the row from its owners; backward, the sum of its gradients to its owners."""

    @staticmethod
    def forward(ctx, own, row, span):
        ctx.row, ctx.span = row, span
        whole = own.new_empty(span[1] - span[0])
        for part, inside, outside in row.pieces(*span):
            if part == row.parts.place:
                whole[outside] = own[inside]
            if row.parts.size > 1:
                dist.broadcast(whole[outside], row.parts.ranks[part], row.parts.group)
        return whole

    @staticmethod
    def backward(ctx, gradient):
        row, gradient = ctx.row, gradient.clone()
        own = gradient.new_zeros(row.part)
        for part, inside, outside in row.pieces(*ctx.span):
            if row.parts.size > 1:
                dist.reduce(gradient[outside], row.parts.ranks[part], group=row.parts.group)
            if part == row.parts.place:
                own[inside] = gradient[outside]
        return own, None, None


class Adam:
    """Adam on this rank's part of a row, in float32; with masters where the parameters are not.

    `divided` says by what the values of a tensor are divided on this rank (1 if not there). Their
    updates are divided alike, so that the whole tensor moves as one that nobody divided.
    """

    def __init__(self, row: Row, lr: float, divided: Mapping[str, int]) -> None:
        self.row, self.lr, self.step = row, lr, 0
        own = row.own.detach()
        self.master = None if own.dtype == torch.float32 else own.float()
        self.exp_avg = torch.zeros(len(own))
        self.exp_avg_sq = torch.zeros(len(own))
        share = torch.ones(row.part * row.parts.size)
        for name, by in divided.items():
            row.member(share, name).fill_(1 / by)
        self.share = row.parts.share(share)

    def update(self, gradient: Tensor) -> None:
        """One step with the gradient of the row's own part."""
        self.step += 1
        beta, beta_sq = 0.9, 0.99
        self.exp_avg.lerp_(gradient, 1 - beta)
        self.exp_avg_sq.mul_(beta_sq).addcmul_(gradient, gradient, value=1 - beta_sq)
        mean = self.exp_avg / (1 - beta**self.step)
        scale = (self.exp_avg_sq / (1 - beta_sq**self.step)).sqrt() + 1e-6
        values = self.row.own.detach().clone() if self.master is None else self.master
        values.sub_(self.lr * self.share * mean / scale)
        self.row.update(values)
