"""Flat: a rank's part of several tensors that are laid end to end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh


class Flat:
    """This rank's part of a row of flattened tensors, as ZeRO and distributed optimizers keep it.

        moments = ucpstore.Flat(exp_avg, {"embed.weight": (1000, 64), "norm.weight": (64,)}, "dp")
        ucpstore.save(url, {"model": model, "optim": {"exp_avg": moments}}, step=1, spec=spec)

    `tensor` is 1-D and contiguous: part number c of the row on the rank with coordinate c, all
    parts of equal length. `shapes` are the tensors' names and shapes in the order of the row, each
    in row-major order; the shape is that of the rank's own block where other axes cut the tensor.
    `offsets` say where each begins, in elements, where they do not simply follow each other. What
    lies between and behind is padding: it is not stored, and a load leaves it alone.

    `over` are the axes of the specification along which the row is cut, the outermost first, or a
    DeviceMesh of one dimension; None: all ranks of the call. `of` is the place of the tensors that
    the names belong to: the rules of a specification for `model.embed.weight` hold for
    `embed.weight`.

    `is_state` tells states of an optimizer from parameters and their masters. It has to be given
    where a rule scales a tensor, for it scales no states.

    In a state it is a dict of whole tensors, each under its name, and it can be saved as the one
    and loaded as the other.
    """

    __slots__ = ("is_state", "of", "offsets", "over", "shapes", "tensor")

    def __init__(
        self,
        tensor: torch.Tensor,
        shapes: Mapping[str, Sequence[int]],
        over: str | Sequence[str] | DeviceMesh | None = None,
        *,
        offsets: Mapping[str, int] | None = None,
        of: str = "model",
        is_state: bool | None = None,
    ) -> None:
        self.tensor = tensor
        self.shapes = dict(shapes)
        self.over = over
        self.offsets = None if offsets is None else dict(offsets)
        self.of = of
        self.is_state = is_state

    def __repr__(self) -> str:
        return f"<Flat of {len(self.shapes)} tensors, {self.tensor.numel()} elements here>"
