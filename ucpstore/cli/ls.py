"""What `ls` prints: a page for people, or one JSON document whose fields are only ever added to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from ucpstore.cli import text
from ucpstore.units import size

if TYPE_CHECKING:
    from ucpstore.format.record import CommitRecord
    from ucpstore.manage.listing import Listing


def page(found: Listing) -> Iterator[str]:
    """The lines for people."""
    if found.steps:
        rows = [("step", "created (UTC)", "ranks", "arrays", "bytes", "generation", "metadata")]
        rows += [
            (
                str(each.step),
                text.moment(each.created),
                str(each.world_size),
                str(each.arrays),
                size(each.bytes),
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


def document(found: Listing) -> dict[str, object]:
    """The JSON document."""
    return {
        "url": found.url,
        "steps": [record_fields(each) for each in found.steps],
        "unreadable": [asdict(each) for each in found.unreadable],
        "unfinished": [asdict(each) for each in found.unfinished],
    }


def record_fields(found: CommitRecord) -> dict[str, object]:
    """A committed step, as its record tells."""
    return {
        "step": found.step,
        "generation": found.generation,
        "created": found.created,
        "world_size": found.world_size,
        "writer": found.writer,
        "arrays": found.arrays,
        "bytes": found.bytes,
        "path": found.path,
        "save_id": found.save_id,
        "format_version": found.format_version,
        "features": list(found.features),
        "metadata": found.metadata,
    }
