"""DTensors: from a mesh and placements to the partition that geometry replays.

The pieces come from `ucpstore.geometry`, never from torch's own offset helpers, which give one
offset per rank and are wrong where shards interleave. What the rules give is checked against the
shape of the local tensor that is really there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from ucpstore.describe.ranks import Ranks
from ucpstore.errors import StateError, UnsupportedError
from ucpstore.geometry import Partition, Split, local_shape

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
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


def mesh_ranks(mesh: DeviceMesh, ranks: Ranks, where: str) -> tuple[int, ...]:
    """Ranks of the process group in the mesh's row-major order."""
    members = [int(rank) for rank in mesh.mesh.flatten().tolist()]
    outside = [rank for rank in members if rank not in ranks.of_global]
    if outside:
        raise StateError(
            f"{where}: its device mesh has the global ranks {members}, of which {outside} are not "
            f"in the process group of the call (global ranks {sorted(ranks.of_global)}); pass a "
            "process group that holds the whole mesh"
        )
    return tuple(ranks.of_global[rank] for rank in members)


def partition_of(tensor: DTensor, ranks: Ranks, where: str) -> Partition:
    """The mesh and splits of a DTensor, in ranks of the process group."""
    mesh = tensor.device_mesh
    members = mesh_ranks(mesh, ranks, where)
    dims = tensor.dim()
    splits = tuple(split_of(placement, dims, where) for placement in tensor.placements)
    return Partition(tuple(int(extent) for extent in mesh.mesh.shape), members, splits)


def local_of(tensor: DTensor, partition: Partition, ranks: Ranks, where: str) -> torch.Tensor:
    """The local tensor of a DTensor; refused where its shape is not what the placements give.

    On a rank outside of the mesh the result has no elements.
    """
    # to_local() would record autograd and allocate for some placements
    local = tensor._local_tensor
    if ranks.rank not in partition.ranks:
        return local
    expected = local_shape(partition, tuple(tensor.shape), ranks.rank)
    found = tuple(local.shape)
    if found != expected and (0 not in expected or local.numel() > 0):
        raise StateError(
            f"{where}: its placements {tuple(tensor.placements)} over a mesh of shape "
            f"{partition.axes} give rank {ranks.rank} a local tensor of shape {expected} from the "
            f"global shape {tuple(tensor.shape)}, but it has shape {found}; parts must follow the "
            "rule of torch.chunk, also in DTensor.from_local (pass shape= and stride= where parts "
            "are uneven)"
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
