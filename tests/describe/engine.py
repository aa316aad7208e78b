"""A checkpoint in memory: what save would store of a description, and what load would read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ucpstore import dtypes
from ucpstore.describe import ArrayInfo, LocalState, Target, describe, match
from ucpstore.format.per_rank import alone_path, layout_of, packed_path, to_row
from ucpstore.tree import Node, merge_nodes

ALONE = {0: 0}


@dataclass(frozen=True)
class Checkpoint:
    """The tree and the whole arrays of a saved state."""

    tree: Node
    arrays: Mapping[str, torch.Tensor]

    @property
    def infos(self) -> dict[str, ArrayInfo]:
        return {
            path: ArrayInfo(tuple(array.shape), dtypes.to_name(array.dtype))
            for path, array in self.arrays.items()
        }


def save(state: object, per_rank: Sequence[str] | str = ()) -> Checkpoint:
    """Save from a single process."""
    return join([describe(state, per_rank=per_rank, group_ranks=ALONE)])


def join(states: Sequence[LocalState]) -> Checkpoint:
    """The checkpoint of several ranks, in order."""
    arrays: dict[str, torch.Tensor] = {}
    for state in states:
        for held in state.arrays:
            spec = held.spec
            whole = arrays.setdefault(
                spec.path, torch.empty(spec.shape, dtype=dtypes.to_torch(spec.dtype))
            )
            for view in held.views:
                for piece in view.pieces:
                    whole[piece.box.slices()] = view.tensor[piece.local.slices()]
    documents: dict[str, dict[int, bytes]] = {}
    for state in states:
        for document in state.per_rank:
            documents.setdefault(document.path, {})[document.index] = document.data
    for path, by_index in documents.items():
        layout = layout_of([len(by_index[index]) for index in sorted(by_index)])
        if layout.row_bytes:
            rows = b"".join(to_row(by_index[index], layout.row_bytes) for index in sorted(by_index))
            packed = torch.frombuffer(bytearray(rows), dtype=torch.uint8)
            arrays[packed_path(path)] = packed.reshape(-1, layout.row_bytes)
        for index in layout.alone:
            data = torch.frombuffer(bytearray(by_index[index]), dtype=torch.uint8)
            arrays[alone_path(path, index)] = data
    return Checkpoint(
        merge_nodes([(rank, state.tree) for rank, state in enumerate(states)]), arrays
    )


def load(
    state: object,
    checkpoint: Checkpoint,
    *,
    strict: bool = True,
    cast: str | Sequence[str] | None = None,
    group_ranks: Mapping[int, int] = ALONE,
) -> Target:
    """Match, read everything, finish."""
    target = match(
        state,
        checkpoint.tree,
        checkpoint.infos,
        strict=strict,
        cast=cast,
        group_ranks=group_ranks,
    )
    read(target, checkpoint)
    return target


def read(target: Target, checkpoint: Checkpoint) -> None:
    """Carry out the reads, then finish."""
    for each in target.reads:
        for view in each.views:
            for piece in view.pieces:
                values = checkpoint.arrays[each.path][piece.box.slices()]
                view.tensor[piece.local.slices()] = values.to(view.tensor.device, view.tensor.dtype)
    target.finish()


def bits(tensor: torch.Tensor) -> bytes:
    """The values' bytes in logical order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
