"""Writes docs/grid.md: the grids that ucpstore chooses for arrays cut in various ways.

python benchmarks/grid_examples.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from ucpstore.geometry import (
    ArraySpec,
    Flat,
    GlobalArray,
    Index,
    Partition,
    RankClass,
    Split,
    merge,
)
from ucpstore.options import MIB, Options
from ucpstore.plan import plan_save, read_cost
from ucpstore.plan.grid import kept_dims

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
- Where the ranks' parts begin at regular distances, objects follow these lines (*lines kept*):
  every object then lies on one rank, which writes it without asking anybody. The lines along
  a dimension are dropped where they would leave no suitable chunk (their distance is prime, say)
  or objects of less than {least} MiB.
- Ranges of flattened parameters, as ZeRO and distributed optimizers have them, end at arbitrary
  elements. There objects follow the tensor-parallel blocks and their fused sections, and each is
  one run of its block in row-major order: a range shares at most two objects for each section, one
  at either end. Where all ranges end at regular distances, objects follow these instead.
- Along other dimensions objects grow to at most {target} MiB, from the last dimension to the first.
- An object that several ranks hold parts of is written by one of them; the others send it
  their parts first (*exchanged*, as a share of all bytes).

No object is ever written by two ranks, and nothing is read in order to write.

*Stored* is all stored bytes, with padding, checksums and indexes, over the bytes of the elements.
*Read* is the bytes of the chunks that all ranks of the other arrangement read over the bytes
that they need. FSDP n and TP n say that n ranks split dimension 0 unless stated otherwise; in
FSDP x TP the lines of both fall on one mesh. *Flat on n* says that n ranks hold ranges of the
flattened array, or of each block of TP; *among others* that the row that is cut has more arrays.

| array | saved by | lines kept | chunk | object | objects | stored | exchanged | loaded by | read |
|---|---|---|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Example:
    """One array, how it is split when saved and when loaded, and the words for both."""

    shape: Index
    dtype: str
    saved: str
    source: Partition
    loaded: str
    target: Partition

    def array(self) -> GlobalArray:
        """The array as a planner sees it."""
        names = tuple(f"d{dim}" for dim in range(len(self.shape)))
        spec = ArraySpec("array", self.shape, self.dtype, names, self.source)
        return merge([RankClass(self.source.ranks, (spec,))])[0]


def split(*axes: tuple[int, Split | Flat | None]) -> Partition:
    """A mesh of as many ranks as the axes' sizes make, each axis with its split."""
    sizes = tuple(size for size, _ in axes)
    return Partition(sizes, tuple(range(math.prod(sizes))), tuple(s for _, s in axes))


ROWS, COLUMNS, LAST = Split(0), Split(1), Split(2)

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
            split((2, COLUMNS), (3, Flat(0, 78_301_195))), "experts on 8", split((8, ROWS))),
    Example((8, 14336, 4096), "bfloat16", "flat on 4 in TP 2 of dimension 1",
            split((2, COLUMNS), (4, Flat(1_000_000, 58_970_256))), "TP 8 of each expert",
            split((8, COLUMNS))),
    Example((4096, 4096), "float32", "flat on 8", split((8, Flat(0, 2_097_152))),
            "TP 4 columns", split((4, COLUMNS))),
    Example((4096, 4096), "float32", "flat on 8, among others",
            split((8, Flat(1_234_567, 2_500_000))), "flat on 6", split((6, Flat(0, 2_796_203)))),
    Example((4096, 4096), "float32", "flat on 8, among others, in TP 4 columns",
            split((4, COLUMNS), (8, Flat(1_234_567, 750_000))), "FSDP 4", split((4, ROWS))),
    Example((4, 16_777_216), "float32", "flat on 3, longer rows than an object",
            split((3, Flat(5, 22_369_630))), "flat on 2", split((2, Flat(0, 33_554_432)))),
    Example((6144, 4096), "bfloat16", "flat on 4 in TP 8 of fused Q, K, V",
            split((8, Split(0, sections=(4096, 1024, 1024))), (4, Flat(999, 786_682))),
            "TP 4 of fused Q, K, V", split((4, Split(0, sections=(4096, 1024, 1024))))),
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
        ", ".join(map(str, kept_dims(array.layout, grid))) or "none",
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
