"""Writes docs/grid.md: the grids that ucpstore chooses for arrays cut in various ways.

python benchmarks/grid_examples.py
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ucpstore.geometry import Block, Box, GlobalArray, Index, Layout, Partition, Split, fragments
from ucpstore.options import MIB, Options
from ucpstore.plan import plan_save, read_cost
from ucpstore.plan.grid import kept_cuts

PAGE = Path(__file__).parent.parent / "docs" / "grid.md"

INTRODUCTION = """\
# How arrays are cut

This page is written by `benchmarks/grid_examples.py`; a test compares the two.

An array is stored as *objects*, the unit of writing, each made of *chunks*, the unit of reading.
Both are chosen when the checkpoint is saved, from what every rank knows: the array's shape and
element size, and how it is split over the ranks.

- An array of at most 1 MiB is one plain chunk.
- A chunk is about {chunk} MiB and near-square, so that another split along any large dimension
  reads little that it does not need. Stacked experts and layers are cut one by one.
- Where the ranks' parts begin at regular distances, objects follow these lines (*cuts kept*):
  every object then lies on one rank, which writes it without asking anybody. A cut is dropped
  where it would leave no suitable chunk (the distance is prime, say) or objects of less than
  {least} MiB.
- Along other dimensions objects grow to at most {target} MiB, from the last dimension to the first.
- An object that several ranks hold parts of is written by one of them; the others send it
  their parts first (*exchanged*, as a share of all bytes).

No object is ever written by two ranks, and nothing is read in order to write.

*Stored* is all stored bytes, with padding, checksums and indexes, over the bytes of the elements.
*Read* is the bytes of the chunks that all ranks of the other arrangement read over the bytes
that they need. FSDP n and TP n say that n ranks split dimension 0 unless stated otherwise; in
FSDP x TP the lines of both fall on one mesh.

| array | saved by | cuts kept | chunk | object | objects | stored | exchanged | loaded by | read |
|---|---|---|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Example:
    """One array, how it is split when saved and when loaded, and the words for both."""

    shape: Index
    dtype: str
    saved: str
    source: Partition | Layout
    loaded: str
    target: Partition

    def array(self) -> GlobalArray:
        """The array as a planner sees it."""
        layout = self.source
        if isinstance(layout, Partition):
            layout = layout_of(layout, self.shape)
        names = tuple(f"d{dim}" for dim in range(len(self.shape)))
        return GlobalArray("array", self.shape, self.dtype, names, layout)


def split(*axes: tuple[int, Split | None]) -> Partition:
    """A mesh of as many ranks as the axes' sizes make, each axis with its split."""
    sizes = tuple(size for size, _ in axes)
    return Partition(sizes, tuple(range(math.prod(sizes))), tuple(s for _, s in axes))


def layout_of(partition: Partition, shape: Index) -> Layout:
    """The blocks of one partition."""
    holders: dict[Box, list[int]] = {}
    for rank, pieces in fragments(partition, shape).items():
        for piece in pieces:
            holders.setdefault(piece.box, []).append(rank)
    return Layout(shape, tuple(Block(b, tuple(sorted(holders[b]))) for b in sorted(holders)))


def flat_layout(shape: Index, blocks: Sequence[Box], bounds: Sequence[int]) -> Layout:
    """Each of `blocks` cut at the same places of its flat order, a rank for each range."""
    found: list[Block] = []
    for number, block in enumerate(blocks):
        edges = [0, *bounds, block.size]
        for place, (start, stop) in enumerate(itertools.pairwise(edges)):
            rank = number * (len(edges) - 1) + place
            found.extend(
                Block(box.shifted(block.offset), (rank,))
                for box in flat_boxes(block.shape, start, stop)
            )
    return Layout(shape, tuple(sorted(found, key=lambda block: block.box)))


def flat_boxes(shape: Index, start: int, stop: int) -> list[Box]:
    """The boxes that the elements from `start` to `stop` in row-major order make."""
    if start >= stop:
        return []
    if len(shape) == 1:
        return [Box((start,), (stop - start,))]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row

    def within(number: int, low: int, high: int) -> list[Box]:
        inner = flat_boxes(shape[1:], low - number * row, high - number * row)
        return [Box((number, *box.offset), (1, *box.shape)) for box in inner]

    if first > last:
        return within(last, start, stop)
    middle = [Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))]
    return [
        *within(first - 1, start, first * row),
        *(middle if last > first else []),
        *within(last, last * row, stop),
    ]


ROWS, COLUMNS, LAST = Split(0), Split(1), Split(2)
HALVES = [Box((0, 0, 0), (8, 7168, 4096)), Box((0, 7168, 0), (8, 7168, 4096))]

EXAMPLES = (
    Example((4096, 4096), "float32", "FSDP 4", split((4, ROWS)), "TP 4 columns",
            split((4, COLUMNS))),
    Example((4096, 4096), "float32", "TP 4 columns", split((4, COLUMNS)), "FSDP 4",
            split((4, ROWS))),
    Example((4096, 4096), "float32", "4 replicas", split((4, None)), "TP 3 columns",
            split((3, COLUMNS))),
    Example((28672, 8192), "bfloat16", "FSDP 64", split((64, ROWS)), "TP 8 columns",
            split((8, COLUMNS))),
    Example((8192, 8192), "bfloat16", "FSDP 64 x TP 8 columns", split((64, ROWS), (8, COLUMNS)),
            "FSDP 64", split((64, ROWS))),
    Example((8192, 8192), "bfloat16", "FSDP 64 x TP 8 rows", split((64, Split(0, 8)), (8, ROWS)),
            "TP 8 columns", split((8, COLUMNS))),
    Example((8192, 8192), "bfloat16", "FSDP 1024", split((1024, ROWS)), "TP 8 columns",
            split((8, COLUMNS))),
    Example((50257, 768), "float32", "FSDP 8", split((8, ROWS)), "FSDP 6", split((6, ROWS))),
    Example((32003, 4096), "bfloat16", "FSDP 8", split((8, ROWS)), "TP 4 columns",
            split((4, COLUMNS))),
    Example((128256, 8192), "bfloat16", "FSDP 64", split((64, ROWS)), "TP 8", split((8, ROWS))),
    Example((8, 14336, 4096), "bfloat16", "experts on 8", split((8, ROWS)), "TP 8 of each expert",
            split((8, COLUMNS))),
    Example((8, 14336, 4096), "bfloat16", "8 replicas", split((8, None)), "experts on 8",
            split((8, ROWS))),
    Example((8, 14336, 4096), "bfloat16", "flat on 3 in TP 2 of dimension 1",
            flat_layout((8, 14336, 4096), HALVES, [78_301_195, 156_602_390]), "experts on 8",
            split((8, ROWS))),
    Example((6144, 4096), "bfloat16", "fused QKV, lines every 512", split((12, ROWS)),
            "TP 8 columns", split((8, COLUMNS))),
    Example((4097, 4097), "float32", "FSDP 3", split((3, ROWS)), "TP 2 columns",
            split((2, COLUMNS))),
    Example((513, 513), "float32", "FSDP 4", split((4, ROWS)), "FSDP 2", split((2, ROWS))),
    Example((17, 65536), "float32", "FSDP 2 x TP 2 rows", split((2, Split(0, 2)), (2, ROWS)),
            "FSDP 4", split((4, ROWS))),
    Example((80, 8192, 8192), "bfloat16", "4 stages of stacked layers", split((4, ROWS)),
            "TP 8 of dimension 2", split((8, LAST))),
    Example((512, 256, 3, 3), "float32", "FSDP 8", split((8, ROWS)), "FSDP 2", split((2, ROWS))),
    Example((100_000_000,), "float32", "FSDP 8", split((8, ROWS)), "FSDP 12", split((12, ROWS))),
    Example((4096,), "float32", "FSDP 8", split((8, ROWS)), "2 replicas", split((2, None))),
    Example((), "float32", "8 replicas", split((8, None)), "2 replicas", split((2, None))),
    *(
        Example(shape, "float32", f"FSDP {count}", split((count, ROWS)), f"TP {count} columns",
                split((count, COLUMNS)))
        for shape in ((2048, 2048), (4096, 8192))
        for count in (2, 3, 4, 8)
    ),
    *(
        Example(shape, "float32", f"FSDP {count}", split((count, ROWS)), f"FSDP {count}",
                split((count, ROWS)))
        for shape, count in (
            ((1031, 257), 4), ((50257, 768), 8), ((32003, 4096), 8), ((300, 300), 4)
        )
    ),
)  # fmt: skip


def page(options: Options | None = None) -> str:
    """The whole page."""
    options = options or Options()
    head = INTRODUCTION.format(
        chunk=options.chunk_bytes // MIB,
        least=options.least_bytes // MIB,
        target=options.target_bytes // MIB,
    )
    return head + "".join(row(example, options) for example in EXAMPLES)


def row(example: Example, options: Options) -> str:
    """One row of the table."""
    array = example.array()
    ranks = 1 + max(rank for block in array.layout.blocks for rank in block.ranks)
    plan = plan_save([array], ranks, options)
    grid = plan.arrays[0].grid
    cells = (
        f"{extents(array.shape)} {array.dtype}",
        example.saved,
        ", ".join(map(str, kept_cuts(array.layout, grid))) or "none",
        extents(grid.chunk),
        extents(grid.object),
        str(plan.objects),
        f"{plan.stored_bytes / plan.real_bytes:.4f}",
        f"{plan.exchanged_bytes / plan.real_bytes:.1%}",
        example.loaded,
        f"{read_cost(grid, plan.itemsize(0), example.target).ratio:.2f}",
    )
    return f"| {' | '.join(cells)} |\n"


def extents(shape: Index) -> str:
    """A shape in words."""
    return " x ".join(map(str, shape)) or "scalar"


if __name__ == "__main__":
    PAGE.write_text(page())
