"""DTensors: from a mesh and placements to the partition that geometry replays.

The pieces come from `ucpstore.geometry`, never from torch's own offset helpers, which give one
offset per rank and are wrong where shards interleave. What the rules give is checked against the
shape of the local tensor that is really there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from ucpstore.describe.ranks import Ranks
from ucpstore.errors import StateError, UnsupportedError
from ucpstore.geometry import Index, Partition, Piece, Split, local_shape, pieces_of

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

try:  # private: FSDP2 over tensor parallelism places parameters so (torch 2.8 to 2.13)
    from torch.distributed.tensor.placement_types import _StridedShard
except ImportError:  # pragma: no cover - a torch that has dropped it
    _StridedShard = None  # type: ignore[assignment,misc]


def split_of(placement: Placement, dims: int, where: str) -> Split | None:
    """What one mesh axis does to a tensor of `dims` dimensions; None where it replicates."""
    if isinstance(placement, Replicate):
        return None
    # before Shard: in torch 2.8 to 2.10 a strided shard is a Shard as well
    if _StridedShard is not None and isinstance(placement, _StridedShard):
        return Split(placement.dim % dims, int(placement.split_factor))
    if type(placement) is Shard:
        return Split(placement.dim % dims)
    if placement.is_partial():
        raise UnsupportedError(
            f"{where}: a DTensor with placement {placement} holds sums that are not reduced yet; "
            "redistribute it to Replicate() or Shard(dim) before saving or loading"
        )
    raise UnsupportedError(
        f"{where}: a DTensor with placement {placement!r} cannot be stored; "
        "redistribute it to Replicate(), Shard(dim) or _StridedShard"
    )


@dataclass(frozen=True, slots=True, eq=False)
class Sharding:
    """How tensors of one shape with equal placements lie on a mesh.

    `pieces` are this rank's; `local_shape` is that of its local tensor, None on a rank outside of
    the mesh.
    """

    partition: Partition
    pieces: tuple[Piece, ...]
    local_shape: Index | None


def sharding_of(tensor: DTensor, ranks: Ranks, where: str) -> Sharding:
    """How a DTensor is cut, in ranks of the process group; worked out once for all alike."""
    mesh = ranks.mesh(tensor.device_mesh, where)
    shape = tuple(tensor.shape)
    key = (id(tensor.device_mesh), tensor.placements, shape)  # `ranks` keeps the mesh
    known = ranks.shardings.get(key)
    if isinstance(known, Sharding):
        return known
    splits = tuple(split_of(placement, len(shape), where) for placement in tensor.placements)
    partition = Partition(mesh.axes, mesh.ranks, splits)
    inside = ranks.rank in partition.ranks
    made = Sharding(
        partition,
        pieces_of(partition, shape, ranks.rank),
        local_shape(partition, shape, ranks.rank) if inside else None,
    )
    ranks.shardings[key] = made
    return made


def local_of(tensor: DTensor, sharding: Sharding, ranks: Ranks, where: str) -> torch.Tensor:
    """The local tensor of a DTensor; refused where its shape is not what the placements give.

    On a rank outside of the mesh the result has no elements.
    """
    # to_local() would record autograd and allocate for some placements
    local = tensor._local_tensor
    expected = sharding.local_shape
    found = tuple(local.shape)
    if expected is None or found == expected:
        return local
    if 0 not in expected or local.numel() > 0:
        raise StateError(
            f"{where}: its placements {tuple(tensor.placements)} over a mesh of shape "
            f"{sharding.partition.axes} give rank {ranks.rank} a local tensor of shape {expected} "
            f"from the global shape {tuple(tensor.shape)}, but it has shape {found}; parts must "
            "follow the rule of torch.chunk, also in DTensor.from_local (pass shape= and stride= "
            "where parts are uneven)"
        )
    return local


def like(tensor: DTensor, dtype: torch.dtype) -> DTensor:
    """An uninitialised DTensor of another dtype with the mesh, placements and shape of `tensor`."""
    return DTensor.from_local(
        torch.empty_like(tensor._local_tensor.detach(), dtype=dtype),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
