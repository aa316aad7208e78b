"""Saves and loads of many ranks in one process and in memory: what describing alone decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from describe.engine import Checkpoint, join, read

from ucpstore import Spec
from ucpstore.describe import describe, match
from ucpstore.geometry import RankClass, merge


def save(states: Sequence[Mapping[str, object]], spec: Spec | None) -> Checkpoint:
    """What a save by as many ranks as there are states stores; refused as a save refuses it."""
    group = {rank: rank for rank in range(len(states))}
    described = [
        describe(state, group_ranks=group, rank=rank, spec=spec)
        for rank, state in enumerate(states)
    ]
    merge(
        [
            RankClass((rank,), tuple(array.spec for array in each.arrays))
            for rank, each in enumerate(described)
        ]
    )
    return join(described)


def load(
    states: Sequence[Mapping[str, object]],
    checkpoint: Checkpoint,
    spec: Spec | None,
    *,
    strict: bool = True,
    cast: str | Sequence[str] = (),
) -> None:
    """Fill the states of as many ranks from it."""
    group = {rank: rank for rank in range(len(states))}
    for rank, state in enumerate(states):
        target = match(
            state,
            checkpoint.tree,
            checkpoint.infos,
            strict=strict,
            cast=cast,
            group_ranks=group,
            rank=rank,
            spec=spec,
        )
        read(target, checkpoint)
