"""What of a tensor lies where in a rank's part of a row."""

from __future__ import annotations

import torch

from ucpstore.describe.ranks import Mesh
from ucpstore.describe.tensors.held import View, cut_by, views_of, whole
from ucpstore.geometry import Flat as FlatCut


def _parts(offset: int, length: int, shape: tuple[int, ...], ranks: int) -> list[list[View]]:
    """The views of each rank of a row of parts of `length`, whose elements are their numbers."""
    row = torch.arange(ranks * length)
    partition = cut_by(Mesh((ranks,), tuple(range(ranks))), FlatCut(offset, length))
    return [
        [*views_of(row[at * length : (at + 1) * length], partition, shape, at, offset)]
        for at in range(ranks)
    ]


def test_the_views_of_all_ranks_are_the_tensor() -> None:
    """One of 3 x 4 that begins at 5 of a row of 3 parts of 7."""
    shape, offset = (3, 4), 5
    found = torch.full(shape, -1)
    for views in _parts(offset, 7, shape, 3):
        for view in views:
            for piece in view.pieces:
                found[piece.box.slices()] = view.tensor[piece.local.slices()]
    assert torch.equal(found, torch.arange(offset, offset + 12).view(shape))


def test_views_share_the_memory_of_the_row() -> None:
    row = torch.zeros(4)
    partition = cut_by(Mesh((1,), (0,)), FlatCut(1, 4))
    (view,) = views_of(row, partition, (2,), 0, 1)
    view.tensor.fill_(1)
    assert row.tolist() == [0, 1, 1, 0]


def test_a_rank_of_which_nothing_lies_in_the_row_has_no_views() -> None:
    assert [len(views) for views in _parts(0, 2, (2,), 3)] == [1, 0, 0]


def test_replicas_of_a_row_hold_the_same() -> None:
    partition = cut_by(Mesh((2, 2), (0, 1, 2, 3)), FlatCut(0, 2))
    row = torch.arange(2)
    boxes = [
        [piece.box for view in views_of(row, partition, (4,), rank, 0) for piece in view.pieces]
        for rank in range(4)
    ]
    assert boxes[0] == boxes[1] != boxes[2] == boxes[3]


def test_a_tensor_without_elements_has_no_piece() -> None:
    assert whole((2, 0)) == ()
    (piece,) = whole(())
    assert piece.box.size == 1
