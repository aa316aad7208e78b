"""What the field cases share: bytes of tensors, DTensors without communication, refusals."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ucpstore


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of all elements in logical order."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().flatten().clone()
    return flat.view(torch.uint8).numpy().tobytes()


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes."""
    return left.dtype == right.dtype and left.shape == right.shape and bits(left) == bits(right)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor, gathered by torch."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def line(names: Sequence[str] | None = None) -> DeviceMesh:
    """All ranks in a row."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=names)


def sharded(tensor: torch.Tensor, mesh: DeviceMesh, *placements: object) -> DTensor:
    """A DTensor made from the same full tensor on every rank; rows split where none is given."""
    return distribute_tensor(tensor, mesh, placements or [Shard(0)], src_data_rank=None)


def attempt(action: Callable[[], object]) -> str:
    """The type, text and notes of the error that `action` raises; empty where it raises none."""
    try:
        action()
    except ucpstore.UcpstoreError as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return ""


def refuse_save(url: object, state: Mapping[str, object], *words: str, **options: Any) -> str:
    """Saving raises a StateError with all `words`, and leaves no step."""
    with pytest.raises(ucpstore.StateError) as caught:
        ucpstore.save(str(url), state, step=1, **options)
    text = str(caught.value)
    assert [word for word in words if word not in text] == []
    assert ucpstore.CheckpointStore(str(url)).steps() == []
    return text


def refuse_load(url: object, target: Mapping[str, object], *words: str, **options: Any) -> str:
    """Loading raises a StateError with all `words`; the tensors in `target` keep their bits."""
    before = [(tensor, tensor.clone()) for tensor in tensors(target)]
    with pytest.raises(ucpstore.StateError) as caught:
        ucpstore.load(str(url), target, **options)
    text = str(caught.value)
    assert [word for word in words if word not in text] == []
    assert all(same(tensor, copy) for tensor, copy in before)
    return text


def tensors(value: object) -> list[torch.Tensor]:
    """The tensors in dicts, lists, modules and optimizers, not those on the meta device."""
    if isinstance(value, torch.Tensor):
        return [] if value.is_meta else [value]
    if isinstance(value, torch.nn.Module):
        return tensors([*value.parameters(), *value.buffers()])
    if isinstance(value, torch.optim.Optimizer):
        return tensors([list(state.values()) for state in value.state.values()])
    if isinstance(value, Mapping):
        return tensors(list(value.values()))
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors(item)]
    return []


def stored_bytes(folder: str | os.PathLike[str]) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
