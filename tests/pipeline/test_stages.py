"""Jobs that train with torch.distributed.pipelining, saved by stage and loaded in other stages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks.harness import Ranks
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

import ucpstore
from ucpstore.spec import renamed

LAYERS, WIDTH, MICROBATCHES = 4, 6, 4


class Net(nn.Module):
    """Some of the layers of the whole net, under the names that they have in it."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for number in range(first, last):
            torch.manual_seed(number)
            self.layers[str(number)] = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


class Job:
    """Stages of this rank, in the order of the pipeline; `virtual` of them a rank."""

    def __init__(self, virtual: int) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        count = self.size * virtual
        per_stage = LAYERS // count
        self.numbers = [self.rank + self.size * n for n in range(virtual)]
        self.parts = nn.ModuleList(
            Net(number * per_stage, (number + 1) * per_stage) for number in self.numbers
        )
        self.optim = torch.optim.AdamW(self.parts.parameters(), lr=0.01)
        stages = [
            PipelineStage(part, number, count, torch.device("cpu"))
            for part, number in zip(self.parts, self.numbers, strict=True)
        ]
        self.last = count - 1 in self.numbers
        if virtual == 1:
            self.schedule = Schedule1F1B(stages[0], MICROBATCHES, loss_fn=nn.functional.mse_loss)
        else:
            self.schedule = ScheduleInterleaved1F1B(
                stages, MICROBATCHES, loss_fn=nn.functional.mse_loss
            )

    def step(self, number: int) -> None:
        random = torch.Generator().manual_seed(1000 + number)
        x, y = torch.randn(2, 2 * MICROBATCHES, WIDTH, generator=random)
        self.optim.zero_grad()
        self.schedule.step(*([x] if self.rank == 0 else []), **({"target": y} if self.last else {}))
        self.optim.step()

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.parts, "optim": self.optim}

    @property
    def spec(self) -> ucpstore.Spec:
        """Names without the number of the stage on its rank."""

        def whole(name: str, at: Mapping[str, int]) -> str:
            return re.sub(r"^model\.\d+\.", "model.", name)

        return ucpstore.Spec({"pp": self.size}, {"model.*": renamed(whole)}, unique=("pp",))

    def values(self) -> dict[str, torch.Tensor]:
        """Parameters and moments by the names of the whole net."""
        found = {}
        for part in self.parts:
            for name, parameter in part.named_parameters():
                found[name] = parameter.detach()
                for key, value in self.optim.state[parameter].items():
                    found[f"{key} {name}"] = value
        return found


def train_and_save(url: str, virtual: int, steps: int) -> dict[str, torch.Tensor]:
    job = Job(virtual)
    for number in range(steps):
        job.step(number)
    ucpstore.save(url, job.state, step=steps, spec=job.spec)
    return job.values()


def load_and_train(
    url: str, virtual: int, first: int, steps: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What was loaded, and what it became."""
    job = Job(virtual)
    with torch.no_grad():
        for parameter in job.parts.parameters():
            parameter.fill_(-1)
    ucpstore.load(url, job.state, spec=job.spec)
    loaded = {name: value.clone() for name, value in job.values().items()}
    for number in range(first, steps):
        job.step(number)
    return loaded, job.values()


def together(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: value for part in parts for name, value in sorted(part.items())}


def alone(steps: int) -> dict[str, torch.Tensor]:
    """The same training without a pipeline."""
    net = Net(0, LAYERS)
    optim = torch.optim.AdamW(net.parameters(), lr=0.01)
    for number in range(steps):
        random = torch.Generator().manual_seed(1000 + number)
        x, y = torch.randn(2, 2 * MICROBATCHES, WIDTH, generator=random)
        optim.zero_grad()
        for part, wanted in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            (nn.functional.mse_loss(net(part), wanted) / MICROBATCHES).backward()
        optim.step()
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


@pytest.mark.parametrize(("ranks_from", "virtual_from"), [(2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize(("ranks_to", "virtual_to"), [(2, 1), (4, 1), (2, 2)])
def test_stages_load_what_other_stages_saved(
    ranks: Ranks,
    tmp_path: Path,
    ranks_from: int,
    virtual_from: int,
    ranks_to: int,
    virtual_to: int,
) -> None:
    url = str(tmp_path / "s")
    saved = together(ranks.run(ranks_from, train_and_save, url, virtual_from, 3))
    assert len(saved) == LAYERS * 2 * 4
    results = ranks.run(ranks_to, load_and_train, url, virtual_to, 3, 6)
    loaded = together([each for each, _ in results])
    assert loaded.keys() == saved.keys()
    for name, value in saved.items():
        assert torch.equal(loaded[name], value), name
    trained = together([each for _, each in results])
    for name, expected in alone(6).items():
        torch.testing.assert_close(trained[name], expected, rtol=1e-5, atol=1e-7)


def test_a_net_in_one_process_loads_stages_without_a_specification(
    ranks: Ranks, tmp_path: Path
) -> None:
    url = str(tmp_path / "s")
    saved = together(ranks.run(2, train_and_save, url, 2, 3))
    net = Net(0, LAYERS)
    optim = torch.optim.AdamW(net.parameters(), lr=0.5)
    ucpstore.load(url, {"model": net, "optim": optim})
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, saved[name])
        for key, value in optim.state[parameter].items():
            assert torch.equal(value, saved[f"{key} {name}"])
    assert optim.param_groups[0]["lr"] == 0.01
