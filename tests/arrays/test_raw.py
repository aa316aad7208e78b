"""Raw views show a tensor's own memory under any dtype and strides."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ucpstore import dtypes
from ucpstore.arrays.raw import copy_raw, raw_array, raw_dtype
from ucpstore.errors import UnsupportedError


def _views(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    limit = 2 if dtype == torch.bool else 251
    base = (torch.arange(64 * dtype.itemsize) % limit).to(torch.uint8).view(dtype)
    return {
        "contiguous": base[:12].view(3, 4),
        "transposed": base[:12].view(3, 4).t(),
        "stepped": base[::3],
        "window": base[:36].view(6, 6)[1:3, 2:5],
        "expanded": base[:4].expand(3, 4),
        "scalar": base[5],
        "empty": base[:0].view(0, 3),
    }


@pytest.mark.parametrize("name", dtypes.NAMES)
def test_every_view_has_the_tensors_memory_and_bytes(name: str) -> None:
    dtype = dtypes.to_torch(name)
    for how, tensor in _views(dtype).items():
        raw = raw_array(tensor)
        assert raw.shape == tuple(tensor.shape), how
        assert raw.dtype == raw_dtype(dtype.itemsize), how
        assert raw.tobytes() == bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist()), how
        if tensor.numel():
            assert raw.ctypes.data == tensor.data_ptr(), how


def test_writing_to_the_view_writes_to_the_tensor() -> None:
    tensor = torch.zeros(2, 3, dtype=torch.bfloat16).t()
    raw_array(tensor)[2, 1] = 0x3F80
    assert tensor[2, 1].item() == 1.0


def test_lazily_conjugated_and_negated_tensors_give_their_values() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128)
    assert raw_array(tensor.conj()).tobytes() == np.array([1 - 2j, 3 + 4j]).tobytes()
    assert raw_array(tensor.conj().imag).tobytes() == np.array([-2.0, 4.0]).tobytes()


@pytest.mark.parametrize("tensor", [torch.zeros(2, device="meta"), torch.eye(2).to_sparse()])
def test_other_memory_is_refused_with_advice(tensor: torch.Tensor) -> None:
    with pytest.raises(UnsupportedError, match="dense CPU tensor"):
        raw_array(tensor)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("shape", [(150, 170), (129, 2), (2, 129), (3, 140, 130)])
def test_copies_are_exact_for_any_pair_of_strides(itemsize: int, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape)) * itemsize
    values = np.random.default_rng(0).integers(0, 256, count, dtype=np.uint8)
    rows = values.view(raw_dtype(itemsize)).reshape(shape)
    columns = np.asfortranarray(rows)
    for source in (rows, columns):
        for order in "CF":
            target = np.zeros(shape, rows.dtype, order=order)
            copy_raw(target, source)
            assert target.tobytes() == rows.tobytes()


def test_copies_from_expanded_and_reversed_memory() -> None:
    row = np.arange(200, dtype=np.uint32)
    for source in (np.broadcast_to(row, (300, 200)), np.broadcast_to(row[:, None], (200, 300))):
        for order in "CF":
            target = np.zeros(source.shape, np.uint32, order=order)
            copy_raw(target, source[::-1])
            assert np.array_equal(target, source[::-1])
