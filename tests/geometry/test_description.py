import time

import pytest

from ucpstore.errors import StateError
from ucpstore.geometry import (
    ArraySpec,
    Box,
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


def test_bytes_keep_everything_and_are_canonical() -> None:
    specs = (spec(None), spec(ROWS, "b"), spec(Partition((2, 1), (3, 1), (Split(1, 4), None)), "c"))
    assert specs_from_bytes(specs_to_bytes(specs)) == specs
    assert specs_to_bytes(specs) == specs_to_bytes(tuple(specs))


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
    assert empty.layout.blocks == ()
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
