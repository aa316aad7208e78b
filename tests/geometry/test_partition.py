"""Partitions against the oracle: torch's own chunk of an arange, axis by axis."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ucpstore.geometry import Box, Partition, Piece, Split, fragments, local_shape


def padded_chunks(tensor: torch.Tensor, parts: int, dim: int) -> list[torch.Tensor]:
    chunks = list(torch.chunk(tensor, parts, dim=dim)) if tensor.shape[dim] else []
    return chunks + [tensor.narrow(dim, 0, 0)] * (parts - len(chunks))


def oracle(partition: Partition, shape: tuple[int, ...]) -> dict[int, torch.Tensor]:
    """Local tensors of every rank, by torch's operators alone."""
    held = [torch.arange(math.prod(shape)).reshape(shape)]
    for size, split in zip(partition.axes, partition.splits, strict=True):
        following = []
        for tensor in held:
            if split is None:
                following.extend([tensor] * size)
                continue
            sections = padded_chunks(tensor, split.factor, split.dim)
            cut = [padded_chunks(section, size, split.dim) for section in sections]
            following.extend(
                torch.cat([section[part] for section in cut], dim=split.dim) for part in range(size)
            )
        held = following
    return dict(zip(partition.ranks, held, strict=True))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Partition, tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(0, 13), max_size=3)))
    axes = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    split = st.builds(Split, st.integers(0, max(len(shape) - 1, 0)), st.integers(1, 4))
    splits = tuple(draw(st.none() | split) if shape else None for _ in axes)
    ranks = tuple(draw(st.permutations(range(math.prod(axes)))))
    return Partition(axes, ranks, splits), shape


@settings(max_examples=300, deadline=None)
@given(cases())
def test_fragments_are_what_torch_chunk_gives(case) -> None:
    partition, shape = case
    whole = np.arange(math.prod(shape)).reshape(shape)
    expected = oracle(partition, shape)
    found = fragments(partition, shape)
    assert set(found) == set(expected)
    for rank, tensor in expected.items():
        assert local_shape(partition, shape, rank) == tuple(tensor.shape)
        local = np.full(tensor.shape, -1)
        for piece in found[rank]:
            assert piece.box.size > 0
            assert piece.box.shape == piece.local.shape
            assert (local[piece.local.slices()] == -1).all()
            local[piece.local.slices()] = whole[piece.box.slices()]
        np.testing.assert_array_equal(local, tensor.numpy())


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
