import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucpstore.geometry import (
    ArraySpec,
    Block,
    Blocks,
    Box,
    Layout,
    Partition,
    RankClass,
    Split,
    merge,
)
from ucpstore.options import MIB, Options
from ucpstore.plan import choose_grid
from ucpstore.plan.grid import kept_dims, wished_extents

ROWS, COLUMNS = Split(0), Split(1)


def layout(shape: tuple[int, ...], axes: tuple[int, ...], *splits: Split | None) -> Layout:
    ranks = tuple(range(math.prod(axes)))
    names = tuple("xyzt"[: len(shape)])
    spec = ArraySpec("a", shape, "float32", names, Partition(axes, ranks, splits))
    return merge([RankClass(ranks, (spec,))])[0].layout


@pytest.mark.parametrize(
    ("shape", "itemsize", "axes", "splits", "kept", "chunk", "extent", "objects"),
    [
        ((4096, 4096), 4, (4,), (ROWS,), (0,), (512, 512), (1024, 4096), 4),
        ((4096, 4096), 4, (4,), (COLUMNS,), (1,), (512, 512), (4096, 1024), 4),
        ((28672, 8192), 2, (64,), (ROWS,), (0,), (448, 1024), (448, 8192), 64),
        ((8192, 8192), 2, (64, 8), (ROWS, COLUMNS), (1,), (512, 1024), (8192, 1024), 8),
        ((8192, 8192), 2, (1024,), (ROWS,), (), (512, 1024), (1024, 8192), 8),
        ((50257, 768), 4, (8,), (ROWS,), (), (393, 768), (5109, 768), 10),
        ((32003, 4096), 2, (8,), (ROWS,), (), (1001, 512), (2002, 4096), 16),
        ((8, 14336, 4096), 2, (8,), (ROWS,), (0,), (1, 896, 512), (1, 1792, 4096), 64),
        ((6144, 4096), 2, (12,), (ROWS,), (0,), (512, 1024), (512, 4096), 12),
        ((4097, 4097), 4, (3,), (ROWS,), (0,), (683, 513), (683, 4104), 6),
    ],
)
def test_worked_examples(shape, itemsize, axes, splits, kept, chunk, extent, objects) -> None:
    laid = layout(shape, axes, *splits)
    grid = choose_grid(laid, itemsize, Options())
    assert (grid.chunk, grid.object, math.prod(grid.objects)) == (chunk, extent, objects)
    assert kept_dims(laid, grid) == kept
    assert grid.sharded


@pytest.mark.parametrize(
    ("shape", "itemsize", "parts", "padding"),
    [((50257, 768), 4, 8, 0.001), ((4097, 4097), 4, 3, 0.003)],
)
def test_padding_is_small(shape, itemsize, parts, padding) -> None:
    grid = choose_grid(layout(shape, (parts,), ROWS), itemsize, Options())
    stored = sum(grid.object_bytes(i, itemsize) for i in grid.object_indices())
    assert 1 < stored / (math.prod(shape) * itemsize) < 1 + padding


@pytest.mark.parametrize(
    ("shape", "itemsize", "sharded"),
    [
        ((), 4, False),
        ((512, 512), 4, False),
        ((513, 513), 2, False),
        ((513, 513), 4, True),
        ((0, 7), 4, False),
        ((17, 4096), 4, False),
    ],
)
def test_arrays_up_to_1_mib_are_one_plain_chunk(shape, itemsize, sharded) -> None:
    grid = choose_grid(Layout(shape, Blocks.of(len(shape), [])), itemsize, Options())
    assert grid.sharded is sharded
    assert grid.chunk == grid.object == tuple(max(e, 1) for e in shape)


def test_a_tiling_that_would_make_small_objects_is_dropped() -> None:
    """17 rows in 2 by tensor parallelism and in 2 again: lines at 5, 9, 13, so single rows."""
    narrow = layout((17, 65536), (2, 2), Split(0, 2), ROWS)
    assert kept_dims(narrow, choose_grid(narrow, 4, Options())) == ()
    wide = layout((17, 1 << 20), (2, 2), Split(0, 2), ROWS)
    assert kept_dims(wide, choose_grid(wide, 4, Options())) == (0,)


def test_the_least_size_decides() -> None:
    laid = layout((8192, 8192), (1024,), ROWS)  # 8 rows of 16 KiB each
    grid = choose_grid(laid, 2, Options(least_bytes=128 * 1024))
    assert (grid.chunk, grid.object) == ((8, 8192), (8, 8192))


def test_one_dimension() -> None:
    """Blocks of 12,500,000 elements: wished 195,312.5, of their divisors 156,250 is nearest."""
    grid = choose_grid(layout((100_000_000,), (8,), ROWS), 4, Options())
    assert grid.chunk == (156_250,)
    assert grid.object == (3_125_000,)


def test_stacked_layers_are_read_one_by_one() -> None:
    assert wished_extents((80, 8192, 8192), 2, MIB) == (1, 512, 1024)
    assert wished_extents((2, 128, 768, 2048), 2, MIB) == (1, 1, 768, 512)
    assert wished_extents((512, 256, 3, 3), 4, MIB) == (128, 256, 3, 3)


def test_blocks_of_arbitrary_sizes_share_objects() -> None:
    sizes = [700, 301, 99]
    blocks, start = [], 0
    for rank, size in enumerate(sizes):
        blocks.append(Block(Box((start, 0), (size, 1100)), (rank,)))
        start += size
    laid = Layout((1100, 1100), Blocks.of(2, blocks))
    assert kept_dims(laid, choose_grid(laid, 4, Options())) == ()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=3).map(tuple),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 9),
    st.integers(0, 2),
    st.integers(1, 3),
)
def test_chunks_and_objects_stay_near_their_sizes(shape, itemsize, parts, dim, factor) -> None:
    options = Options(chunk_bytes=65536, least_bytes=65536, target_bytes=MIB)
    laid = layout(shape, (parts,), Split(dim % len(shape), factor))
    grid = choose_grid(laid, itemsize, options)
    assert all(o % c == 0 for o, c in zip(grid.object, grid.chunk, strict=True))
    if not grid.sharded:
        return
    extents = grid.chunk_bytes(itemsize)
    assert 65536 / 4 <= extents <= 65536 * 4
    assert math.prod(grid.object) * itemsize <= max(MIB, extents)
    for kept in kept_dims(laid, grid):
        assert all(b.box.offset[kept] % grid.object[kept] == 0 for b in laid.blocks)
