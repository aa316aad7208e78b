"""A tensor of any kind as this rank holds it: global shape, dtype, partition and plain memory."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from ucpstore.describe.ranks import Ranks
from ucpstore.describe.tensors.deepspeed import hold_sharded, refuse_expert, sharded
from ucpstore.describe.tensors.dtensor import local_of, sharding_of
from ucpstore.describe.tensors.held import Held, View, whole
from ucpstore.describe.tensors.numbers import check_numbers
from ucpstore.describe.tensors.plain import dtype_name, plain, waited
from ucpstore.errors import StateError
from ucpstore.geometry import pieces_of
from ucpstore.spec import Spec


def hold(tensor: torch.Tensor, ranks: Ranks, where: str, name: str | None = None) -> Held:
    """What this rank holds of `tensor`; UnsupportedError, naming `where`, if it cannot be stored.

    `name` is the full name by which a specification knows it, `where` if None: that of a tensor
    outside of modules, which keeps its key. Views with a pending conjugation or negation are
    resolved, which copies them.
    """
    tensor = waited(tensor)
    if ranks.spec is None and ranks.count > 1:
        refuse_expert(tensor, where)
    part = sharded(tensor)
    if part is not None:
        return hold_sharded(tensor, part, ranks, where)
    if isinstance(tensor, DTensor):
        tied = False
        if ranks.spec is not None:
            ranks.spec.check_dtensor(name or where)
            tied = _is_tied(ranks.spec, ranks.rank, name, where)
        sharding = sharding_of(tensor, ranks, where)
        local = plain(waited(local_of(tensor, sharding, ranks, where)), where)
        shape = tuple(tensor.shape)
        held = (View(local, sharding.pieces),)
        dtype = dtype_name(local.dtype, where)
        return Held(local, shape, dtype, sharding.partition, held, tied=tied)
    local = plain(tensor, where)
    dtype, shape = dtype_name(local.dtype, where), tuple(local.shape)
    if ranks.spec is None:
        return Held(local, shape, dtype, None, (View(local, whole(shape)),))
    lowered = ranks.spec.lower(name or where, shape, ranks.rank)
    tied = _is_tied(ranks.spec, ranks.rank, name, where)
    check_numbers(lowered, local, where)
    pieces = pieces_of(lowered.partition, lowered.shape, ranks.rank)
    return Held(
        local,
        lowered.shape,
        dtype,
        lowered.partition,
        (View(local, pieces),),
        lowered.scale,
        lowered.alone,
        tied,
        lowered.mean,
    )


def _is_tied(spec: Spec, rank: int, name: str | None, where: str) -> bool:
    """Whether a rule ties it; StateError where a rule names what keeps its key."""
    own = name or where
    key, stored = spec.key(own, rank), spec.stored(own, rank)
    if name is None and (key, stored) != (own, own):
        raise StateError(
            f"{where}: a rule gives it the name {stored!r}, but only parameters and buffers of "
            "modules are renamed or tied; put the module into the state instead of its "
            "state_dict(), or use the name as key"
        )
    return stored != key
