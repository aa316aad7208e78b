"""Tensors as this rank holds them: global shape, dtype name, partition, and plain local memory."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ucpstore import dtypes
from ucpstore.describe.dtensor import local_of, sharding_of
from ucpstore.describe.numpys import Array
from ucpstore.describe.ranks import Mesh, Ranks
from ucpstore.errors import StateError, UnsupportedError
from ucpstore.geometry import Box, Index, Partition, Piece, flat_views, pieces_of
from ucpstore.geometry import Flat as FlatCut
from ucpstore.spec import Lowered, Spec

_LAZY: tuple[type, ...] = (
    torch.nn.parameter.UninitializedParameter,
    torch.nn.parameter.UninitializedBuffer,
)

Memory = tuple[object, ...]
"""Equal for two tensors that are the same memory seen in the same way."""


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """Memory of this rank and what of an array lies in it.

    `tensor` is plain and detached, of any device and strides, and shares memory with the state.
    `pieces` pair boxes of the array with boxes of `tensor`.
    """

    tensor: torch.Tensor
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """One tensor of the state and what this rank holds of it.

    `local` is a plain torch.Tensor, detached, of any device and strides, that shares memory with
    the tensor of the state. `views` show it, or parts of it, as boxes of the global `shape`.
    `partition` is None for a plain tensor, which every rank that has it holds whole. `scale` is by
    what values are multiplied on their way into the store; with `mean` those of all holders are
    averaged there.
    """

    local: torch.Tensor
    shape: Index
    dtype: str
    partition: Partition | None
    views: tuple[View, ...]
    scale: int = 1
    alone: str = ""
    tied: bool = False
    mean: bool = False


def hold(tensor: torch.Tensor, ranks: Ranks, where: str, name: str | None = None) -> Held:
    """What this rank holds of `tensor`; UnsupportedError, naming `where`, if it cannot be stored.

    `name` is the full name by which a specification knows it, `where` if None: that of a tensor
    outside of modules, which keeps its key. Views with a pending conjugation or negation are
    resolved, which copies them.
    """
    tensor = _waited(tensor)
    if ranks.spec is None and ranks.count > 1:
        _refuse_expert(tensor, where)
    part = sharded(tensor)
    if part is not None:
        return _hold_sharded(tensor, part, ranks, where)
    if isinstance(tensor, DTensor):
        tied = False
        if ranks.spec is not None:
            ranks.spec.check_dtensor(name or where)
            tied = _is_tied(ranks.spec, ranks.rank, name, where)
        sharding = sharding_of(tensor, ranks, where)
        local = plain(_waited(local_of(tensor, sharding, ranks, where)), where)
        shape = tuple(tensor.shape)
        held = (View(local, sharding.pieces),)
        dtype = dtype_name(local.dtype, where)
        return Held(local, shape, dtype, sharding.partition, held, tied=tied)
    local = plain(tensor, where)
    dtype, shape = dtype_name(local.dtype, where), tuple(local.shape)
    if ranks.spec is None:
        return Held(local, shape, dtype, None, (View(local, whole(shape)),))
    lowered = ranks.spec.lower(name or where, shape, ranks.rank)
    tied = _is_tied(ranks.spec, ranks.rank, name, where)
    check_numbers(lowered, local, where)
    pieces = pieces_of(lowered.partition, lowered.shape, ranks.rank)
    return Held(
        local,
        lowered.shape,
        dtype,
        lowered.partition,
        (View(local, pieces),),
        lowered.scale,
        lowered.alone,
        tied,
        lowered.mean,
    )


def _refuse_expert(tensor: torch.Tensor, where: str) -> None:
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


def check_numbers(lowered: Lowered, local: torch.Tensor, where: str) -> None:
    """Refuse to calculate with what is no number of many digits."""
    if (local.is_floating_point() or local.is_complex()) and local.dtype.itemsize > 1:
        return
    for what, asked in (("scaled", lowered.scale != 1), ("average", lowered.mean)):
        if asked:
            raise UnsupportedError(
                f"{where}: rule {lowered.rule}: {what} is for floats of 16 bits and more, but the "
                "tensor has dtype "
                f"{dtype_name(local.dtype, where)}"
            )


def wide_of(own: torch.dtype, stored: str) -> torch.dtype:
    """A dtype that has the values of a float dtype and those of a stored one."""
    other = dtypes.to_torch(stored)
    if not (other.is_floating_point or other.is_complex):
        return torch.promote_types(own, torch.float64)
    # torch promotes no float8
    return own if other.itemsize == 1 else torch.promote_types(own, other)


def _is_tied(spec: Spec, rank: int, name: str | None, where: str) -> bool:
    """Whether a rule ties it; StateError where a rule names what keeps its key."""
    own = name or where
    key, stored = spec.key(own, rank), spec.stored(own, rank)
    if name is None and (key, stored) != (own, own):
        raise StateError(
            f"{where}: a rule gives it the name {stored!r}, but only parameters and buffers of "
            "modules are renamed or tied; put the module into the state instead of its "
            "state_dict(), or use the name as key"
        )
    return stored != key


def cut_by(mesh: Mesh, row: FlatCut) -> Partition:
    """The partition of a tensor in a row that the first axis of a mesh cuts."""
    return Partition(mesh.axes, mesh.ranks, (row, *(None for _ in mesh.axes[1:])))


def views_of(
    local: torch.Tensor, partition: Partition, shape: Index, rank: int, offset: int
) -> tuple[View, ...]:
    """What lies of a tensor, which begins at `offset` of a row, in the rank's part of the row.

    Of a padded one also the views that are nothing but padding, without pieces.
    """
    (start, _), views = flat_views(partition, shape, rank)
    found = []
    for view in views:
        # A range begins in the rank's own part of the row.
        first = (offset + start) % local.numel() + view.start
        size = math.prod(view.shape)
        if view.pieces or (partition.padded and size):
            part = local[first : first + size].view(view.shape)
            found.append(View(part, view.pieces))
    return tuple(found)


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


def _hold_sharded(tensor: torch.Tensor, part: torch.Tensor, ranks: Ranks, where: str) -> Held:
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


def whole(shape: Index) -> tuple[Piece, ...]:
    """The single piece of a tensor that is held entirely; none for a tensor without elements."""
    box = Box.whole(shape)
    return (Piece(box, box),) if box.size else ()


def dtype_name(dtype: torch.dtype, where: str) -> str:
    """The Zarr name of a dtype; UnsupportedError names `where` if it has none."""
    try:
        return dtypes.to_name(dtype)
    except UnsupportedError as error:
        raise UnsupportedError(f"{where}: {error}") from None


def plain(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """The same memory as a detached torch.Tensor; refused where the values lie elsewhere."""
    check_kind(tensor, where)
    tensor = tensor.detach()
    if type(tensor) is not torch.Tensor:
        tensor = tensor.as_subclass(torch.Tensor)
    return tensor.resolve_conj().resolve_neg()


def check_kind(tensor: torch.Tensor, where: str) -> None:
    """Raise UnsupportedError for a tensor that is not plain memory; asks for no shape."""
    kind = type(tensor)
    if isinstance(tensor, _LAZY):
        raise UnsupportedError(
            f"{where}: the parameter of a lazy module has no shape yet; run one forward pass first"
        )
    if getattr(tensor, "_is_flat_param", False):
        raise UnsupportedError(
            f"{where}: FullyShardedDataParallel (FSDP1) flattens parameters and loses their names; "
            "use torch.distributed.fsdp.fully_shard"
        )
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise UnsupportedError(
            f"{where}: a tensor of type {kind.__module__}.{kind.__qualname__} keeps its values in "
            "its own way, which has no stored form; save the tensors it is made of, or an object "
            "with state_dict() and load_state_dict()"
        )
    if tensor.is_nested or tensor.layout is not torch.strided:
        layout = "nested" if tensor.is_nested else tensor.layout
        raise UnsupportedError(
            f"{where}: a tensor of layout {layout} cannot be stored; save its dense form, or its "
            "indices and values as tensors of their own"
        )
    if tensor.is_meta:
        raise UnsupportedError(
            f"{where}: a tensor on the meta device has no memory; materialise it first, e.g. "
            "module.to_empty(device=...)"
        )


def memory_of(tensor: torch.Tensor) -> Memory | None:
    """Equal for tied tensors; None for a tensor that is tied to nothing since it has no elements.

    A DTensor without elements on this rank keeps its identity, which other ranks see as well.
    """
    if isinstance(tensor, DTensor):
        inner = _view_of(tensor._local_tensor)
        mesh = tensor.device_mesh
        return (*inner, tuple(tensor.shape), mesh, tensor.placements)
    part = sharded(tensor)
    if part is not None:
        return _view_of(part)
    return _view_of(tensor) if tensor.numel() else None


def _view_of(tensor: torch.Tensor) -> Memory:
    storage, offset = tensor.untyped_storage(), tensor.storage_offset()
    start = 0 if tensor.is_meta else storage.data_ptr()
    return (
        tensor.device,
        # Two storages may be the same memory, as those that torch.from_numpy makes of one array,
        # but every empty one is at 0.
        start + offset * tensor.itemsize if start else (storage._cdata, offset),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _waited(tensor: torch.Tensor) -> torch.Tensor:
    """The result of a pending functional collective, else the tensor itself."""
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        return cast(torch.Tensor, tensor.wait())  # type: ignore[attr-defined]
    return tensor


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether one memory cell may stand for several elements, as in an expanded tensor."""
    reach = 0
    dims = sorted(
        (stride, extent) for stride, extent in zip(tensor.stride(), tensor.shape, strict=True)
    )
    if tensor.numel() <= 1:
        return False
    for stride, extent in dims:
        if extent == 1:
            continue
        if stride <= reach:
            return True
        reach += stride * (extent - 1)
    return False


def share_elements(left: torch.Tensor | Array, right: torch.Tensor | Array) -> bool:
    """Whether two views have a memory cell in common. Memory is not touched, nor much needed."""
    return bool(np.shares_memory(_addresses(left), _addresses(right)))


def _addresses(memory: torch.Tensor | Array) -> Array:
    """An array at the addresses of a tensor of any device: to compare, not to read."""
    return memory if isinstance(memory, np.ndarray) else np.asarray(_Addresses(memory))


class _Addresses:
    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "strides": tuple(step * size for step in tensor.stride()),
            "typestr": f"|V{size}",
            "data": (tensor.data_ptr(), True),
        }
