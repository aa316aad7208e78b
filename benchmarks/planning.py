"""Writes docs/planning.md: how long one rank plans a save of 1,000 parameters on up to 1,024 ranks.

Ranks are simulated: one process does what each of them would do, without I/O. Takes some minutes.

    python benchmarks/planning.py
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from ucpstore.geometry import ArraySpec, Flat, Index, Partition, RankClass, Split, merge
from ucpstore.options import Options
from ucpstore.plan import plan_save

PAGE = Path(__file__).parent.parent / "docs" / "planning.md"
TENSOR_PARALLEL = 8
STATES = ("master", "exp_avg", "exp_avg_sq")
ROUNDS = 3

INTRODUCTION = """\
# Time to plan a save

This page is written by `benchmarks/planning.py`. Every rank plans the whole save, with the same
result, so that nobody sends plans around. The time is that of one rank: it merges what all ranks
describe, proves that every element is held, chooses grids and owners, packs the rounds of the
exchange and spells out its own part. Ranks are simulated in one process and nothing is stored.

A parameter in bfloat16 has three states in float32 (master and two moments), so N parameters are
4 N arrays. All lie in tensor parallelism of 8, half of them split along dimension 0 and half along
dimension 1, and no two parameters have the same shape:

- *sharded*: the four are split over the remaining ranks along dimension 0, as by FSDP2;
- *ZeRO-1*: parameters are replicated, the states lie in one flat row, in parts of one length;
- *ZeRO-3*: each parameter is a flat row of its own with its states.

Processor seconds, the median of {rounds} rounds.

| arrangement | parameters | ranks | arrays | objects | seconds |
|---|---|---|---|---|---|
"""

Describe = Callable[[list[Index], int], Iterator[ArraySpec]]


def shapes(count: int) -> list[Index]:
    """Different shapes of a transformer's sizes: 1,024 to 2,608 rows, 1,024 to 1,168 columns."""
    return [(1024 + 16 * (n % 100), 1024 + 16 * (n // 100)) for n in range(count)]


def sharded(wide: list[Index], ranks: int) -> Iterator[ArraySpec]:
    """FSDP2 in tensor parallelism."""
    for number, shape in enumerate(wide):
        yield from _four(number, shape, *[_mesh(ranks, Split(0), Split(number % 2))] * 2)


def zero_1(wide: list[Index], ranks: int) -> Iterator[ArraySpec]:
    """States of all parameters in one flat row."""
    total = sum(math.prod(shape) // TENSOR_PARALLEL for shape in wide)
    part = -(-total // (ranks // TENSOR_PARALLEL))
    offset = 0
    for number, shape in enumerate(wide):
        split = Split(number % 2)
        states = _mesh(ranks, Flat(offset, part), split)
        yield from _four(number, shape, _mesh(ranks, None, split), states)
        offset += math.prod(shape) // TENSOR_PARALLEL


def zero_3(wide: list[Index], ranks: int) -> Iterator[ArraySpec]:
    """A flat row for each parameter, and one for each of its states."""
    for number, shape in enumerate(wide):
        part = -(-math.prod(shape) // ranks)
        yield from _four(number, shape, *[_mesh(ranks, Flat(0, part), Split(number % 2))] * 2)


def _mesh(ranks: int, data: Split | Flat | None, tensor: Split) -> Partition:
    axes = ranks // TENSOR_PARALLEL, TENSOR_PARALLEL
    return Partition(axes, tuple(range(ranks)), (data, tensor))


def _four(number: int, shape: Index, whole: Partition, states: Partition) -> Iterator[ArraySpec]:
    names = ("x", "y")
    yield ArraySpec(f"model/{number:04}", shape, "bfloat16", names, whole)
    for state in STATES:
        yield ArraySpec(f"optim/{state}/{number:04}", shape, "float32", names, states)


def measure(describe: Describe, parameters: int, ranks: int) -> tuple[int, int, float]:
    """Arrays, objects, and the processor seconds of one rank."""
    specs = tuple(describe(shapes(parameters), ranks))
    took = []
    for _ in range(ROUNDS):
        gc.collect()
        start = time.process_time()
        plan = plan_save(merge([RankClass(tuple(range(ranks)), specs)]), ranks, Options())
        plan.rank(ranks // 2)
        took.append(time.process_time() - start)
    return len(specs), plan.objects, median(took)


def main() -> None:
    """Measure all cases and write the page."""
    rows = []
    for name, describe in (("sharded", sharded), ("ZeRO-1", zero_1), ("ZeRO-3", zero_3)):
        for parameters, ranks in ((1000, 1024), (1000, 512), (500, 1024), (250, 256)):
            arrays, objects, seconds = measure(describe, parameters, ranks)
            counts = (parameters, ranks, arrays, objects)
            cells = (name, *(f"{count:,}" for count in counts), f"{seconds:.1f}")
            rows.append(f"| {' | '.join(cells)} |")
            print(rows[-1], flush=True)
    PAGE.write_text(INTRODUCTION.format(rounds=ROUNDS) + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
