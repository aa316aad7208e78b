"""Flat ranges, alone and in tensor-parallel blocks: what their grid costs, seen from outside."""

import gc
import itertools
import math
import time

import pytest
from geometry.oracle import partitions
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan.runs import check_writers, chunk_row, plan_of, runs_of

from ucpstore.geometry import ArraySpec, Flat, Layout, Partition, RankClass, Split, merge
from ucpstore.options import MIB, Options
from ucpstore.plan import plan_save
from ucpstore.plan.grid import kept_dims

SMALL = Options(chunk_bytes=4096, least_bytes=8192, target_bytes=65536)
"""So small that arrays of a few MiB have many chunks and objects, and some rows are too long."""
ITEMSIZE = 16  # complex128, for few elements in many bytes

shapes = st.one_of(
    st.tuples(st.integers(70_000, 90_000)),
    st.tuples(st.integers(200, 400), st.integers(350, 500)),
    st.tuples(st.integers(8, 24), st.integers(9000, 12_000)),
    st.tuples(st.integers(4, 8), st.integers(70, 100), st.integers(240, 300)),
    st.tuples(st.integers(2, 5), st.integers(4, 6), st.integers(90, 100), st.integers(120, 140)),
)


def followed(layout: Layout, kept: tuple[int, ...]) -> bool:
    """Whether objects follow the blocks along every dimension but the first.

    So the lines there must be kept, and at equal distances: objects all have one shape.
    """
    assert layout.lines is not None
    for dim in range(1, len(layout.shape)):
        edges = [*layout.lines[dim], layout.shape[dim]]
        extents = [b - a for a, b in itertools.pairwise(edges)]
        if len(extents) > 1 and (dim not in kept or {*extents[:-1]} != {max(extents)}):
            return False
    return True


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(partitions(flat=True, shapes=shapes, mesh=2))
def test_a_run_shares_two_objects_and_reads_two_rows_of_chunks_more(case) -> None:
    partition, shape = case
    plan = plan_of(partition, shape, "complex128", SMALL)
    check_writers(plan)
    array, grid = plan.arrays[0]
    assert math.prod(grid.object) * ITEMSIZE <= 2 * SMALL.target_bytes
    bounded = followed(array.layout, kept_dims(array.layout, grid))
    for run in runs_of(plan, partition, shape):
        assert run.sent <= run.size
        if bounded:
            assert run.sent <= 2 * math.prod(grid.object)
            assert run.read - run.size <= 2 * chunk_row(grid, run.extents)


@pytest.mark.parametrize(
    ("shape", "axes", "splits", "dtype", "chunk", "extent"),
    [
        # experts in TP 2: a part of 1024 rows of one expert's half
        ((8, 14336, 4096), (2, 4), (Split(1), Flat(0, 58_720_257)), "bfloat16",
         (1, 512, 1024), (1, 1024, 4096)),
        ((4096, 4096), (8,), (Flat(1000, 2_100_000),), "float32", (512, 512), (1024, 4096)),
        # columns of TP 4: rows of 1024, so objects are 4096 rows long
        ((4096, 4096), (4, 2), (Split(1), Flat(7, 2_097_160)), "float32",
         (512, 512), (4096, 1024)),
        # rows of 64 MiB: a quarter of one row
        ((4, 16_777_216), (3,), (Flat(5, 22_369_630),), "float32", (1, 262_144), (1, 4_194_304)),
        # fused queries, keys and values in TP 8: lines every 128 rows
        ((6144, 4096), (8, 2), (Split(0, sections=(4096, 1024, 1024)), Flat(9, 1_572_873)),
         "bfloat16", (128, 4096), (128, 4096)),
        # the same in stacked layers: objects do not reach over layers
        ((8, 6144, 4096), (8, 2), (Split(1, sections=(4096, 1024, 1024)), Flat(1000, 12_583_500)),
         "bfloat16", (1, 128, 4096), (1, 128, 4096)),
        # ranges that end at whole rows are followed: nothing is exchanged
        ((4096, 4096), (8,), (Flat(0, 2_097_152),), "float32", (512, 512), (512, 4096)),
        # 4001 is prime, so a chunk has all columns between two lines
        ((2048, 8002), (2, 3), (Split(1), Flat(0, 2_800_001)), "float32", (67, 4001), (737, 4001)),
    ],
)  # fmt: skip
def test_worked_examples(shape, axes, splits, dtype, chunk, extent) -> None:
    partition = Partition(axes, tuple(range(math.prod(axes))), splits)
    plan = plan_of(partition, shape, dtype, Options())
    grid = plan.arrays[0].grid
    assert (grid.chunk, grid.object) == (chunk, extent)


def test_ranges_at_whole_rows_are_not_exchanged() -> None:
    partition = Partition((8,), tuple(range(8)), (Flat(0, 2_097_152),))
    plan = plan_of(partition, (4096, 4096), "float32", Options())
    assert (plan.exchanged_bytes, plan.objects) == (0, 8)


def test_stacked_experts_flat_in_tensor_parallelism_send_two_objects_at_most() -> None:
    partition = Partition((2, 4), tuple(range(8)), (Split(1), Flat(0, 58_720_257)))
    plan = plan_of(partition, (8, 14336, 4096), "bfloat16", Options())
    check_writers(plan)
    size = math.prod(plan.arrays[0].grid.object) * 2
    assert size == 8 * MIB
    for rank in range(8):
        sends = [
            transfer
            for each in plan.rank(rank).rounds
            for message in each.sends
            for transfer in message.transfers
        ]
        assert len({transfer.index for transfer in sends}) <= 2
        assert sum(transfer.box.size for transfer in sends) * 2 < 2 * size


def many(tensors: int, ranks: int) -> tuple[tuple[ArraySpec, ...], tuple[int, ...]]:
    """Parameters in TP 8, replicated over the rest, and three states of each in one flat row."""
    mesh = tuple(range(ranks))
    wide = [((1024 + 16 * (n % 100), 1024), n % 2) for n in range(tensors)]
    total = sum(math.prod(shape) // 8 for shape, _ in wide)
    specs, offset = [], 0
    for number, (shape, dim) in enumerate(wide):
        whole = Partition((ranks // 8, 8), mesh, (None, Split(dim)))
        row = Flat(offset, -(-total // (ranks // 8)))
        flat = Partition((ranks // 8, 8), mesh, (row, Split(dim)))
        offset += math.prod(shape) // 8
        specs.append(ArraySpec(f"model/{number:04}", shape, "bfloat16", ("x", "y"), whole))
        specs.extend(
            ArraySpec(f"optim/{state}/{number:04}", shape, "float32", ("x", "y"), flat)
            for state in ("master", "exp_avg", "exp_avg_sq")
        )
    return tuple(specs), mesh


def planning_s(tensors: int, ranks: int) -> float:
    """Processor seconds of one rank, the least of three tries."""
    specs, mesh = many(tensors, ranks)
    tries = []
    for _ in range(3):
        gc.collect()
        start = time.process_time()
        plan = plan_save(merge([RankClass(mesh, specs)]), ranks, Options())
        plan.rank(ranks // 2)
        tries.append(time.process_time() - start)
    return min(tries)


def test_planning_grows_linearly_in_tensors_and_ranks() -> None:
    """Four times as much takes about four times as long; eight times would be too much."""
    planning_s(10, 64)  # imports and caches
    base = planning_s(50, 128)
    assert planning_s(200, 128) < 8 * base
    assert planning_s(50, 512) < 8 * base
