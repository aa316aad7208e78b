"""Flat: a rank's part of several tensors that are laid end to end; optimizers of such parts."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ucpstore.errors import StateError

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

    One shape in the place of `shapes` makes it a part of one tensor, as ZeRO-3 keeps parameters.

    `over` are the axes of the specification along which the row is cut, the outermost first, or a
    DeviceMesh of one dimension; (): the row is not cut; None: all ranks of the call. `of` says
    whose rules of a specification hold: for a row the place of the tensors that its names belong
    to, `model` if None, for one tensor its full name, its own place if None.

    `is_state` tells states of an optimizer from parameters and their masters. It has to be given
    where a rule scales a tensor, for it scales no states.

    In a state a row is a dict of whole tensors, each under its name, and one tensor is a whole
    tensor: it can be saved as the one and loaded as the other.
    """

    __slots__ = ("is_row", "is_state", "of", "offsets", "over", "shapes", "tensor")

    def __init__(
        self,
        tensor: torch.Tensor,
        shapes: Mapping[str, Sequence[int]] | Sequence[int],
        over: str | Sequence[str] | DeviceMesh | None = None,
        *,
        offsets: Mapping[str, int] | None = None,
        of: str | None = None,
        is_state: bool | None = None,
    ) -> None:
        _check(tensor, shapes, over, offsets, of, is_state)
        self.tensor = tensor
        self.is_row = isinstance(shapes, Mapping)
        self.shapes = dict(shapes) if isinstance(shapes, Mapping) else {"": shapes}
        self.over = over
        self.offsets = None if offsets is None else dict(offsets)
        self.of = of
        self.is_state = is_state

    def __repr__(self) -> str:
        what = f"{len(self.shapes)} tensors" if self.is_row else "one tensor"
        return f"<Flat of {what}, {self.tensor.numel()} elements here>"


class FlatOptimizer:
    """An optimizer whose parameters are parts of rows, as ZeRO and distributed optimizers make it.

        adam = torch.optim.AdamW([part])
        row = ucpstore.Flat(part, {name: p.shape for name, p in model.named_parameters()}, "dp")
        state = {"model": model, "optim": ucpstore.FlatOptimizer(adam, [row])}

    Each Flat's tensor is a parameter of `optimizer` or a contiguous part of one; together they say
    what lies in every parameter. States of a parameter's shape are cut as the parameter is.

    It is stored as an optimizer of the whole tensors is, each state under the tensor's name, and
    can be saved as the one and loaded as the other. The rows themselves are stored as the state
    `master` of those tensors whose parameter in the model has another dtype.
    """

    __slots__ = ("flats", "optimizer")

    def __init__(self, optimizer: torch.optim.Optimizer, flats: Sequence[Flat]) -> None:
        if isinstance(flats, str) or not isinstance(flats, Sequence):
            raise StateError(
                "the flats of a FlatOptimizer must be a list of ucpstore.Flat, but they are a "
                f"{type(flats).__name__}; pass [flat]"
            )
        self.optimizer = optimizer
        self.flats = tuple(flats)

    def __repr__(self) -> str:
        return f"<FlatOptimizer of {len(self.flats)} rows>"


def _check(
    tensor: object, shapes: object, over: object, offsets: object, of: object, is_state: object
) -> None:
    """Refuse what is of the wrong type; whether numbers fit is seen when it is saved or loaded."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise _wrong("tensor", "a torch.Tensor of one dimension", tensor)
    named = shapes if isinstance(shapes, Mapping) else {"": shapes}
    for name, shape in named.items():
        if not isinstance(name, str) or not _is_shape(shape):
            what = "a dict of names and shapes, {'weight': (4, 3)}, or one shape, (4, 3)"
            raise _wrong("shapes", what, shapes)
    if offsets is not None and not (
        isinstance(offsets, Mapping) and _is_shape(tuple(offsets.values()))
    ):
        raise _wrong("offsets", "a dict of names and whole numbers of elements", offsets)
    names = [over] if isinstance(over, str) else over
    is_mesh = hasattr(over, "mesh_dim_names")
    if not (over is None or is_mesh or (isinstance(names, Sequence) and all(map(_is_name, names)))):
        raise _wrong("over", "the name of an axis, a list of names, a DeviceMesh or None", over)
    if not (of is None or isinstance(of, str)):
        raise _wrong("of", "the place of a module, a string, or None", of)
    if not (is_state is None or isinstance(is_state, bool)):
        raise _wrong("is_state", "True, False or None", is_state)


def _is_shape(value: object) -> bool:
    if isinstance(value, str) or not isinstance(value, Sequence):
        return False
    return all(hasattr(each, "__index__") and operator.index(each) >= 0 for each in value)


def _is_name(value: object) -> bool:
    return isinstance(value, str)


def _wrong(what: str, expected: str, found: object) -> StateError:
    return StateError(f"Flat: {what} must be {expected}, but it is {found!r}"[:300])
