"""What a plan costs, in objects and bytes, and what a load under another arrangement would read."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from ucpstore.geometry import Grid, Partition, fragments
from ucpstore.plan.reads import plan_reads
from ucpstore.plan.save import SavePlan


@dataclass(frozen=True, slots=True)
class ReadCost:
    """Bytes that ranks need and read, the chunks read, and the ranges without a gap they form."""

    needed_bytes: int = 0
    read_bytes: int = 0
    chunks: int = 0
    ranges: int = 0

    def __add__(self, other: ReadCost) -> ReadCost:
        return ReadCost(
            self.needed_bytes + other.needed_bytes,
            self.read_bytes + other.read_bytes,
            self.chunks + other.chunks,
            self.ranges + other.ranges,
        )

    @property
    def ratio(self) -> float:
        """Bytes read over bytes needed; 1 where nothing is needed."""
        return self.read_bytes / self.needed_bytes if self.needed_bytes else 1.0


@dataclass(frozen=True, slots=True)
class Summary:
    """Totals over all ranks of one save and of one load under another arrangement."""

    objects: int
    real_bytes: int
    stored_bytes: int
    exchanged_bytes: int
    rounds: int
    most_written_bytes: int
    reads: ReadCost


def summarize(plan: SavePlan, target: Mapping[str, Partition]) -> Summary:
    """Totals of `plan` and of a load in which `target` gives each array's partition by path."""
    known: dict[tuple[Grid, int, Partition], ReadCost] = {}
    reads = ReadCost()
    for number, (array, grid) in enumerate(plan.arrays):
        partition = target.get(array.path)
        if partition is None:
            continue
        key = (grid, plan.itemsize(number), partition)
        if key not in known:
            known[key] = read_cost(*key)
        reads += known[key]
    return Summary(
        plan.objects,
        plan.real_bytes,
        plan.stored_bytes,
        plan.exchanged_bytes,
        plan.rounds,
        max(plan.written_bytes()),
        reads,
    )


def read_cost(grid: Grid, itemsize: int, partition: Partition) -> ReadCost:
    """What all ranks of `partition` together read of an array with this grid."""
    total = ReadCost()
    for pieces in fragments(partition, grid.shape).values():
        chunks = ranges = 0
        for read in plan_reads([pieces], grid):
            numbers = [chunk.number for chunk in read.chunks]
            chunks += len(numbers)
            ranges += 1 + sum(b - a > 1 for a, b in itertools.pairwise(numbers))
        needed = sum(piece.box.size for piece in pieces) * itemsize
        total += ReadCost(needed, chunks * grid.chunk_bytes(itemsize), chunks, ranges)
    return total
