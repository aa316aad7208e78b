"""Small documents beside the steps: the root, saves in progress, tags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ucpstore.errors import CorruptError, FormatError, StepNotFoundError, UcpstoreError
from ucpstore.format.documents import LAYOUT, ROOT, Json, expect, parse, seal, unseal
from ucpstore.format.layout import DOCUMENT, check_step, lies_in_step


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


def refusal(raw: bytes | None, url: str, *, committed: bool = False) -> UcpstoreError | None:
    """Why the place `url` is no store that this package can use; None for a store and for nothing.

    Nothing else decides what a place is. `raw` is the document at its root, None where there is
    none; `committed` says whether commit records lie below it. StepNotFoundError is for what is no
    store, FormatError for one of a newer version, CorruptError for one whose root is damaged.
    """
    if raw == ROOT:
        return None
    inside = StepNotFoundError(
        f"{url} lies inside a store; give the folder above `steps` and `commits`"
    )
    if lies_in_step(url):
        return inside
    if raw is None:
        return None
    try:
        attributes = parse(raw, DOCUMENT).get("attributes")
    except CorruptError as error:
        return CorruptError(f"{url}: {error}")
    mine = attributes.get("ucpstore") if isinstance(attributes, dict) else None
    kind = mine.get("kind") if isinstance(mine, dict) else None
    layout = mine.get("layout") if isinstance(mine, dict) and kind == "store" else None
    if isinstance(layout, int) and layout > LAYOUT:
        return FormatError(
            f"{DOCUMENT} marks a store of layout {layout} in {url}, but this ucpstore knows "
            f"only layout {LAYOUT}; upgrade ucpstore, or restore the document if it is damaged"
        )
    if committed or kind == "store":
        return CorruptError(
            f"{DOCUMENT} in {url} is damaged: it is not the one of a store, byte for byte; restore "
            "it from a copy"
        )
    if kind is not None:
        return inside
    return StepNotFoundError(
        f"{url} is a Zarr node, but not a checkpoint store: something else lies there "
        f"({DOCUMENT}); check the URL: a store is the folder above `steps` and `commits`; to begin "
        "one, use an empty folder or prefix"
    )


def _int(found: Mapping[str, Json], name: str, key: str) -> int:
    return expect(found.get(name), int, f"{name} in {key}")


def _str(found: Mapping[str, Json], name: str, key: str) -> str:
    return expect(found.get(name), str, f"{name} in {key}")
