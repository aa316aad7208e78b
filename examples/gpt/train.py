"""One training step over all ranks of an arrangement, and nothing that knows of checkpoints."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from gpt.data import SEQUENCES, draw_batch, text_tokens
from gpt.model import Config, Stage
from gpt.parallel import Arrangement, Place
from gpt.zero import Adam, Row


class Trainer:
    """This rank's part of a job. All ranks call `step` together."""

    def __init__(
        self,
        arrangement: Arrangement,
        dtype: torch.dtype = torch.float32,
        config: Config | None = None,
    ) -> None:
        self.config = config or Config()
        self.place = Place(arrangement)
        self.steps = 0  # that have been done
        self.text = text_tokens()
        self.stage = Stage(self.config, self.place).to(dtype)
        named = dict(self.stage.named_parameters())
        experts = {name: named.pop(name) for name in list(named) if ".experts." in name}
        self.row = Row(named, self.place.data, arrangement.zero)
        biases = [name for name in self.row.shapes if name.endswith("out.bias")]
        self.adams = {"dense": Adam(self.row, 3e-3, dict.fromkeys(biases, arrangement.tp))}
        if experts:
            # Fewer ranks share them, so they are a row of their own, cut over those ranks.
            row = Row(experts, self.place.expert_data, arrangement.zero)
            self.adams["experts"] = Adam(row, 3e-3, {})

    def step(self) -> float:
        """Train on the next global batch; its mean loss."""
        self.steps += 1
        batch = draw_batch(self.text, self.steps, self.config.tokens)
        batch = self.place.dp.share(batch)
        inputs = self.place.sp.share(batch[:, :-1], 1)
        targets = self.place.sp.share(batch[:, 1:], 1)
        loss = self._forward_backward(inputs, targets)
        self._sum_tied_gradients()
        for adam in self.adams.values():
            adam.update(adam.row.gradient())
        return self._total(loss)

    def _forward_backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """All micro-batches forward, then all backward (GPipe); this rank's part of the loss."""
        pp = self.place.pp
        before = pp.ranks[pp.place - 1] if pp.place > 0 else None
        after = pp.ranks[pp.place + 1] if pp.place + 1 < pp.size else None
        total = torch.zeros((), dtype=torch.float64)
        done = []
        for tokens, wanted in zip(inputs.chunk(pp.size), targets.chunk(pp.size), strict=True):
            if before is None:
                x = self.row.run(self.stage.embed, tokens)
            else:
                x = torch.empty(*tokens.shape, self.config.width, dtype=self.row.values.dtype)
                dist.recv(x, before)
                x.requires_grad_()
            y = x
            for layer in self.stage.layers:
                y = self.row.run(layer, y)
            if after is None:
                losses = self.row.run(self.stage.head, y, wanted)
                y = losses.sum() / (SEQUENCES * self.config.tokens)
                total += y.detach()
            else:
                dist.send(y.detach(), after)
            done.append((x, y))
        for x, y in done:
            if after is None:
                y.backward()
            else:
                gradient = torch.empty_like(y)
                dist.recv(gradient, after)
                y.backward(gradient)
            if before is not None:
                dist.send(x.grad, before)
        return total

    def _sum_tied_gradients(self) -> None:
        """The head of the last stage is the embedding of the first: both get the sum."""
        pp = self.place.pp
        if pp.size == 1 or pp.place not in (0, pp.size - 1):
            return
        first = pp.place == 0
        own = (self.stage.embed if first else self.stage.head).weight.grad
        other, peer = torch.empty_like(own), pp.ranks[-1] if first else pp.ranks[0]
        for request in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, own.clone(), peer), dist.P2POp(dist.irecv, other, peer)]
        ):
            request.wait()
        own.add_(other)  # of two summands the order does not matter
        data = self.place.data
        if data.size > 1:
            # Summed by itself, in the same order at both ends: in their rows it lies in different
            # places, and where it lies decides in which order more than two ranks are summed.
            dist.all_reduce(own, group=data.group)
            if data.place > 0:
                own.zero_()

    def _total(self, loss: Tensor) -> float:
        """The global loss on every rank; the last stage has it, each `tp` rank all of its part."""
        loss = loss / self.place.tp.size
        if dist.is_initialized():
            dist.all_reduce(loss)
        return loss.item()
