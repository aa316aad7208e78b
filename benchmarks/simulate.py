"""Writes docs/sizes.md: what saves and loads of two models would cost under other sizes.

Nothing is stored: plans alone are counted, for all ranks. Takes about two minutes.

    python benchmarks/simulate.py
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ucpstore.geometry import ArraySpec, GlobalArray, Index, Partition, RankClass, Split, merge
from ucpstore.options import KIB, MIB, Options
from ucpstore.plan import Summary, plan_save, summarize

PAGE = Path(__file__).parent.parent / "docs" / "sizes.md"

INTRODUCTION = """\
# Sizes of objects and chunks

This page is written by `benchmarks/simulate.py`. Nothing was stored or timed: it counts what the
plans of all ranks would write, send and read, without sampling. It says nothing about how fast a
storage serves requests of a size.

Two Llama-like models are saved by FSDP (`Shard(0)` on all ranks): each parameter in bfloat16 and
its two moments in float32. They are loaded by tensor parallelism (TP), inside pipeline stages
(PP) for the larger. Linear weights are (out, in): column-parallel ones (`wq`, `wk`, `wv`, `w1`,
`w3`) are split along dimension 0, row-parallel ones (`wo`, `w2`) along dimension 1, embeddings by
vocabulary, norms not at all. *Other* is that arrangement, *same* the one that saved.

- *least*, *target*, *chunk*: the options `least_bytes`, `target_bytes`, `chunk_bytes`.
- *most / mean*: bytes that the busiest rank writes over the mean.
- *exchanged*: bytes that ranks send to the owners of shared objects, over all bytes.
- *rounds*: rounds of that exchange, each within a quarter of `budget_bytes`, or within 3/2 of what
  one object needs.
- *read*: bytes of the chunks that each rank reads by itself over the bytes that it needs.
- *ranges*: contiguous ranges of objects that a rank reads on average, if adjacent chunks are
  asked for together.

## What follows

**Least, 1 MiB.** 256 KiB would keep more of the lines between ranks, so that these write more of
their own bytes without sending them: at 1024 ranks 5 % would be exchanged instead of 93 %. But that
makes 20 times as many objects, a thousand per rank instead of fifty, and each is a request and, on
disk, a file and a sync. A load under another arrangement would fetch 38 times as many ranges and
three times the bytes, because the pieces of a thousand ranks are thin stripes. The exchange moves
every byte once, over the network that training uses.

**Target, 16 MiB.** 64 MiB makes a third of the objects at 1024 ranks and no difference at 64. It
spreads the writing less evenly and raises what one shared object needs (its buffer and what is
received for it) from 32 to 128 MiB, half of the default budget. Reading does not depend on it.

**Chunk, 1 MiB.** Smaller chunks read less that is not needed: with 256 KiB half as much at 64
ranks, for 8 % more ranges, and next to no gain at 1024 ranks, for 59 % more. They cost four times
as many checksums and index entries. 1 MiB keeps requests large; where loads are limited by bytes
rather than by requests, a smaller `chunk_bytes` is the option to try first.

**What the sizes cannot give.** Where lines are dropped, several ranks need parts of the same chunk.
If each reads it for itself, a load under the saving arrangement reads five times what it needs at
64 ranks and 47 times at 1024, where a rank holds 8 rows of an 8192 x 8192 matrix whose chunks have
512. Smaller chunks only halve this. Reading each chunk once for all ranks and passing its parts on
avoids it; the tables do not count on that.
"""


@dataclass(frozen=True, slots=True)
class Model:
    """The shapes of a Llama-like model. Linear weights are (out, in), as torch stores them."""

    name: str
    layers: int
    width: int
    key_width: int
    hidden: int
    vocabulary: int
    tied: bool

    def parameters(self) -> Iterator[tuple[str, int | None, Index, int | None]]:
        """Name, layer or None, shape, and the dimension that tensor parallelism splits."""
        yield "tok_embeddings.weight", 0, (self.vocabulary, self.width), 0
        for layer in range(self.layers):
            for name, shape, dim in self._layer():
                yield f"layers.{layer}.{name}.weight", layer, shape, dim
        yield "norm.weight", self.layers - 1, (self.width,), None
        if not self.tied:
            yield "output.weight", self.layers - 1, (self.vocabulary, self.width), 0

    def _layer(self) -> Iterator[tuple[str, Index, int | None]]:
        yield "attention.wq", (self.width, self.width), 0
        yield "attention.wk", (self.key_width, self.width), 0
        yield "attention.wv", (self.key_width, self.width), 0
        yield "attention.wo", (self.width, self.width), 1
        yield "feed_forward.w1", (self.hidden, self.width), 0
        yield "feed_forward.w2", (self.width, self.hidden), 1
        yield "feed_forward.w3", (self.hidden, self.width), 0
        yield "attention_norm", (self.width,), None
        yield "ffn_norm", (self.width,), None


@dataclass(frozen=True, slots=True)
class Job:
    """A model saved by FSDP on `ranks` ranks and loaded by `tensor` x `stages` ranks."""

    model: Model
    ranks: int
    tensor: int
    stages: int

    @property
    def title(self) -> str:
        """The job in words."""
        pipeline = f" x PP {self.stages}" if self.stages > 1 else ""
        return f"{self.model.name}, FSDP {self.ranks} to TP {self.tensor}{pipeline}"

    def arrays(self) -> tuple[GlobalArray, ...]:
        """Every parameter in bfloat16 and its two moments in float32, split over all ranks."""
        rows = Partition((self.ranks,), tuple(range(self.ranks)), (Split(0),))
        specs = tuple(
            ArraySpec(path, shape, dtype, tuple(f"d{n}" for n in range(len(shape))), rows)
            for name, _, shape, _ in self.model.parameters()
            for path, dtype in states(name)
        )
        return merge([RankClass(rows.ranks, specs)])

    def same(self) -> dict[str, Partition]:
        """The arrangement that saved, by path."""
        rows = Partition((self.ranks,), tuple(range(self.ranks)), (Split(0),))
        return {path: rows for name, *_ in self.model.parameters() for path, _ in states(name)}

    def other(self) -> dict[str, Partition]:
        """Tensor parallelism inside pipeline stages of consecutive layers, by path."""
        found = {}
        for name, layer, _, dim in self.model.parameters():
            stage = (layer or 0) * self.stages // self.model.layers
            ranks = tuple(range(stage * self.tensor, (stage + 1) * self.tensor))
            partition = Partition((self.tensor,), ranks, (None if dim is None else Split(dim),))
            found.update({path: partition for path, _ in states(name)})
        return found


def states(name: str) -> tuple[tuple[str, str], ...]:
    """The paths and dtypes of a parameter and its optimizer state."""
    return (
        (f"model/{name}", "bfloat16"),
        (f"optim/exp_avg/{name}", "float32"),
        (f"optim/exp_avg_sq/{name}", "float32"),
    )


JOBS = (
    Job(Model("1 B", 16, 2048, 512, 8192, 128256, tied=True), 64, 8, 1),
    Job(Model("70 B", 80, 8192, 1024, 28672, 128256, tied=False), 1024, 8, 4),
)
CHOICES = tuple(
    Options(least_bytes=least, target_bytes=target, chunk_bytes=chunk)
    for least, target, chunk in itertools.product(
        (MIB, 256 * KIB), (16 * MIB, 64 * MIB), (MIB, 256 * KIB)
    )
)

HEADER = """\
| least | target | chunk | objects | most bytes on a rank / mean | exchanged | rounds \
| read, other | ranges, other | read, same | ranges, same |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def page(jobs: Sequence[Job], choices: Sequence[Options], text: str = INTRODUCTION) -> str:
    """The text and one table per job."""
    tables = "".join(
        f"\n## {job.title}\n\n{facts(job)}\n\n{HEADER}"
        + "".join(row(job, options) for options in choices)
        for job in jobs
    )
    return text + tables


def facts(job: Job) -> str:
    """How much there is to store."""
    arrays = job.arrays()
    plan = plan_save(arrays, job.ranks, Options())
    return (
        f"{len(arrays)} arrays, {plan.real_bytes / 1e9:.1f} GB, "
        f"{plan.real_bytes / job.ranks / MIB:.0f} MiB per saving rank; with the defaults "
        f"{plan.stored_bytes / plan.real_bytes - 1:.3%} more is stored."
    )


def row(job: Job, options: Options) -> str:
    """One row of a table."""
    plan = plan_save(job.arrays(), job.ranks, options)
    other = summarize(plan, job.other())
    same = summarize(plan, job.same())
    mean = other.stored_bytes / job.ranks
    cells = (
        size(options.least_bytes),
        size(options.target_bytes),
        size(options.chunk_bytes),
        f"{other.objects:,}",
        f"{other.most_written_bytes / mean:.2f}",
        f"{other.exchanged_bytes / other.real_bytes:.1%}",
        str(other.rounds),
        *reads(other, job.other()),
        *reads(same, job.same()),
    )
    return f"| {' | '.join(cells)} |\n"


def reads(summary: Summary, target: Mapping[str, Partition]) -> tuple[str, str]:
    """Bytes read over bytes needed, and ranges read by a rank on average."""
    ranks = {rank for partition in target.values() for rank in partition.ranks}
    return f"{summary.reads.ratio:.2f}", f"{summary.reads.ranges / len(ranks):,.0f}"


def size(number: int) -> str:
    """A size in words."""
    return f"{number // MIB} MiB" if number >= MIB else f"{number // KIB} KiB"


if __name__ == "__main__":
    PAGE.write_text(page(JOBS, CHOICES))
