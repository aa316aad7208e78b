"""The rows and copies that DeepSpeed's optimizers hold. DeepSpeed is never imported here.

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

from ucpstore.describe.optimizers.rows import Copy, Row
from ucpstore.flat import Flat

Rows = Iterator[list[Row | Copy]]


def _copies(engine: Any, names: Mapping[nn.Parameter, str], of: str) -> Rows:
    outer = engine.optimizer
    for masters, weights in zip(outer.fp32_groups, outer.fp16_groups, strict=True):
        yield [Copy(*pair) for pair in zip(masters, weights, strict=True)]


def _fused(engine: Any, names: Mapping[nn.Parameter, str], of: str) -> Rows:
    outer = engine.optimizer
    replicas = tuple(dist.get_process_group_ranks(engine.seq_data_parallel_group))
    for row, weights in zip(outer.fp32_groups_flat, outer.fp16_groups, strict=True):
        shapes = {names[each]: each.shape for each in weights}
        yield [Row(row, Flat(row.detach(), shapes, of=of), group=replicas, parts=1)]


def _bf16(engine: Any, names: Mapping[nn.Parameter, str], of: str) -> Rows:
    outer = engine.optimizer
    for at, row in enumerate(outer.fp32_groups_flat_partition):
        weights = outer.bf16_groups[at]
        offsets = _starts(each.numel() for each in weights)
        yield [_cut(row, weights, offsets, outer.real_dp_process_group[at], names, of)]


def _zero(engine: Any, names: Mapping[nn.Parameter, str], of: str) -> Rows:
    """Stages 1 and 2: one row for each group, aligned at its end, cut in equal parts."""
    outer = engine.optimizer
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


def _zero3(engine: Any, names: Mapping[nn.Parameter, str], of: str) -> Rows:
    """Each parameter is padded and cut by itself; the parts of a sub-group follow each other."""
    outer = engine.optimizer
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


ROWS: dict[str, Callable[[Any, Mapping[nn.Parameter, str], str], Rows]] = {
    "FP16_UnfusedOptimizer": _copies,
    "FP16_Optimizer": _fused,
    "BF16_Optimizer": _bf16,
    "DeepSpeedZeroOptimizer": _zero,
    "DeepSpeedZeroOptimizer_Stage3": _zero3,
}
"""By the name of the optimizer's class: what that of an engine holds, group by group."""


def _starts(sizes: Iterator[int]) -> list[int]:
    return [0, *itertools.accumulate(sizes)][:-1]


def _storage(tensor: torch.Tensor) -> object:
    return tensor.untyped_storage()._cdata
