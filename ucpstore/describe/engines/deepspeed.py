"""A live DeepSpeed engine as a dict of what it is made of. DeepSpeed is never imported here.

Attributes are those of DeepSpeed 0.19.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ucpstore.describe.engines.deepspeed_rows import ROWS
from ucpstore.describe.modules.entries import first_names, parameters_of
from ucpstore.describe.optimizers.rows import RowOptimizer
from ucpstore.describe.values.counters import Counters
from ucpstore.errors import UnsupportedError

_NO_OPTIMIZER = ("DummyOptim", "DeepSpeedZeRoOffload")
"""What DeepSpeed puts in the place of an optimizer, or inside of one, where it was given none."""

_ON_NVME = ("swap_optimizer", "params_in_nvme_and_cpu")
"""Attributes of ZeRO-3's optimizer that say that the states, the parameters are not in memory."""


def expand(engine: Any, shown: str) -> dict[str, object]:
    """The items of the engine at the place `shown`; UnsupportedError for what has no such form."""
    where = shown or "the DeepSpeed engine"
    if type(engine).__name__ == "PipelineEngine":
        raise UnsupportedError(
            f"{where}: the names in a PipelineEngine are those of its stage; put its module into "
            "the state, with a specification that renames"
        )
    _check_boundary(engine, where)
    items: dict[str, object] = {"model": engine.module}
    if _has_optimizer(engine):
        items["optim"] = _optimizer(engine, f"{shown}.model" if shown else "model", where)
    if engine.lr_scheduler is not None:
        items["scheduler"] = engine.lr_scheduler
    items["counters"] = Counters(engine)
    return items


def _check_boundary(engine: Any, where: str) -> None:
    """Refuse an engine that has gradients of a part of a step; they are not stored.

    DeepSpeed counts no more where the caller tells it the boundaries.
    """
    if getattr(engine, "_is_gradient_accumulation_boundary", None) is not None:
        return
    count = engine.gradient_accumulation_steps()
    done = engine.micro_steps % count
    if done:
        raise UnsupportedError(
            f"{where}: it has accumulated {done} of the {count} micro-batches of a step, whose "
            "gradients are not stored; save and load between steps"
        )


def _has_optimizer(engine: Any) -> bool:
    outer = engine.optimizer
    kinds = (type(outer).__name__, type(getattr(outer, "optimizer", None)).__name__)
    return outer is not None and not {*kinds} & {*_NO_OPTIMIZER}


def _optimizer(engine: Any, of: str, where: str) -> object:
    outer = engine.optimizer
    if isinstance(outer, torch.optim.Optimizer):
        return outer
    names = first_names(parameters_of(engine.module, where))
    rows = ROWS.get(type(outer).__name__)
    on_nvme = any(getattr(outer, name, False) for name in _ON_NVME)
    if rows is None or engine.fp16_enabled() or on_nvme:
        raise UnsupportedError(
            f"{where}: its optimizer is a {type(outer).__name__} of fp16, or with states or "
            f"parameters on NVMe, or another than {', '.join(ROWS)}; train in bf16 or fp32 with "
            "all in memory, or save with engine.save_checkpoint"
        )
    groups = tuple(tuple(group) for group in rows(engine, names, of))
    return RowOptimizer(outer.optimizer, groups, _relink(outer))


def _relink(outer: Any) -> Callable[[], None]:
    """Let safe_get_full_optimizer_state see the states that a load has put in place."""

    def relink() -> None:
        if not hasattr(outer, "_hp_optimizer_states_linked"):
            return
        rows = [each for group in outer.optimizer.param_groups for each in group["params"]]
        if all(outer.optimizer.state.get(row) for row in rows):
            outer._hp_optimizer_states_linked = False
            outer._lazy_init_hp_params_optimizer_state()

    return relink
