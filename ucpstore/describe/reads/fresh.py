"""New memory for stored arrays that have no tensor in the target yet."""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
from torch.distributed.tensor import DTensor

from ucpstore import dtypes
from ucpstore.describe.kinds import array_path
from ucpstore.describe.place import Owner, Place
from ucpstore.describe.reads.reads import Reads
from ucpstore.describe.tensors.dtensor import like
from ucpstore.describe.tensors.plain import dtype_name
from ucpstore.tree.nodes import Node


def fresh(
    reads: Reads,
    node: Node,
    place: Place,
    *,
    like_tensor: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    owner: Owner | None = None,
) -> torch.Tensor:
    """New memory for a stored array, in the layout of `like_tensor`; see `fresh_dtype`."""
    info = reads.info(array_path(node))
    if like_tensor is None:
        dtype = dtypes.to_torch(info.dtype)
    else:
        dtype = fresh_dtype(reads, node, place, like_tensor.dtype)
    if isinstance(like_tensor, DTensor):
        made: torch.Tensor = like(like_tensor, dtype)
    elif like_tensor is not None:
        made = torch.empty_like(like_tensor.detach(), dtype=dtype)
    else:
        made = torch.empty(info.shape, dtype=dtype, device=device)
    reads.tensor(made, node, place, owner)
    return made


def fresh_dtype(reads: Reads, node: Node, place: Place, like: torch.dtype) -> torch.dtype:
    """The dtype of new memory for a stored array beside a tensor of dtype `like`.

    The stored dtype, or `like` where `cast` allows it and it is wider: a state that was cast
    when it was saved has to work with its parameter again.
    """
    stored = reads.info(array_path(node)).dtype
    dtype = dtypes.to_torch(stored)
    if like.itemsize <= dtype.itemsize:
        return dtype
    alike = dtypes.kind(stored) == dtypes.kind(dtype_name(like, place.shown))
    cast = any(fnmatchcase(place.shown, each) for each in reads.cast)
    return like if alike and cast else dtype
