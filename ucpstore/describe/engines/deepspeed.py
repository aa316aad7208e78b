"""A live DeepSpeed engine as a dict of what it is made of. DeepSpeed is never imported here.

Attributes are those of DeepSpeed 0.19. Offsets are taken from the lists by which its optimizers
cut their buffers, not from `_hp_mapping`: with round_robin_gradients that has the wrong order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ucpstore.describe.modules.entries import first_names, parameters_of
from ucpstore.describe.optimizers.owned import Copy, Row, RowOptimizer
from ucpstore.describe.values.counters import Counters
from ucpstore.errors import UnsupportedError
from ucpstore.flat import Flat

Rows = Iterator[list[Row | Copy]]

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
    rows = _ROWS.get(type(outer).__name__)
    on_nvme = any(getattr(outer, name, False) for name in _ON_NVME)
    if rows is None or engine.fp16_enabled() or on_nvme:
        raise UnsupportedError(
            f"{where}: its optimizer is a {type(outer).__name__} of fp16, or with states or "
            f"parameters on NVMe, or another than {', '.join(_ROWS)}; train in bf16 or fp32 with "
            "all in memory, or save with engine.save_checkpoint"
        )
    groups = tuple(tuple(group) for group in rows(outer, names, of))
    return RowOptimizer(outer.optimizer, groups, _relink(outer))


def _copies(outer: Any, names: Mapping[nn.Parameter, str], of: str) -> Rows:
    for masters, weights in zip(outer.fp32_groups, outer.fp16_groups, strict=True):
        yield [Copy(*pair) for pair in zip(masters, weights, strict=True)]


def _fused(outer: Any, names: Mapping[nn.Parameter, str], of: str) -> Rows:
    everyone = tuple(range(dist.get_world_size()))
    for row, weights in zip(outer.fp32_groups_flat, outer.fp16_groups, strict=True):
        shapes = {names[each]: each.shape for each in weights}
        yield [Row(row, Flat(row.detach(), shapes, of=of), group=everyone, parts=1)]


def _bf16(outer: Any, names: Mapping[nn.Parameter, str], of: str) -> Rows:
    for at, row in enumerate(outer.fp32_groups_flat_partition):
        weights = outer.bf16_groups[at]
        offsets = _starts(each.numel() for each in weights)
        yield [_cut(row, weights, offsets, outer.real_dp_process_group[at], names, of)]


def _zero(outer: Any, names: Mapping[nn.Parameter, str], of: str) -> Rows:
    """Stages 1 and 2: one row for each group, aligned at its end, cut in equal parts."""
    for at, row in enumerate(outer.single_partition_of_fp32_groups):
        weights, offsets = outer.round_robin_bit16_groups[at], outer.round_robin_bit16_offsets[at]
        yield [_cut(row, weights, offsets, outer.real_dp_process_group[at], names, of)]


def _cut(
    row: torch.Tensor,
    weights: Sequence[nn.Parameter],
    offsets: Sequence[int],
    group: dist.ProcessGroup,
    names: Mapping[nn.Parameter, str],
    of: str,
) -> Row:
    shapes = {names[each]: each.shape for each in weights}
    starts = dict(zip(shapes, offsets, strict=True))
    members = tuple(dist.get_process_group_ranks(group))
    return Row(row, Flat(row.detach(), shapes, offsets=starts, of=of), group=members)


def _zero3(outer: Any, names: Mapping[nn.Parameter, str], of: str) -> Rows:
    """Each parameter is padded and cut by itself; the parts of a sub-group follow each other."""
    groups: list[list[Row | Copy]] = [[] for _ in outer.optimizer.param_groups]
    for at, row in enumerate(outer.fp32_partitioned_groups_flat):
        weights = outer.fp16_groups[at]
        starts = _starts(each.partition_numel() for each in weights)
        for weight, start in zip(weights, starts, strict=True):
            part = row.detach().narrow(0, start, weight.partition_numel())
            groups[outer.sub_group_to_group_id[at]].append(
                Row(
                    row,
                    Flat(part, {names[weight]: weight.ds_shape}, of=of),
                    start,
                    # in fp32 there is no other copy of the parameters
                    _storage(row) == _storage(weight.ds_tensor),
                    tuple(dist.get_process_group_ranks(weight.ds_process_group)),
                )
            )
    yield from groups


_ROWS: dict[str, Callable[[Any, Mapping[nn.Parameter, str], str], Rows]] = {
    "FP16_UnfusedOptimizer": _copies,
    "FP16_Optimizer": _fused,
    "BF16_Optimizer": _bf16,
    "DeepSpeedZeroOptimizer": _zero,
    "DeepSpeedZeroOptimizer_Stage3": _zero3,
}


def _starts(sizes: Iterator[int]) -> list[int]:
    return [0, *itertools.accumulate(sizes)][:-1]


def _storage(tensor: torch.Tensor) -> object:
    return tensor.untyped_storage()._cdata


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
