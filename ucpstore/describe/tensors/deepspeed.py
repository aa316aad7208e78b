"""Parameters that DeepSpeed marks: those that ZeRO-3 cuts, and those of experts.

DeepSpeed is never imported here.
"""

from __future__ import annotations

import math
import sys

import torch
import torch.distributed as dist

from ucpstore.describe.ranks import Ranks
from ucpstore.describe.tensors.held import Held, cut_by, views_of
from ucpstore.describe.tensors.plain import dtype_name, plain
from ucpstore.errors import UnsupportedError
from ucpstore.geometry import Flat as FlatCut


def sharded(tensor: torch.Tensor) -> torch.Tensor | None:
    """The rank's own part of a parameter that DeepSpeed's ZeRO-3 cuts; None for other tensors."""
    part: torch.Tensor | None = getattr(tensor, "ds_tensor", None)
    return part


def gathered(tensor: torch.Tensor) -> torch.Tensor | None:
    """The whole values of such a parameter where they are kept between steps."""
    if sharded(tensor) is None or not tensor.numel():
        return None
    kept = tuple(tensor.shape) == tuple(tensor.ds_shape)  # type: ignore[attr-defined]
    return tensor.detach() if kept else None


def hold_sharded(tensor: torch.Tensor, part: torch.Tensor, ranks: Ranks, where: str) -> Held:
    """What this rank holds of a parameter that ZeRO-3 cuts, of which it has `part`."""
    local = plain(part, where).view(-1)
    shape = tuple(map(int, tensor.ds_shape))  # type: ignore[attr-defined]
    group = dist.get_process_group_ranks(tensor.ds_process_group)  # type: ignore[attr-defined]
    if local.numel() * len(group) < math.prod(shape):
        raise UnsupportedError(
            f"{where}: ZeRO-3 cuts its shape {shape} over {len(group)} ranks, but this rank's part "
            f"has {local.numel()} elements in memory; parameters on NVMe cannot be stored"
        )
    partition = cut_by(ranks.line(group, None, where), FlatCut(0, max(local.numel(), 1)))
    views = views_of(local, partition, shape, ranks.rank, 0)
    return Held(local, shape, dtype_name(local.dtype, where), partition, views)


def refuse_expert(tensor: torch.Tensor, where: str) -> None:
    """Refuse what DeepSpeed and Megatron mark as an expert's: other ranks have others of its name.

    They are equal when they are made, and would pass for replicas.
    """
    if getattr(tensor, "allreduce", True) is not False:
        return
    groups = sys.modules.get("deepspeed.utils.groups")
    named = {} if groups is None else groups._get_expert_parallel_group_dict()
    group = named.get(getattr(tensor, "group_name", None))
    if group is not None and dist.get_world_size(group) == 1:
        return
    raise UnsupportedError(
        f"{where}: a parameter of an expert (its allreduce is False), so other ranks may have "
        "another one under this name; put the module into the state with a specification that "
        "renames or stacks the experts (docs/parallelism.md)"
    )
