"""Raw views: the values of a tensor as unsigned integers or opaque bytes of the same item size.

Values are only ever moved, never computed with, so NaN payloads and -0.0 survive and one code path
serves every dtype, those that numpy does not know included. Items stay whole: chunks start at any
multiple of 4 bytes in an object, and copies of 8 and 16 byte items to such addresses were measured
to be as fast as aligned ones, while splitting items into 4-byte lanes halves the speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ucpstore.errors import UnsupportedError

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
    size = tensor.dtype.itemsize
    if size == 16:
        # torch has no integer of 16 bytes to go through, but numpy has this dtype itself.
        return tensor.numpy().view(_RAW_DTYPES[16])
    through = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    return tensor.view(through).numpy().view(_RAW_DTYPES[size])
