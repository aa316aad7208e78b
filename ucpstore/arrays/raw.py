"""Raw views: the values of a tensor as unsigned integers or opaque bytes of the same item size.

Values are only ever moved, never computed with, so NaN payloads and -0.0 survive and one code path
serves every dtype, those that numpy does not know included. Items stay whole: chunks start at any
multiple of 4 bytes in an object, and copies of 8 and 16 byte items to such addresses were measured
to be as fast as aligned ones, while splitting items into 4-byte lanes halves the speed.
"""

from __future__ import annotations

from types import EllipsisType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ucpstore.errors import UnsupportedError
from ucpstore.geometry.box import Box

if TYPE_CHECKING:
    import torch

RawArray = npt.NDArray[np.generic]
"""An array whose dtype is `raw_dtype` of its item size."""

_RAW_DTYPES: dict[int, np.dtype[np.generic]] = {
    1: np.dtype("u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
    16: np.dtype("V16"),  # complex128; numpy has no 16-byte integer
}


def raw_dtype(itemsize: int) -> np.dtype[np.generic]:
    """The numpy dtype under which items of `itemsize` bytes are moved."""
    return _RAW_DTYPES[itemsize]


def raw_array(tensor: torch.Tensor) -> RawArray:
    """The memory of a CPU tensor under its raw dtype: same shape, same strides, no copy.

    Writing to the result writes to the tensor. `tensor` must be plain, dense and detached; strides
    may be any that torch has, 0 of expanded tensors included. A tensor that is only marked as
    conjugated or negated has other values than its memory and is copied, so it cannot be a target.

    Raises UnsupportedError for a tensor that is not in host memory or whose items have no raw form.
    """
    import torch

    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise UnsupportedError(
            "only dense tensors in host memory have a raw view, but this one is "
            f"{tensor.layout} on {tensor.device}; copy it to a dense CPU tensor first"
        )
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    dtype = _RAW_DTYPES[tensor.dtype.itemsize]
    if not tensor.numel():
        return np.empty(tuple(tensor.shape), dtype)
    return np.asarray(_Memory(tensor, dtype))


class _Memory:
    """Lends a tensor's memory to numpy, which keeps the tensor alive meanwhile.

    `Tensor.numpy()` would forbid for good that the user resizes the tensor's storage.
    """

    def __init__(self, tensor: torch.Tensor, dtype: np.dtype[np.generic]) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "strides": tuple(step * dtype.itemsize for step in tensor.stride()),
            "typestr": dtype.str,
            "data": (tensor.data_ptr(), False),
        }


def part(array: RawArray, box: Box) -> RawArray:
    """The region `box` of an array as a view, also for 0-d ones, of which numpy makes a scalar."""
    where: tuple[EllipsisType | slice, ...] = (..., *box.slices())
    return array[where]


_STRIP = 16
"""Width of a strip in items: of 8 to 64, the fastest on the whole for items of 1 to 8 bytes."""

_LEAST_ROWS = 128
"""With fewer rows per strip the cache holds the lines anyway, and strips would be too short."""


def copy_raw(target: RawArray, source: RawArray) -> None:
    """Copy between arrays of equal shape and raw dtype, at a fair speed for any pair of strides.

    numpy walks in the order of the target's memory. Where that jumps about in the source, as from
    or to a transposed tensor, every cache line is fetched again and again; narrow strips along the
    target's innermost dimension use each line up, 2 to 6 times faster.
    """
    if not target.ndim or target.strides[-1] == source.strides[-1] == target.itemsize:
        target[...] = source
        return
    inner = _innermost(target)
    narrow = inner is not None and target.size < _LEAST_ROWS * target.shape[inner]
    if inner is None or narrow or _innermost(source) in (None, inner):
        target[...] = source
        return
    before = (slice(None),) * inner
    for start in range(0, target.shape[inner], _STRIP):
        strip = (*before, slice(start, start + _STRIP))
        target[strip] = source[strip]


def _innermost(array: RawArray) -> int | None:
    """The dimension with the smallest stride, the last of equal ones; None with one to walk."""
    strides = [
        (abs(stride), -dim)
        for dim, (stride, extent) in enumerate(zip(array.strides, array.shape, strict=True))
        if extent > 1 and stride != 0
    ]
    return -min(strides)[1] if len(strides) > 1 else None
