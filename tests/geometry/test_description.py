import math
import time

import pytest
from geometry.oracle import PADDING, oracle_blocks, oracle_ranges, partitions
from hypothesis import assume, given, settings

from ucpstore.errors import StateError
from ucpstore.geometry import (
    ArraySpec,
    Box,
    Flat,
    Partition,
    RankClass,
    Split,
    merge,
    specs_from_bytes,
    specs_to_bytes,
)


def spec(partition: Partition | None, path: str = "a", shape=(8, 4), dtype="float32") -> ArraySpec:
    return ArraySpec(path, shape, dtype, ("x", "y"), partition)


ROWS = Partition((2,), (0, 1), (Split(0),))
COLUMNS = Partition((2,), (0, 1), (Split(1),))


def described(case: tuple[Partition, tuple[int, ...]], path: str = "a") -> ArraySpec:
    partition, shape = case
    return ArraySpec(path, shape, "float32", tuple("xyzt"[: len(shape)]), partition)


@settings(max_examples=200, deadline=None)
@given(partitions(), partitions(flat=True), partitions(flat=True))
def test_bytes_keep_everything_and_are_canonical(plain, flat, other) -> None:
    specs = (
        spec(None),
        *(described(case, f"{n}") for n, case in enumerate([plain, flat, other])),
        described(plain, "again"),
    )
    data = specs_to_bytes(specs)
    assert specs_from_bytes(data) == specs
    # made anew, so that nothing hangs on which objects are one
    assert specs_to_bytes(specs_from_bytes(data)) == data


def test_a_mesh_is_told_once() -> None:
    ranks = tuple(range(1024))
    flat = [Partition((8, 128), ranks, (Split(0), Flat(1000 * n, 777))) for n in range(100)]
    specs = [spec(partition, f"{n}") for n, partition in enumerate(flat)]
    data = specs_to_bytes(specs)
    assert len(data) < 20_000
    first, *others = specs_from_bytes(data)
    assert all(other.partition.ranks is first.partition.ranks for other in others)


def test_ranks_of_one_class_that_hold_a_plain_tensor_are_its_holders() -> None:
    (array,) = merge([RankClass((0, 3), (spec(None),))])
    assert [(b.box, b.ranks) for b in array.layout.blocks] == [(Box((0, 0), (8, 4)), (0, 3))]


def test_classes_join_and_arrays_are_sorted() -> None:
    arrays = merge([RankClass((0,), (spec(ROWS), spec(None, "c"))), RankClass((1,), (spec(ROWS),))])
    assert [a.path for a in arrays] == ["a", "c"]
    assert [b.ranks for b in arrays[0].layout.blocks] == [(0,), (1,)]
    assert arrays[1].layout.blocks[0].ranks == (0,)


def test_arrays_cut_alike_share_one_layout() -> None:
    first, second, third = merge(
        [RankClass((0, 1), (spec(ROWS, "a"), spec(ROWS, "b"), spec(COLUMNS, "c")))]
    )
    assert first.layout is second.layout
    assert third.layout is not first.layout


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"shape": (9, 4)}, r"a: ranks disagree about its shape: rank 0 has \(8, 4\), rank 1"),
        ({"dtype": "bfloat16"}, "its dtype: rank 0 has float32, rank 1 has bfloat16"),
    ],
)
def test_ranks_that_disagree_are_named(changed, words) -> None:
    with pytest.raises(StateError, match=words):
        merge([RankClass((0,), (spec(None),)), RankClass((1,), (spec(None, **changed),))])


def test_elements_that_nobody_holds_are_refused() -> None:
    with pytest.raises(StateError, match="hold 0 of the 1 elements"):
        merge([RankClass((0,), (ArraySpec("s", (), "float32", (), Partition((0,), (), (None,))),))])


@pytest.mark.parametrize("other", [COLUMNS, Partition((4,), (0, 1, 2, 3), (Split(0),))])
def test_overlapping_parts_are_refused(other: Partition) -> None:
    with pytest.raises(StateError, match="hold overlapping parts"):
        merge([RankClass((0,), (spec(ROWS),)), RankClass((1,), (spec(other),))])


def test_empty_and_0d_arrays() -> None:
    empty, scalar = merge(
        [RankClass((0, 1), (spec(ROWS, "e", (0, 4)), ArraySpec("s", (), "int64", (), None)))]
    )
    assert list(empty.layout.blocks) == []
    assert [(b.box, b.ranks) for b in scalar.layout.blocks] == [(Box((), ()), (0, 1))]


def test_a_thousand_columns_are_proved_at_once() -> None:
    ranks = tuple(range(1024))
    columns = Partition((1024,), ranks, (Split(1),))
    start = time.process_time()
    merge([RankClass(ranks, (spec(columns, shape=(8192, 8192)),))])
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize("rule", [Split(0), None])
def test_a_part_of_a_rank_that_does_not_describe_the_array_is_refused(rule: Split | None) -> None:
    shared = Partition((2,), (0, 1), (rule,))
    with pytest.raises(StateError, match=r"a: rank 1 holds .* its own state has no such tensor"):
        merge([RankClass((0,), (spec(shared),)), RankClass((1,), ())])
    # one row over two ranks: rank 1 holds nothing
    alone = Partition((2,), (0, 1), (Split(0),))
    merge([RankClass((0,), (spec(alone, shape=(1, 4)),)), RankClass((1,), ())])


@settings(max_examples=300, deadline=None)
@given(partitions(flat=True))
def test_every_element_of_flat_ranges_is_held_once_up_to_replicas(case) -> None:
    """By the numbers of the elements in the oracle's slices: who holds which."""
    partition, shape = case
    ranks = tuple(sorted(partition.ranks))
    (array,) = merge([RankClass(ranks, (described(case),))])
    expected: dict[int, set[int]] = {n: set() for n in range(math.prod(shape))}
    for rank, (_, values) in oracle_ranges(partition, shape).items():
        for number in values[values != PADDING].tolist():
            expected[number].add(rank)
    assert all(expected.values())
    found: dict[int, set[int]] = {}
    for block in array.layout.blocks:
        for number in numbers(block.box, shape):
            assert number not in found
            found[number] = set(block.ranks)
    assert found == expected
    assert array.layout.lines is not None


def numbers(box: Box, shape: tuple[int, ...]) -> list[int]:
    places = [0]
    for offset, length, extent in zip(box.offset, box.shape, shape, strict=True):
        places = [place * extent + offset + n for place in places for n in range(length)]
    return places


@settings(max_examples=200, deadline=None)
@given(partitions(flat=True))
def test_a_row_that_ends_too_early_is_refused(case) -> None:
    partition, shape = case
    (axis,) = [a for a, split in enumerate(partition.splits) if isinstance(split, Flat)]
    flat = partition.splits[axis]
    blocks = oracle_blocks(partition, shape)
    real = max(
        (
            int((b.reshape(-1) != PADDING).nonzero().max())
            for b in blocks.values()
            if (b != PADDING).any()
        ),
        default=None,
    )
    assume(real is not None)
    part = (flat.offset + real) // partition.axes[axis]  # the last real element is outside
    assume(part > 0)
    splits = (*partition.splits[:axis], Flat(flat.offset, part), *partition.splits[axis + 1 :])
    short = Partition(partition.axes, partition.ranks, splits, partition.padded)
    with pytest.raises(StateError, match=r"^a: nobody holds Box"):
        merge([RankClass(tuple(sorted(partition.ranks)), (described((short, shape)),))])


@pytest.mark.parametrize(
    ("partition", "words"),
    [
        (
            Partition((2,), (0, 1), (Split(0, sizes=(4, 3)),)),
            r"a: nobody holds Box\(offset=\(7, 0\), shape=\(1, 4\)\); the ranks hold 28 of the 32",
        ),
        (
            Partition((2,), (0, 1), (Split(0, sections=(4, 2)),)),
            r"a: nobody holds Box\(offset=\(6, 0\), shape=\(2, 4\)\); the ranks hold 24 of the 32",
        ),
        (
            Partition((2, 2), (0, 1, 2, 3), (Split(1), Flat(3, 9))),
            r"a: nobody holds Box\(offset=\(7, 1\), shape=\(1, 1\)\); the ranks hold 30 of the 32",
        ),
    ],
)
def test_what_does_not_add_up_is_refused_with_the_gap(partition, words) -> None:
    with pytest.raises(StateError, match=words):
        merge([RankClass(partition.ranks, (spec(partition),))])


def test_flat_ranges_that_overlap_are_refused() -> None:
    """Rank 2 joins with a row of its own, whose ranges end elsewhere."""
    two = Partition((2,), (0, 1), (Flat(0, 16),))
    three = Partition((2,), (2, 3), (Flat(4, 18),))
    with pytest.raises(
        StateError,
        match=r"a: rank \d and rank \d hold overlapping parts that are not the same, Box.* and Box",
    ):
        merge([RankClass((0, 1), (spec(two),)), RankClass((2, 3), (spec(three),))])


def test_lines_are_those_of_the_blocks() -> None:
    partition = Partition((2, 4), tuple(range(8)), (Split(1), Flat(2, 5)))
    (array,) = merge([RankClass(partition.ranks, (spec(partition),))])
    assert array.layout.lines == ((0,), (0, 2))
    (array,) = merge([RankClass(ROWS.ranks, (spec(ROWS),))])
    assert array.layout.lines is None
