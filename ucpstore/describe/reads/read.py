"""What a load has to read: stored arrays into views of this rank's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ucpstore.describe.tensors.held import View
from ucpstore.geometry import Index


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """Shape and dtype name of a stored array."""

    shape: Index
    dtype: str


Arrays = Mapping[str, ArrayInfo]
"""The stored arrays by path."""


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """Fill the boxes of the views with those of the stored array at `path`.

    Tensors are not necessarily of the stored `dtype`: values are converted as `torch.Tensor.to`
    does.
    """

    path: str
    views: tuple[View, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """Number of elements to fill."""
        return sum(piece.box.size for view in self.views for piece in view.pieces)
