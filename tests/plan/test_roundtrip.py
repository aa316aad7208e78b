"""Plans carried out in memory: from any arrangement of ranks to any other, element by element."""

import math

import numpy as np
from geometry import oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from ucpstore.geometry import (
    ArraySpec,
    Box,
    Grid,
    Partition,
    RankClass,
    Split,
    fragments,
    local_shape,
    merge,
)
from ucpstore.options import Options
from ucpstore.plan import plan_reads, plan_save
from ucpstore.plan.save import SavePlan

ITEMSIZE = 4
SMALL = Options(chunk_bytes=4096, least_bytes=8192, target_bytes=65536, budget_bytes=4 * 150_000)
"""So small that arrays of a few MiB have many chunks, objects and rounds."""

shapes = st.one_of(
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
    st.tuples(st.integers(270_000, 400_000)),
    st.tuples(st.integers(500, 900), st.integers(600, 800)),
    st.tuples(st.integers(1, 70), st.integers(5000, 9000)),
    st.tuples(st.integers(3, 17), st.integers(150, 200), st.integers(160, 250)),
)


@st.composite
def partitions(draw: st.DrawFn, dims: int) -> Partition:
    axes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    splits: list[Split | None] = [None] * len(axes)
    if dims:
        for axis in range(len(axes)):
            if draw(st.booleans()):
                splits[axis] = Split(draw(st.integers(0, dims - 1)), draw(st.integers(1, 3)))
    ranks = draw(st.permutations(range(math.prod(axes))))
    return Partition(axes, tuple(ranks), tuple(splits))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[tuple[int, ...], Partition, Partition]:
    shape = draw(shapes)
    return shape, draw(arrangements(shape)), draw(arrangements(shape))


def arrangements(shape: tuple[int, ...]) -> st.SearchStrategy[Partition]:
    """Blocks, or flat ranges of blocks with sections, sizes and padding."""
    flat = oracle.partitions(flat=True, shapes=st.just(shape), mesh=1)
    return st.one_of(partitions(len(shape)), flat.map(lambda case: case[0]))


def planned(shape: tuple[int, ...], *sources: Partition, options: Options = SMALL) -> SavePlan:
    """The plan for one array per source partition."""
    ranks = tuple(range(max(math.prod(source.axes) for source in sources)))
    classes = []
    for rank in ranks:
        specs = tuple(
            ArraySpec(f"a{n}", shape, "float32", tuple("xyz"[: len(shape)]), source)
            for n, source in enumerate(sources)
            if rank in source.ranks
        )
        classes.append(RankClass((rank,), specs))
    return plan_save(merge(classes), len(ranks), options)


def local_tensors(partition: Partition, whole: np.ndarray) -> dict[int, np.ndarray]:
    """What every rank holds; places that no piece covers are -1."""
    local = {}
    for rank, pieces in fragments(partition, whole.shape).items():
        local[rank] = np.full(local_shape(partition, whole.shape, rank), -1, whole.dtype)
        for piece in pieces:
            local[rank][piece.local.slices()] = whole[piece.box.slices()]
    return local


class Save:
    """Carries out a plan: every rank reads only its own local tensors."""

    def __init__(self, plan: SavePlan, sources: tuple[Partition, ...], wholes: list) -> None:
        self.plan = plan
        self.pieces = [fragments(s, w.shape) for s, w in zip(sources, wholes, strict=True)]
        self.local = [local_tensors(s, w) for s, w in zip(sources, wholes, strict=True)]
        self.objects: dict[tuple[int, tuple[int, ...]], np.ndarray] = {}
        self.filled: dict[tuple[int, tuple[int, ...]], np.ndarray] = {}
        ranks = [plan.rank(rank) for rank in range(plan.size)]
        assert len({len(rank.rounds) for rank in ranks}) == 1
        for rank, own in enumerate(ranks):
            for write in own.writes:
                self.own(rank, write)
        for number in range(plan.rounds):
            self.round([rank.rounds[number] for rank in ranks])

    def held(self, rank: int, array: int, box: Box) -> np.ndarray:
        values = np.full(box.shape, -1, np.int64)
        for piece in self.pieces[array].get(rank, ()):
            part = piece.part(box)
            if part is not None:
                at = part.box.relative_to(box.offset).slices()
                values[at] = self.local[array][rank][part.local.slices()]
        assert (values >= 0).all(), "asked for what the rank does not hold"
        return values

    def holds(self, rank: int, array: int, box: Box) -> bool:
        return any(piece.part(box) for piece in self.pieces[array].get(rank, ()))

    def own(self, rank, write) -> None:
        key = (write.array, write.index)
        assert key not in self.objects, "an object with two writers"
        box = self.plan.arrays[write.array].grid.object_box(write.index)
        self.objects[key] = np.full(box.shape, -1, np.int64)
        self.filled[key] = np.zeros(box.shape, np.int64)
        for part in write.own:
            self.put(key, part, self.held(rank, write.array, part))

    def put(self, key, box: Box, values: np.ndarray) -> None:
        origin = self.plan.arrays[key[0]].grid.object_box(key[1]).offset
        self.objects[key][box.relative_to(origin).slices()] = values
        self.filled[key][box.relative_to(origin).slices()] += 1

    def round(self, rounds) -> None:
        sent = {
            (rank, message.peer): message.transfers
            for rank, own in enumerate(rounds)
            for message in own.sends
        }
        received = {
            (message.peer, rank): message.transfers
            for rank, own in enumerate(rounds)
            for message in own.receives
        }
        assert sent == received
        assert sum(len(own.sends) for own in rounds) == len(sent), "two messages for one pair"
        for rank, own in enumerate(rounds):
            for write in own.writes:
                self.own(rank, write)
        for (rank, peer), transfers in sent.items():
            for t in transfers:
                assert not self.holds(peer, t.array, t.box), "sent to a rank that holds it"
                self.put((t.array, t.index), t.box, self.held(rank, t.array, t.box))


def load(saved: Save, array: int, grid: Grid, target: Partition) -> dict[int, np.ndarray]:
    """The local tensors of the target, read chunk by chunk."""
    loaded = {}
    for rank, pieces in fragments(target, grid.shape).items():
        loaded[rank] = np.full(local_shape(target, grid.shape, rank), -1, np.int64)
        seen = set()
        for read in plan_reads([pieces], grid):
            stored = saved.objects[array, read.index]
            origin = grid.object_box(read.index).offset
            numbers = [chunk.number for chunk in read.chunks]
            assert numbers == sorted(numbers)
            for chunk in read.chunks:
                assert grid.chunks(read.index)[chunk.number] == chunk.chunk
                assert (read.index, chunk.number) not in seen, "a chunk read twice"
                assert chunk.copies, "a chunk that nothing touches"
                seen.add((read.index, chunk.number))
                values = stored[chunk.chunk.relative_to(origin).slices()]
                for _, source, destination in chunk.copies:
                    loaded[rank][destination.slices()] = values[source.slices()]
    return loaded


@settings(max_examples=40, deadline=None)
@given(jobs())
def test_any_arrangement_is_saved_once_and_loaded_exactly(job) -> None:
    shape, source, target = job
    whole = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    plan = planned(shape, source)
    grid = plan.arrays[0].grid
    saved = Save(plan, (source,), [whole])
    assert sorted(index for _, index in saved.objects) == list(grid.object_indices())
    rebuilt = np.full(shape, -1, np.int64)
    for (_, index), values in saved.objects.items():
        assert (saved.filled[0, index] == 1).all(), "an element filled twice or never"
        rebuilt[grid.object_box(index).slices()] = values
    np.testing.assert_array_equal(rebuilt, whole)
    expected = local_tensors(target, whole)
    for rank, values in load(saved, 0, grid, target).items():
        np.testing.assert_array_equal(values, expected[rank])


@settings(max_examples=25, deadline=None)
@given(jobs())
def test_arrays_cut_differently_are_saved_by_one_plan(job) -> None:
    shape, first, second = job
    wholes = [np.arange(math.prod(shape), dtype=np.int64).reshape(shape) + n for n in (0, 7)]
    plan = planned(shape, first, second)
    saved = Save(plan, (first, second), wholes)
    for array, whole in enumerate(wholes):
        for index in plan.arrays[array].grid.object_indices():
            box = plan.arrays[array].grid.object_box(index)
            np.testing.assert_array_equal(saved.objects[array, index], whole[box.slices()])
    writers = [rank for rank in range(plan.size) for _ in plan.rank(rank).metadata]
    assert len(writers) == 2


@settings(max_examples=25, deadline=None)
@given(jobs())
def test_a_round_stays_within_its_budget(job) -> None:
    shape, source, _ = job
    plan = planned(shape, source)
    grid = plan.arrays[0].grid
    needs = [
        grid.object_bytes(i, ITEMSIZE) + grid.object_box(i).size * ITEMSIZE
        for i in grid.object_indices()
    ]
    for number in range(plan.rounds):
        rounds = [plan.rank(rank).rounds[number] for rank in range(plan.size)]
        assert any(own.writes for own in rounds)
        for own in rounds:
            moved = sum(
                t.box.size for m in (*own.sends, *own.receives) for t in m.transfers
            ) * ITEMSIZE + sum(grid.object_bytes(w.index, ITEMSIZE) for w in own.writes)
            assert moved <= max(SMALL.budget_bytes // 4, max(needs) * 3 / 2)
