"""What the commands print for people, line by line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ucpstore.cli import text
from ucpstore.manage.contents import ArrayEntry, Contents, Entry
from ucpstore.manage.listing import Listing
from ucpstore.manage.verify import VerifyReport

MOST_PROBLEMS = 100
"""Problems that are printed; `--json` has all."""


def listing(found: Listing) -> Iterator[str]:
    """The page of `ls`."""
    if found.steps:
        rows = [("step", "created (UTC)", "ranks", "arrays", "bytes", "generation", "metadata")]
        rows += [
            (
                str(each.step),
                text.moment(each.created),
                str(each.world_size),
                str(each.arrays),
                text.size(each.bytes),
                str(each.generation),
                text.json_short(each.metadata),
            )
            for each in found.steps
        ]
        yield from text.columns(rows, frozenset((0, 2, 3, 4, 5)))
    else:
        yield f"no committed step in {found.url}"
    if found.unreadable:
        yield ""
        yield "committed, but unreadable:"
        for bad in found.unreadable:
            yield f"  {bad.step}: {text.printable(bad.why)}"
    if found.unfinished:
        yield ""
        yield "unfinished, so never loaded:"
        rows_left = [("  step", "state", "age", "host", "process", "save")]
        rows_left += [
            (
                f"  {each.step}",
                each.state,
                text.age(each.age_s),
                "-" if each.host is None else text.printable(each.host),
                "-" if each.pid is None else str(each.pid),
                each.save_id,
            )
            for each in found.unfinished
        ]
        yield from text.columns(rows_left, frozenset((4,)))


def contents(found: Contents, entries: Sequence[Entry]) -> Iterator[str]:
    """The page of `show`."""
    record = found.record
    yield (
        f"step {record.step}, generation {record.generation}, saved "
        f"{text.moment(record.created)} UTC by {text.counted(record.world_size, 'rank')} "
        f"({text.printable(record.writer)})"
    )
    yield f"{text.counted(record.arrays, 'array')}, {text.size(record.bytes)}, in {found.url}"
    if record.metadata is not None:
        yield f"metadata {text.json_short(record.metadata, 200)}"
    yield ""
    yield from text.columns(list(_tree(entries)), frozenset((4,)))


def report(found: VerifyReport, seconds: float) -> Iterator[str]:
    """The page of `verify`: problems, then one line that sums up."""
    for problem in found.problems[:MOST_PROBLEMS]:
        yield f"{text.printable(problem.key)}: {text.printable(problem.what)}"
    if len(found.problems) > MOST_PROBLEMS:
        yield f"... and {len(found.problems) - MOST_PROBLEMS} more; --json lists all"
    for step in found.too_new:
        yield f"{step.key}: not checked: {text.printable(step.what)}"
    looked_at = ", ".join(
        (
            text.counted(len(found.steps), "step"),
            text.counted(found.documents, "document"),
            text.counted(found.arrays, "array"),
            text.counted(found.objects, "object"),
        )
    )
    if found.bytes_read:
        depth = f"{text.size(found.bytes_read)} read in {seconds:.2f} s"
    else:
        depth = f"{text.size(found.bytes)} by presence and size; --data reads them"
    verdict = text.counted(len(found.problems), "problem") if found.problems else "no problem"
    yield f"{verdict} in {looked_at} ({depth})"


def _tree(entries: Sequence[Entry]) -> Iterator[tuple[str, ...]]:
    """Rows of an indented tree: a line per folder, array and value."""
    above: tuple[str, ...] = ()
    for entry in entries:
        folders, name = entry.keys[:-1], entry.keys[-1]
        shared = 0
        while shared < min(len(above), len(folders)) and above[shared] == folders[shared]:
            shared += 1
        for depth in range(shared, len(folders)):
            yield (f"{'  ' * depth}{text.printable(folders[depth])}/", "")
        above = folders
        yield _row(f"{'  ' * len(folders)}{text.printable(name)}", entry)


def _row(name: str, entry: Entry) -> tuple[str, ...]:
    if not isinstance(entry, ArrayEntry):
        shown = text.value(entry.node)
        return (name, f"{shown}, for each of {entry.count}" if entry.count > 1 else shown)
    tied = f"is {text.printable(entry.path)}" if entry.tied else ""
    chunks = f"chunks {text.shape(entry.chunk)}" if entry.shape else ""
    return (name, entry.dtype, text.shape(entry.shape), chunks, text.size(entry.bytes), tied)
