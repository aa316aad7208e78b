"""Plain memory: the tensors that have a stored form, and the refusals of all others."""

from __future__ import annotations

from typing import cast

import torch

from ucpstore import dtypes
from ucpstore.errors import UnsupportedError

_LAZY: tuple[type, ...] = (
    torch.nn.parameter.UninitializedParameter,
    torch.nn.parameter.UninitializedBuffer,
)


def plain(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """The same memory as a detached torch.Tensor; refused where the values lie elsewhere."""
    check_kind(tensor, where)
    tensor = tensor.detach()
    if type(tensor) is not torch.Tensor:
        tensor = tensor.as_subclass(torch.Tensor)
    if tensor.is_conj() or tensor.is_neg():
        return tensor.resolve_conj().resolve_neg()
    return tensor


def check_kind(tensor: torch.Tensor, where: str) -> None:
    """Raise UnsupportedError for a tensor that is not plain memory; asks for no shape."""
    kind = type(tensor)
    if issubclass(kind, _LAZY):  # isinstance would ask torch's metaclass
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


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """The result of a pending functional collective, else the tensor itself."""
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        return cast(torch.Tensor, tensor.wait())  # type: ignore[attr-defined]
    return tensor


def dtype_name(dtype: torch.dtype, where: str) -> str:
    """The Zarr name of a dtype; UnsupportedError names `where` if it has none."""
    try:
        return dtypes.to_name(dtype)
    except UnsupportedError as error:
        raise UnsupportedError(f"{where}: {error}") from None
