"""What is done to the target's memory at the end of a load, once everything is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ucpstore.describe.tensors.held import View


def clear_padding(view: View) -> None:
    """Zeros behind what is real; padding lies at the end of each dimension."""
    ends = [piece.local.stop for piece in view.pieces]
    with _writing(view.tensor):
        for dim, extent in enumerate(view.tensor.shape):
            real = max((end[dim] for end in ends), default=0)
            view.tensor.narrow(dim, real, extent - real).zero_()


def divide(own: View, stored: View, by: int) -> None:
    """Fill with the stored values divided; the pieces alone, so that padding stays as it is."""
    with _writing(own.tensor):
        for piece in own.pieces:
            where = piece.local.slices()
            own.tensor[where].copy_(stored.tensor[where] / by)


def fill(local: torch.Tensor, saved: torch.Tensor) -> None:
    """Fill all of a tensor."""
    with _writing(local):
        local.copy_(saved)


@contextmanager
def _writing(tensor: torch.Tensor) -> Iterator[None]:
    """Allow to change a tensor that asks for a gradient, or was made in inference mode."""
    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
        yield


def same_values(stored: View, own: View, scale: int) -> bool:
    """Whether the pieces of a view hold what is stored, bit for bit."""
    for piece in own.pieces:
        where = piece.local.slices()
        found = stored.tensor[where] / scale if scale != 1 else stored.tensor[where]
        if not _same_bits(found.to(own.tensor.dtype), own.tensor[where]):
            return False
    return True


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    pair = [side.contiguous().reshape(-1).view(torch.uint8) for side in (left, right)]
    return torch.equal(*pair)
