"""What ucpstore is told of the job: its state, and how that lies over the ranks."""

from __future__ import annotations

from collections.abc import Mapping

import ucpstore
from gpt.model import Config
from gpt.parallel import Arrangement
from gpt.train import Trainer
from ucpstore.spec import padded, renamed, replicate, scaled, shard, tied


def specification(config: Config, arrangement: Arrangement) -> ucpstore.Spec:
    """One list of rules for every arrangement."""
    stage_layers = config.layers // arrangement.pp

    def global_number(name: str, at: Mapping[str, int]) -> str:
        model, layers, number, rest = name.split(".", 3)
        return f"{model}.{layers}.{int(number) + at['pp'] * stage_layers}.{rest}"

    layer = renamed(global_number)
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
            "model.layers.*.gate_up.weight": [
                layer,
                shard(0, "tp", sections=(config.ffn, config.ffn)),
            ],
            "model.layers.*.down.weight": [layer, shard(1, "tp")],
            "model.head.norm.weight": replicate("tp"),
            "model.head.weight": [tied("model.embed.weight"), *vocabulary],
        },
        replicate=("dp", "sp"),  # where a Flat does not cut them
        unique=("pp",),
    )


def state_of(trainer: Trainer) -> dict[str, object]:
    """What is saved, and what a load fills in place; `step` is taken back by `load`."""
    row, adam = trainer.row, trainer.adam
    over = ("dp", "sp") if row.zero else ()

    def flat(part, *, is_state: bool) -> ucpstore.Flat:
        return ucpstore.Flat(part.detach(), row.shapes, over, is_state=is_state)

    optim: dict[str, object] = {
        "exp_avg": flat(adam.exp_avg, is_state=True),
        "exp_avg_sq": flat(adam.exp_avg_sq, is_state=True),
        "step": adam.step,
    }
    if adam.master is not None:
        optim["master"] = flat(adam.master, is_state=False)
    model = trainer.stage if row.zero < 3 else flat(row.own, is_state=False)
    return {"model": model, "optim": optim}


def save(url: str, trainer: Trainer) -> None:
    """Save the step that was done last. All ranks call it together."""
    spec = specification(trainer.config, trainer.place.arrangement)
    ucpstore.save(url, state_of(trainer), step=trainer.steps, spec=spec, overwrite=True)


def load(url: str, trainer: Trainer, step: int | None = None) -> None:
    """Continue from a step, the newest where None, whatever the arrangement that saved it."""
    spec = specification(trainer.config, trainer.place.arrangement)
    state = state_of(trainer)
    ucpstore.load(url, state, step=step, spec=spec)
    trainer.steps = trainer.adam.step = state["optim"]["step"]
