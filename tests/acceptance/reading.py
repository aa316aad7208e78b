"""Rank functions of the reading tests: save DTensors split one way, load them split another."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import empty as dtensor_empty

import ucpstore

Shapes = dict[str, tuple[int, ...]]


def filled(shapes: Shapes, dim: int, dtype: torch.dtype) -> dict[str, DTensor]:
    """DTensors split along `dim` over all ranks; every element tells its place in the array."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {}
    for name, shape in shapes.items():
        tensor = dtensor_empty(*shape, dtype=dtype, device_mesh=mesh, placements=[Shard(dim)])
        parts = torch.arange(shape[0] * shape[1], dtype=torch.int64).reshape(shape)
        chunks = parts.chunk(mesh.size(), dim)
        part = chunks[mesh.get_rank()] if mesh.get_rank() < len(chunks) else parts[:0]
        tensor.to_local().copy_(part.remainder(65521))
        found[name] = tensor
    return found


def save_split(
    url: str, options: dict[str, object], shapes: Shapes, dim: int, dtype: torch.dtype
) -> None:
    """Save the arrays as item `m`, split along `dim`."""
    state = {"m": filled(shapes, dim, dtype)}
    ucpstore.save(url, state, step=1, storage_options=options)


def load_split(
    url: str, options: dict[str, object], shapes: Shapes, dim: int, dtype: torch.dtype
) -> tuple[int, int, bool]:
    """Load them split along `dim`: bytes needed, bytes read as reported, and whether all is equal.

    Bytes needed are counted here from the local tensors, not taken from the report.
    """
    expected = filled(shapes, dim, dtype)
    target = filled(shapes, dim, dtype)
    for tensor in target.values():
        tensor.to_local().zero_()
    report = ucpstore.load(url, {"m": target}, storage_options=options)
    needed = sum(tensor.to_local().nbytes for tensor in target.values())
    assert report.bytes_needed == needed
    equal = all(torch.equal(target[k].to_local(), expected[k].to_local()) for k in target)
    return needed, report.bytes_read, equal
