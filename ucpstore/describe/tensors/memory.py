"""The memory of tensors: which are the same, and which have elements in common."""

from __future__ import annotations

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ucpstore.describe.tensors.deepspeed import sharded
from ucpstore.describe.tensors.numpys import Array

Memory = tuple[object, ...]
"""Equal for two tensors that are the same memory seen in the same way."""


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


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether one memory cell may stand for several elements, as in an expanded tensor."""
    if tensor.is_contiguous() or tensor.numel() <= 1:
        return False
    reach = 0
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
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
