import time

from ucpstore.geometry import (
    ArraySpec,
    Block,
    Blocks,
    Box,
    GlobalArray,
    Layout,
    Partition,
    RankClass,
    Split,
    merge,
)
from ucpstore.options import MIB, Options
from ucpstore.plan import plan_save
from ucpstore.plan.save import Message, ObjectWrite, Transfer


def spec(path: str, shape: tuple[int, ...], partition: Partition | None) -> ArraySpec:
    return ArraySpec(path, shape, "float32", tuple("xyz"[: len(shape)]), partition)


def rows(size: int) -> Partition:
    return Partition((size,), tuple(range(size)), (Split(0),))


def arrays(size: int, *specs: ArraySpec) -> tuple[GlobalArray, ...]:
    return merge([RankClass(tuple(range(size)), specs)])


def test_who_holds_an_object_writes_it_without_exchange() -> None:
    plan = plan_save(arrays(4, spec("w", (4096, 4096), rows(4))), 4, Options())
    assert plan.owners(0) == (0, 1, 2, 3)
    assert (plan.exchanged_bytes, plan.rounds) == (0, 0)
    assert plan.rank(2).writes == (ObjectWrite(0, (2, 0), (Box((2048, 0), (1024, 4096)),)),)
    assert plan.rank(0).metadata == (0,)
    assert plan.rank(1).metadata == ()


def test_a_small_array_in_parts_goes_to_one_rank() -> None:
    plan = plan_save(arrays(3, spec("norm", (8,), rows(3))), 3, Options())
    first, second, third = (plan.rank(rank) for rank in range(3))
    assert first.writes == ()
    parts = [Transfer(0, (0,), Box((3,), (3,))), Transfer(0, (0,), Box((6,), (2,)))]
    assert first.rounds[0].receives == (Message(1, (parts[0],)), Message(2, (parts[1],)))
    assert first.rounds[0].writes == (ObjectWrite(0, (0,), (Box((0,), (3,)),)),)
    assert second.rounds[0].sends == (Message(0, (parts[0],)),)
    assert third.rounds[0].sends == (Message(0, (parts[1],)),)
    assert plan.exchanged_bytes == 5 * 4


def test_replicas_share_the_writing_evenly() -> None:
    replicated = arrays(4, *(spec(f"w{n}", (4096, 4096), None) for n in range(4)))
    written = plan_save(replicated, 4, Options()).written_bytes()
    assert max(written) == min(written) > 64 * MIB


def test_free_objects_fill_up_ranks_that_write_less() -> None:
    """Rank 0 alone holds 64 MiB, so the others write the replicated 128 MiB."""
    alone = RankClass((0,), (spec("alone", (4096, 4096), None), spec("all", (8192, 4096), None)))
    others = RankClass((1, 2), (spec("all", (8192, 4096), None),))
    plan = plan_save(merge([alone, others]), 3, Options())
    assert set(plan.owners(1)) == {0}
    assert sorted(plan.owners(0)) == [1, 1, 1, 1, 2, 2, 2, 2]


def test_many_small_arrays_are_spread_by_number() -> None:
    """Rank 3 has 1 MiB less of the large array, which small arrays do not have to make up for."""
    uneven = spec("w", (4096 * 4 - 64, 4096), rows(4))
    plan = plan_save(
        arrays(4, uneven, *(spec(f"n{n:02}", (8,), None) for n in range(40))), 4, Options()
    )
    small = [plan.owners(n)[0] for n in range(40)]
    assert max(small.count(rank) for rank in range(4)) <= 14


def test_a_part_with_replicas_is_sent_once() -> None:
    partition = Partition((2, 2), (0, 1, 2, 3), (None, Split(0)))
    plan = plan_save(arrays(4, spec("norm", (8,), partition)), 4, Options())
    assert plan.owners(0) == (0,)
    senders = [rank for rank in range(4) if plan.rank(rank).rounds[0].sends]
    assert senders == [1]
    assert plan.exchanged_bytes == 16


def test_the_owner_takes_from_its_own_memory_what_it_holds() -> None:
    """Rank 2 owns the second array and holds half of it, though rank 0 has sent less."""
    partition = Partition((2, 2), (0, 1, 2, 3), (None, Split(0)))
    plan = plan_save(arrays(4, *(spec(f"n{n}", (8,), partition) for n in range(4))), 4, Options())
    assert [plan.owners(n) for n in range(4)] == [(0,), (1,), (2,), (3,)]
    own = [write.own for r in range(4) for write in plan.rank(r).rounds[0].writes]
    halves = (Box((0,), (4,)),), (Box((4,), (4,)),)
    assert own == [halves[0], halves[1], halves[0], halves[1]]


def test_all_but_one_element_is_not_all() -> None:
    blocks = [Block(Box((0,), (8,)), (0,)), Block(Box((8,), (1,)), (1,))]
    laid = Layout((9,), Blocks.of(1, blocks))
    plan = plan_save((GlobalArray("n", (9,), "float32", ("x",), laid),), 2, Options())
    assert plan.rank(0).writes == ()
    assert plan.rank(1).rounds[0].sends == (Message(0, (Transfer(0, (0,), Box((8,), (1,))),)),)


def test_arrays_without_elements_still_have_metadata() -> None:
    empty = arrays(2, spec("a", (0, 4), rows(2)), spec("b", (3, 0), None))
    plan = plan_save(empty, 2, Options())
    assert (plan.objects, plan.stored_bytes) == (0, 0)
    assert [plan.rank(rank).metadata for rank in range(2)] == [(0,), (1,)]


def test_rounds_above_the_budget_hold_one_object_per_owner() -> None:
    prime = arrays(8, *(spec(f"w{n}", (32003, 1024), rows(8)) for n in range(2)))
    plan = plan_save(prime, 8, Options(budget_bytes=MIB))
    # Ranks hold 4001 rows, so of 8 objects only the last lies within the rows of one rank.
    assert plan.arrays[0].grid.object == (4008, 1024)
    assert plan.objects == 16
    owned = [[len(plan.rank(r).rounds[n].writes) for r in range(8)] for n in range(plan.rounds)]
    assert sum(map(sum, owned)) == 14
    assert max(map(max, owned)) == 1
    assert plan.rounds <= 4


def test_the_plan_does_not_depend_on_who_makes_it() -> None:
    made = arrays(4, spec("w", (5000, 700), rows(4)), spec("v", (3001, 999), rows(4)))
    again = arrays(4, spec("w", (5000, 700), rows(4)), spec("v", (3001, 999), rows(4)))
    for rank in range(4):
        assert plan_save(made, 4, Options()).rank(rank) == plan_save(again, 4, Options()).rank(rank)


def test_a_thousand_arrays_on_a_thousand_ranks() -> None:
    shapes = [(8192, 8192), (28672, 8192), (1024, 8192), (8192,)]
    mesh = Partition((128, 8), tuple(range(1024)), (Split(0), None))
    fully = rows(1024)
    many = arrays(
        1024,
        *(spec(f"{n:04}", shapes[n % 4], fully if n % 2 else mesh) for n in range(1000)),
    )
    start = time.process_time()
    plan = plan_save(many, 1024, Options())
    plan.rank(7)
    assert time.process_time() - start < 10
    written = plan.written_bytes()
    assert max(written) < 1.1 * sum(written) / 1024
