"""What `--json` prints: one document per command. Fields are only ever added."""

from __future__ import annotations

from dataclasses import asdict

from ucpstore.format.documents import Json
from ucpstore.format.record import CommitRecord
from ucpstore.manage.contents import ArrayEntry, Contents, Entry, ValueEntry
from ucpstore.manage.listing import Listing
from ucpstore.manage.verify import VerifyReport


def record(found: CommitRecord) -> dict[str, object]:
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


def listing(found: Listing) -> dict[str, object]:
    """The document of `ls`."""
    return {
        "url": found.url,
        "steps": [record(each) for each in found.steps],
        "unreadable": [asdict(each) for each in found.unreadable],
        "unfinished": [asdict(each) for each in found.unfinished],
    }


def contents(found: Contents, entries: tuple[Entry, ...]) -> dict[str, object]:
    """The document of `show`; values are nodes of the tree."""
    return {
        **record(found.record),
        "url": found.url,
        "arrays": [_array(each) for each in entries if isinstance(each, ArrayEntry)],
        "values": [_value(each) for each in entries if isinstance(each, ValueEntry)],
    }


def report(found: VerifyReport, seconds: float) -> dict[str, object]:
    """The document of `verify`."""
    return {"ok": found.ok, **asdict(found), "seconds": round(seconds, 3)}


def _array(entry: ArrayEntry) -> dict[str, object]:
    fields = asdict(entry)
    del fields["keys"]
    return {"name": entry.name, **fields}


def _value(entry: ValueEntry) -> dict[str, Json]:
    return {"name": entry.name, "value": entry.node, "count": entry.count}
