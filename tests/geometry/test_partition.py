"""Partitions against the oracle: torch's own operators on an arange, axis by axis."""

import itertools
import math

import numpy as np
import pytest
import torch
from geometry.oracle import PADDING, oracle_blocks, oracle_ranges, partitions
from hypothesis import given, settings

from ucpstore.geometry import (
    Box,
    Flat,
    FlatView,
    Partition,
    Piece,
    Split,
    blocks_of,
    flat_views,
    fragments,
    local_shape,
)
from ucpstore.geometry.partition import block_starts


def filled(
    pieces: tuple[Piece, ...], extent: tuple[int, ...], shape: tuple[int, ...]
) -> np.ndarray:
    """Local memory of a rank as its pieces say; padding where no piece lies."""
    whole = np.arange(math.prod(shape)).reshape(shape)
    local = np.full(extent, PADDING)
    for piece in pieces:
        assert piece.box.size > 0
        assert piece.box.shape == piece.local.shape
        assert (local[piece.local.slices()] == PADDING).all()
        local[piece.local.slices()] = whole[piece.box.slices()]
    return local


@settings(max_examples=500, deadline=None)
@given(partitions())
def test_fragments_are_what_torch_gives(case) -> None:
    partition, shape = case
    expected = oracle_blocks(partition, shape)
    found = fragments(partition, shape)
    assert set(found) == set(expected)
    for rank, tensor in expected.items():
        assert local_shape(partition, shape, rank) == tuple(tensor.shape)
        local = filled(found[rank], tuple(tensor.shape), shape)
        np.testing.assert_array_equal(local, tensor.numpy())


@settings(max_examples=500, deadline=None)
@given(partitions(flat=True))
def test_flat_ranges_are_slices_of_the_flattened_block(case) -> None:
    partition, shape = case
    found = fragments(partition, shape)
    blocks = oracle_blocks(partition, shape)
    for rank, (start, values) in oracle_ranges(partition, shape).items():
        block = blocks[rank]
        assert local_shape(partition, shape, rank) == tuple(block.shape)
        held = torch.full((block.numel(),), PADDING)
        held[start : start + len(values)] = values
        local = filled(found.get(rank, ()), tuple(block.shape), shape)
        np.testing.assert_array_equal(local, held.reshape(block.shape).numpy())

        bounds, views = flat_views(partition, shape, rank)
        assert bounds == (start, start + len(values))
        assert len(views) <= max(2 * len(shape) - 1, 1)
        memory = np.full(len(values), 7_777)
        for view in views:
            size = math.prod(view.shape)
            assert (memory[view.start : view.start + size] == 7_777).all()
            memory[view.start : view.start + size] = filled(view.pieces, view.shape, shape).ravel()
        np.testing.assert_array_equal(memory, values.numpy())


@settings(max_examples=300, deadline=None)
@given(partitions(flat=True))
def test_without_the_flat_cut_blocks_are_whole(case) -> None:
    partition, shape = case
    expected = oracle_blocks(partition, shape)
    blocks = fragments(blocks_of(partition), shape)
    starts: list[set[int]] = [set() for _ in shape]
    for rank, tensor in expected.items():
        local = filled(blocks[rank], tuple(tensor.shape), shape)
        np.testing.assert_array_equal(local, tensor.numpy())
        for piece in blocks[rank]:
            for dim, offset in enumerate(piece.box.offset):
                starts[dim].add(offset)
    assert block_starts(partition, shape) == tuple(starts)


def test_uneven_rows() -> None:
    partition = Partition((4,), (0, 1, 2, 3), (Split(0),))
    assert {r: p[0].box for r, p in fragments(partition, (9, 2)).items() if p} == {
        0: Box((0, 0), (3, 2)),
        1: Box((3, 0), (3, 2)),
        2: Box((6, 0), (3, 2)),
    }
    assert local_shape(partition, (9, 2), 3) == (0, 2)
    assert fragments(partition, (9, 2))[3] == ()


def test_fully_sharded_over_tensor_parallel_is_interleaved() -> None:
    """17 rows, first in 2 by tensor parallelism (9, 8), then each of these in 2."""
    partition = Partition((2, 2), (0, 1, 2, 3), (Split(0, factor=2), Split(0)))
    assert fragments(partition, (17,)) == {
        0: (Piece(Box((0,), (5,)), Box((0,), (5,))),),
        1: (Piece(Box((9,), (4,)), Box((0,), (4,))),),
        2: (Piece(Box((5,), (4,)), Box((0,), (4,))),),
        3: (Piece(Box((13,), (4,)), Box((0,), (4,))),),
    }


def test_neighbouring_ranges_join_and_others_stay_pieces() -> None:
    interleaved = Partition((2,), (0, 1), (Split(0, factor=2),))
    assert [p.box for p in fragments(interleaved, (8,))[0]] == [Box((0,), (2,)), Box((4,), (2,))]
    alone = Partition((1,), (0,), (Split(0, factor=2),))
    assert [p.box for p in fragments(alone, (8,))[0]] == [Box((0,), (8,))]


def test_a_rank_outside_of_the_mesh_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        local_shape(Partition.whole((0, 2)), (3,), 1)


def test_splitting_a_dimension_twice_nests() -> None:
    partition = Partition((2, 3), tuple(range(6)), (Split(0), Split(0)))
    starts = [p[0].box.offset[0] for p in fragments(partition, (12,)).values()]
    assert starts == list(itertools.accumulate([0, 2, 2, 2, 2, 2]))


def test_sections_are_split_each_on_its_own() -> None:
    """Queries of 8 rows, keys and values of 2 each, over 2 ranks."""
    partition = Partition((2,), (0, 1), (Split(0, sections=(8, 2, 2)),))
    assert [p.box for p in fragments(partition, (12,))[0]] == [
        Box((0,), (4,)),
        Box((8,), (1,)),
        Box((10,), (1,)),
    ]
    assert [p.local for p in fragments(partition, (12,))[1]] == [
        Box((0,), (4,)),
        Box((4,), (1,)),
        Box((5,), (1,)),
    ]


def test_padding_is_held_and_not_stored() -> None:
    """10 rows, padded to 12, over 4 ranks: the last has one real row of three."""
    partition = Partition((4,), (0, 1, 2, 3), (Split(0),), padded=(12, 2))
    last = fragments(partition, (10, 2))[3]
    assert last == (Piece(Box((9, 0), (1, 2)), Box((0, 0), (1, 2))),)
    assert local_shape(partition, (10, 2), 3) == (3, 2)


def test_a_flat_range_inside_a_block_of_columns() -> None:
    """Columns 2 and 3 of (3, 4) flattened are 6 elements, from 2 on in a row of 4 x 2."""
    partition = Partition((2, 4), tuple(range(8)), (Split(1), Flat(2, 2)))
    assert {r: pieces for r, pieces in fragments(partition, (3, 4)).items() if pieces} == {
        1: (Piece(Box((0, 0), (1, 2)), Box((0, 0), (1, 2))),),
        2: (Piece(Box((1, 0), (1, 2)), Box((1, 0), (1, 2))),),
        3: (Piece(Box((2, 0), (1, 2)), Box((2, 0), (1, 2))),),
        5: (Piece(Box((0, 2), (1, 2)), Box((0, 0), (1, 2))),),
        6: (Piece(Box((1, 2), (1, 2)), Box((1, 0), (1, 2))),),
        7: (Piece(Box((2, 2), (1, 2)), Box((2, 0), (1, 2))),),
    }


def test_a_range_that_starts_and_ends_inside_of_rows_is_three_views() -> None:
    partition = Partition((2,), (0, 1), (Flat(0, 7),))
    whole = Box((0, 0), (1, 4))
    assert flat_views(partition, (3, 4), 0) == (
        (0, 7),
        (
            FlatView(0, (1, 4), (Piece(whole, whole),)),
            FlatView(4, (1, 3), (Piece(Box((1, 0), (1, 3)), Box((0, 0), (1, 3))),)),
        ),
    )
    (start, stop), views = flat_views(partition, (3, 4), 1)
    assert (start, stop) == (7, 12)
    assert [(view.start, view.shape) for view in views] == [(0, (1, 1)), (1, (1, 4))]


def test_sizes_for_another_number_of_ranks_are_refused() -> None:
    partition = Partition((3,), (0, 1, 2), (Split(0, sizes=(2, 3)),))
    with pytest.raises(ValueError, match=r"2 sizes \(2, 3\) for an axis of 3 ranks"):
        fragments(partition, (5,))
