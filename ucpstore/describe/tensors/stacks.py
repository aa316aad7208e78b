"""Stacks: parameters of this rank that are layers of one stored array, by a rule of the user."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from ucpstore.describe.ranks import Ranks
from ucpstore.describe.tensors.held import Held, View
from ucpstore.describe.tensors.memory import overlaps_itself
from ucpstore.describe.tensors.numbers import check_numbers
from ucpstore.describe.tensors.plain import dtype_name, plain
from ucpstore.errors import StateError
from ucpstore.spec import Layer


def layer_of(full_name: str, ranks: Ranks) -> tuple[str, int] | None:
    """The full name of the stack of which a tensor is a layer, and its index; None for others."""
    return None if ranks.spec is None else ranks.spec.stack(full_name, ranks.rank)


def hold_stack(
    tensors: Sequence[torch.Tensor], names: Sequence[str], ranks: Ranks, where: str
) -> Held:
    """What this rank holds of a stack: a view for each layer, in rising order of index.

    `names` are the full names by which a specification knows the layers. `local` has the shape of
    all layers together, and no memory. Raises StateError, naming the stack and its layers, where
    they are not alike, or are not those that the rule gives this rank.
    """
    assert ranks.spec is not None, "stacks come of a specification"
    layers, views = [], []
    for tensor, name in zip(tensors, names, strict=True):
        if isinstance(tensor, DTensor):
            raise StateError(
                f"{name}: a rule stacks it, but the tensor is a DTensor; only plain tensors are "
                "stacked: keep the layers in one stacked DTensor, or let the rule rename them only"
            )
        local = plain(tensor, name)
        if overlaps_itself(local):
            raise StateError(
                f"{name}: a rule stacks it, but several of its elements are the same memory; use "
                "its contiguous() copy"
            )
        at = layer_of(name, ranks)
        assert at is not None, "a layer of the stack"
        layers.append(Layer(name, at[1], tuple(local.shape), dtype_name(local.dtype, name)))
        views.append(local.unsqueeze(0))
    lowered, pieces = ranks.spec.lower_stack(layers, ranks.rank)
    check_numbers(lowered, views[0], where)
    shape = (len(layers), *layers[0].shape)
    return Held(
        torch.empty(shape, dtype=views[0].dtype, device="meta"),
        lowered.shape,
        layers[0].dtype,
        lowered.partition,
        tuple(View(view, own) for view, own in zip(views, pieces, strict=True)),
        lowered.scale,
        lowered.alone,
        False,
        lowered.mean,
    )
