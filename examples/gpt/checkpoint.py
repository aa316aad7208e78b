"""What ucpstore is told of the job: its state, and how that lies over the ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

import ucpstore
from gpt.model import Config
from gpt.parallel import Arrangement
from gpt.train import Trainer
from gpt.zero import Row
from ucpstore.spec import padded, renamed, replicate, scaled, shard, tied, unique


def specification(config: Config, arrangement: Arrangement) -> ucpstore.Spec:
    """One list of rules for every arrangement."""
    stage_layers = config.layers // arrangement.pp
    rank_experts = config.experts // arrangement.ep

    def global_numbers(name: str, at: Mapping[str, int]) -> str:
        layer = r"(?<=layers\.)\d+"
        name = re.sub(layer, lambda found: str(int(found[0]) + at["pp"] * stage_layers), name)
        expert = r"(?<=experts\.)\d+"
        return re.sub(expert, lambda found: str(int(found[0]) + at["ep"] * rank_experts), name)

    layer = renamed(global_numbers)
    expert = [layer, unique("ep")]
    gate_up = shard(0, "tp", sections=(config.ffn, config.ffn))
    down = shard(1, "tp")
    vocabulary = [shard(0, "tp"), padded(0, config.vocabulary)]
    return ucpstore.Spec(
        arrangement.sizes,
        {
            "model.embed.weight": vocabulary,
            "model.layers.*.*_norm.weight": [layer, replicate("tp")],
            "model.layers.*.qkv.weight": [
                layer,
                shard(0, "tp", sections=config.qkv, unit=config.head),
            ],
            "model.layers.*.out.weight": [layer, shard(1, "tp")],
            "model.layers.*.out.bias": [layer, scaled("tp")],
            "model.layers.*.ffn.gate_up.weight": [layer, gate_up],
            "model.layers.*.ffn.down.weight": [layer, down],
            "model.layers.*.ffn.router.weight": [layer, replicate("tp")],
            "model.layers.*.ffn.experts.*.gate_up.weight": [*expert, gate_up],
            "model.layers.*.ffn.experts.*.down.weight": [*expert, down],
            "model.head.norm.weight": replicate("tp"),
            "model.head.weight": [tied("model.embed.weight"), *vocabulary],
        },
        replicate=("edp", "ep", "sp"),  # where a Flat does not cut them
        unique=("pp",),
    )


def state_of(trainer: Trainer) -> dict[str, object]:
    """What is saved, and what a load fills in place; `step` is taken back by `load`."""
    optim: dict[str, object] = {"step": trainer.steps}
    for name, adam in trainer.adams.items():
        states = {
            "exp_avg": flat(adam.row, adam.exp_avg, is_state=True),
            "exp_avg_sq": flat(adam.row, adam.exp_avg_sq, is_state=True),
        }
        if adam.master is not None:
            states["master"] = flat(adam.row, adam.master, is_state=False)
        optim[name] = states
    row = trainer.row
    model = trainer.stage if row.zero < 3 else flat(row, row.own, is_state=False)
    return {"model": model, "optim": optim}


def flat(row: Row, part: Tensor, *, is_state: bool) -> ucpstore.Flat:
    """This rank's part of a row, over the ranks that share it."""
    return ucpstore.Flat(part.detach(), row.shapes, row.parts.names, is_state=is_state)


def save(url: str, trainer: Trainer) -> None:
    """Save the step that was done last. All ranks call it together."""
    spec = specification(trainer.config, trainer.place.arrangement)
    ucpstore.save(url, state_of(trainer), step=trainer.steps, spec=spec, overwrite=True)


def load(url: str, trainer: Trainer, step: int | None = None) -> None:
    """Continue from a step, the newest where None, whatever the arrangement that saved it."""
    spec = specification(trainer.config, trainer.place.arrangement)
    state = state_of(trainer)
    ucpstore.load(url, state, step=step, spec=spec)
    trainer.steps = state["optim"]["step"]
    for adam in trainer.adams.values():
        adam.step = trainer.steps
