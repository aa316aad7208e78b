"""numpy arrays as tensors that share their memory, and back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from ucpstore import dtypes
from ucpstore.errors import FormatError, StateError, UnsupportedError

Array = npt.NDArray[np.generic]

_LANES: dict[int, tuple[type[np.generic], torch.dtype]] = {
    1: (np.uint8, torch.uint8),
    2: (np.uint16, torch.uint16),
}


def from_numpy(array: Array, where: str) -> torch.Tensor:
    """A CPU tensor of the array's values, sharing its memory where torch can.

    Foreign byte order, negative strides and read-only memory are copied. Refused, naming `where`:
    objects, strings, dates, records, masked arrays and matrices.
    """
    if type(array) not in (np.ndarray, np.memmap):
        raise UnsupportedError(
            f"{where}: a numpy array of type {type(array).__name__} cannot be stored; save plain "
            "arrays, e.g. np.asarray(values) and a mask of its own"
        )
    wanted = _torch_dtype(array.dtype, where)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if (
        not array.flags.writeable
        or any(step < 0 for step in array.strides)
        or any(step % array.itemsize for step in array.strides)
    ):
        array = array.copy()
    array = array.view(np.ndarray)
    if _is_foreign(array.dtype):
        return torch.from_numpy(array.view(_LANES[array.itemsize][0])).view(wanted)
    return torch.from_numpy(array)


def identity_of(array: Array) -> object:
    """Equal for arrays that are the same memory seen in the same way, copied by torch or not."""
    start = array.__array_interface__["data"][0]
    return ("numpy", start, array.shape, array.strides, array.dtype.str) if array.size else None


def to_numpy(tensor: torch.Tensor, dtype: np.dtype[np.generic]) -> Array:
    """The CPU tensor as a numpy array of the native form of `dtype`, sharing its memory."""
    native = dtype.newbyteorder("=")
    if _is_foreign(native):
        return tensor.view(_LANES[native.itemsize][1]).numpy().view(native)
    found: Array = tensor.numpy()
    return found


def writable(array: Array, where: str) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """A tensor to fill in place of the array, and what brings the values over if it is a copy."""
    if not array.flags.writeable:
        raise StateError(
            f"{where}: the target is a read-only numpy array; pass a copy that can be written"
        )
    tensor = from_numpy(array, where)
    if not array.size or tensor.data_ptr() == array.__array_interface__["data"][0]:
        return tensor, None

    def write_back() -> None:
        array[...] = to_numpy(tensor, array.dtype)

    return tensor, write_back


def _is_foreign(dtype: np.dtype[np.generic]) -> bool:
    """Whether torch knows the bits but not the numpy type, as those of ml_dtypes."""
    return dtype.isbuiltin == 2


def _torch_dtype(dtype: np.dtype[np.generic], where: str) -> torch.dtype:
    try:
        return dtypes.to_torch(dtype.name)
    except (UnsupportedError, FormatError):
        raise UnsupportedError(
            f"{where}: a numpy array of dtype {dtype} has no stored form; convert it to numbers, "
            "or to Python values"
        ) from None
