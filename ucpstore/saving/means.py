"""Means of what several ranks hold of a part of an array."""

from __future__ import annotations

import numpy as np
import torch

from ucpstore.arrays.raw import RawArray, raw_array
from ucpstore.dtypes import to_torch
from ucpstore.geometry import Box


class Sum:
    """Adds up values of a region in float64 (complex128), so that equal ones have an exact mean."""

    def __init__(self, box: Box, dtype: str) -> None:
        self._box = box
        self._dtype = to_torch(dtype)
        wide = torch.complex128 if self._dtype.is_complex else torch.float64
        self._total = torch.zeros(box.shape, dtype=wide, device="cpu")

    def add(self, box: Box, values: RawArray) -> None:
        """Add the values of a box of the global array inside of the region."""
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        numbers = torch.from_numpy(data).view(self._dtype).reshape(box.shape)
        self._total[box.relative_to(self._box.offset).slices()] += numbers

    def mean(self, count: int) -> RawArray:
        """The mean of `count` times the region, in the dtype of the array."""
        return raw_array((self._total / count).to(self._dtype))
