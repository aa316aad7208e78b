"""Small documents beside the steps: the root, saves in progress, tags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ucpstore.errors import FormatError
from ucpstore.format.documents import LAYOUT, ROOT, Json, expect, parse, seal, unseal
from ucpstore.format.layout import DOCUMENT, check_step


@dataclass(frozen=True, slots=True)
class WorkMark:
    """A save in progress: who writes which step, and since when (`created`: ISO 8601, UTC).

    `host` and `pid` are those of the process that will commit.
    """

    step: int
    save_id: str
    host: str
    pid: int
    created: str

    def to_bytes(self) -> bytes:
        """The whole `zarr.json`, sealed."""
        return seal(
            "work",
            {
                "step": self.step,
                "save_id": self.save_id,
                "host": self.host,
                "pid": self.pid,
                "created": self.created,
            },
        )

    @classmethod
    def from_bytes(cls, raw: bytes, key: str) -> WorkMark:
        """The mark in a `zarr.json`; CorruptError, naming `key`, for damage."""
        found = unseal(raw, key, "work")
        return cls(
            _int(found, "step", key),
            _str(found, "save_id", key),
            _str(found, "host", key),
            _int(found, "pid", key),
            _str(found, "created", key),
        )


@dataclass(frozen=True, slots=True)
class Tag:
    """A name for a step (`created`: ISO 8601, UTC)."""

    name: str
    step: int
    created: str

    def to_bytes(self) -> bytes:
        """The whole `zarr.json`, sealed."""
        step = check_step(self.step)
        return seal("tag", {"name": self.name, "step": step, "created": self.created})

    @classmethod
    def from_bytes(cls, raw: bytes, key: str) -> Tag:
        """The tag in a `zarr.json`; CorruptError, naming `key`, for damage."""
        found = unseal(raw, key, "tag")
        return cls(_str(found, "name", key), _int(found, "step", key), _str(found, "created", key))


def check_root(raw: bytes, key: str = DOCUMENT) -> None:
    """FormatError unless `raw` is the root document of a store that this package can use."""
    if raw == ROOT:
        return
    attributes = parse(raw, key).get("attributes")
    mine = attributes.get("ucpstore") if isinstance(attributes, dict) else None
    if not isinstance(mine, dict) or mine.get("kind") != "store":
        raise FormatError(
            f"{key} is a Zarr node, but not the root of a checkpoint store; "
            "give an empty place, or the URL of a store"
        )
    raise FormatError(
        f"{key} marks a store of layout {mine.get('layout')!r}, but this ucpstore knows only "
        f"layout {LAYOUT}, byte for byte as it writes it; upgrade ucpstore, or restore the document"
    )


def _int(found: Mapping[str, Json], name: str, key: str) -> int:
    return expect(found.get(name), int, f"{name} in {key}")


def _str(found: Mapping[str, Json], name: str, key: str) -> str:
    return expect(found.get(name), str, f"{name} in {key}")
