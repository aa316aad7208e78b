"""Calculation with the values of tensors: for which dtypes it is, and in which."""

from __future__ import annotations

import torch

from ucpstore import dtypes
from ucpstore.describe.tensors.plain import dtype_name
from ucpstore.errors import UnsupportedError
from ucpstore.spec import Lowered


def check_numbers(lowered: Lowered, local: torch.Tensor, where: str) -> None:
    """Refuse to calculate with what is no number of many digits."""
    if (local.is_floating_point() or local.is_complex()) and local.dtype.itemsize > 1:
        return
    for what, asked in (("scaled", lowered.scale != 1), ("average", lowered.mean)):
        if asked:
            raise UnsupportedError(
                f"{where}: rule {lowered.rule}: {what} is for floats of 16 bits and more, but the "
                "tensor has dtype "
                f"{dtype_name(local.dtype, where)}"
            )


def wide_of(own: torch.dtype, stored: str) -> torch.dtype:
    """A dtype that has the values of a float dtype and those of a stored one."""
    other = dtypes.to_torch(stored)
    if not (other.is_floating_point or other.is_complex):
        return torch.promote_types(own, torch.float64)
    # torch promotes no float8
    return own if other.itemsize == 1 else torch.promote_types(own, other)
