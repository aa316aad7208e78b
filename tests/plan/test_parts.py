"""Objects and who holds what of them, against masks of the elements that each rank holds."""

import math

import numpy as np
import pytest
from geometry.oracle import PADDING, oracle_blocks, oracle_ranges, partitions
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ucpstore.geometry import (
    ArraySpec,
    Block,
    Blocks,
    Box,
    Layout,
    Partition,
    RankClass,
    merge,
)
from ucpstore.options import Options
from ucpstore.plan.parts import NOBODY, Senders, overlay_of

SMALL = Options(chunk_bytes=4096, least_bytes=8192, target_bytes=65536)
shapes = st.one_of(
    st.lists(st.integers(0, 6), max_size=3).map(tuple),
    st.tuples(st.integers(70_000, 90_000)),
    st.tuples(st.integers(200, 400), st.integers(350, 500)),
    st.tuples(st.integers(3, 6), st.integers(90, 120), st.integers(240, 300)),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.booleans().flatmap(lambda flat: partitions(flat, shapes, 2)), st.booleans())
def test_holders_and_senders_of_objects(case, mean) -> None:
    partition, shape = case
    ranks = tuple(sorted(partition.ranks))
    spec = ArraySpec("a", shape, "complex128", tuple("xyzt"[: len(shape)]), partition)
    (array,) = merge([RankClass(ranks, (spec,))])
    overlay = overlay_of(array.layout, 16, SMALL, mean=mean)
    has = held_by_rank(partition, shape)
    copied = sum(has.values()) > 1
    indices = list(overlay.grid.object_indices())
    assert len(overlay.stored_bytes) == len(indices)
    for number, index in enumerate(indices):
        box = overlay.grid.object_box(index)
        size = box.size
        assert overlay.index(number) == index
        assert overlay.stored_bytes[number] == overlay.grid.object_bytes(index, 16)
        filled = np.zeros(shape, int)
        for part in overlay.parts_of(number):
            filled[overlay.box(number, part).slices()] += 1
        assert filled.sum() == size
        assert (filled[box.slices()] == 1).all()
        counts = {rank: int(has[rank][box.slices()].sum()) for rank in ranks}
        some = [rank for rank in ranks if counts[rank]]
        whole = [rank for rank in ranks if counts[rank] == size]
        several = bool(copied[box.slices()].any())
        shared = not whole or (mean and several)
        assert bool(overlay.shared[number]) is shared
        owning = some if shared else whole
        assert overlay.candidates(number).tolist() == owning
        assert overlay.settled[number] == (owning[0] if len(owning) == 1 else NOBODY)
        assert (number in overlay.sole) is (shared and (mean or not several))
        if number in overlay.sole:
            senders = overlay.sole[number]
            assert senders.ranks.tolist() == some
            for rank in ranks:
                assert senders.bytes_of(rank) == 16 * counts[rank]
                boxes = [overlay.box(number, part) for part in senders.parts_of(rank)]
                assert sum(each.size for each in boxes) == counts[rank]
                assert all(has[rank][each.slices()].all() for each in boxes)


def held_by_rank(partition: Partition, shape: tuple[int, ...]) -> dict[int, np.ndarray]:
    """For each rank which elements of the array it holds."""
    if partition.flat is None:
        held = {r: block.reshape(-1) for r, block in oracle_blocks(partition, shape).items()}
    else:
        held = {r: values for r, (_, values) in oracle_ranges(partition, shape).items()}
    masks = {}
    for rank, values in held.items():
        mask = np.zeros(math.prod(shape), int)
        mask[values[values != PADDING].numpy()] = 1
        masks[rank] = mask.reshape(shape)
    return masks


def test_one_sender_for_each_part() -> None:
    """Parts 7 to 10 of 1, 2, 4 and 8 bytes."""
    senders = Senders.of(np.array([5, 3, 5, 9]), np.array([1, 2, 4, 8]), 7)
    assert senders.ranks.tolist() == [3, 5, 9]
    assert [senders.bytes_of(rank) for rank in (3, 4, 5, 9, 10)] == [2, 0, 5, 8, 0]
    assert [list(senders.parts_of(rank)) for rank in (3, 4, 5, 10)] == [[8], [], [7, 9], []]
    assert senders.total_bytes == 15


@pytest.mark.parametrize("mean", [False, True])
def test_an_object_with_two_blocks_of_one_rank_is_its_own(mean: bool) -> None:
    halves = [Block(Box((0,), (4,)), (0, 2)), Block(Box((4,), (4,)), (1, 2))]
    overlay = overlay_of(Layout((8,), Blocks.of(1, halves)), 4, Options(), mean=mean)
    assert overlay.shared.tolist() == [mean]
    assert overlay.candidates(0).tolist() == ([0, 1, 2] if mean else [2])
