"""Jobs in plain tensors under one arrangement loaded under another, against cutting by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks.harness import Ranks
from spec import gpt

import ucpstore

Sizes = dict[str, int]


def place(sizes: Sizes, rank: int) -> dict[str, int]:
    at = list(itertools.product(*map(range, sizes.values())))[rank]
    return dict(zip(sizes, at, strict=True))


def job(sizes: Sizes) -> tuple[gpt.Stage, torch.optim.AdamW]:
    stage = gpt.Stage(sizes, place(sizes, dist.get_rank()))
    return stage, torch.optim.AdamW(stage.parameters(), lr=0.5)


def save(url: str, sizes: Sizes) -> None:
    stage, optim = job(sizes)
    moments = {key: stage.local(salt, state=True) for salt, key in ((1, "exp_avg"), (2, "sq"))}
    parameters = dict(stage.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, value in stage.local(0).items():
            parameters[name].copy_(value)
            optim.state[parameters[name]] = {
                "step": torch.tensor(7.0),
                "exp_avg": moments["exp_avg"][name],
                "exp_avg_sq": moments["sq"][name],
            }
    state = {"model": stage, "optim": optim}
    ucpstore.save(url, state, step=1, spec=gpt.spec(sizes))


def load(url: str, sizes: Sizes) -> list[str]:
    """The names of what is not what cutting by hand gives."""
    stage, optim = job(sizes)
    ucpstore.load(url, {"model": stage, "optim": optim}, spec=gpt.spec(sizes))
    wrong = []
    parameters = dict(stage.named_parameters(remove_duplicate=False))
    for salt, key in ((0, ""), (1, "exp_avg"), (2, "exp_avg_sq")):
        for name, expected in stage.local(salt, state=bool(key)).items():
            found = optim.state[parameters[name]][key] if key else parameters[name].detach()
            if not torch.equal(found, expected):
                wrong.append(f"{key} {name}")
    steps = {float(state["step"]) for state in optim.state.values()}
    return wrong if steps == {7.0} else [*wrong, f"steps {steps}"]


ARRANGEMENTS: list[Sizes] = [
    {"pp": 1, "dp": 1, "tp": 1},
    {"pp": 1, "dp": 2, "tp": 1},
    {"pp": 1, "dp": 1, "tp": 2},
    {"pp": 2, "dp": 1, "tp": 1},
    {"pp": 2, "dp": 1, "tp": 2},
    {"dp": 2, "tp": 2, "pp": 1},
    {"tp": 4, "pp": 1, "dp": 1},
    {"pp": 4, "dp": 1, "tp": 1},
]


def shown(sizes: Mapping[str, int]) -> str:
    return "-".join(f"{name}{size}" for name, size in sizes.items())


@pytest.mark.parametrize("source", ARRANGEMENTS, ids=shown)
def test_every_arrangement_loads_what_any_other_saved(
    ranks: Ranks, tmp_path: Path, source: Sizes
) -> None:
    url = str(tmp_path / "s")
    ranks.run(math.prod(source.values()), save, url, source)
    for target in ARRANGEMENTS:
        found = ranks.run(math.prod(target.values()), load, url, target)
        assert found == [[]] * len(found), shown(target)


def test_arrays_have_the_shapes_and_values_of_the_whole_model(ranks: Ranks, tmp_path: Path) -> None:
    url = str(tmp_path / "s")
    ranks.run(4, save, url, {"pp": 2, "dp": 1, "tp": 2})
    model = ucpstore.CheckpointStore(url).open()["model"]
    tied = {"head.weight": gpt.WHOLE["embed.weight"]}
    assert {name: array.shape for name, array in model.items()} == {**gpt.WHOLE, **tied}
    assert model["head.weight"].path == model["embed.weight"].path
    for name, expected in gpt.values(0).items():
        assert torch.equal(model[name].read(), expected), name
