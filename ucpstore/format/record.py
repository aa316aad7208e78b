"""The commit record: the one document whose presence makes a step exist."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from ucpstore.errors import CorruptError, FormatError, StateError
from ucpstore.format.documents import Json, canonical, crc32c, expect, hex8, seal, unseal
from ucpstore.format.layout import parse_commit, step_path

FORMAT_VERSION: Final = 1
"""The version of a step's contents that this package writes, and the newest that it reads."""

FEATURES: Final = ("packed-row-major",)
"""What a reader must understand beyond the version; every step has these."""

CODECS: Final = "codecs"
"""The feature of a step with arrays that have a compressor."""

_KNOWN = (*FEATURES, CODECS)

MAX_METADATA_BYTES: Final = 64 * 1024

_Raw = bytes  # the record has a field named bytes


@dataclass(frozen=True, slots=True)
class DocumentEntry:
    """A metadata document that load needs: its key below the step's folder, size and checksum."""

    path: str
    bytes: int
    crc32c: int

    @classmethod
    def of(cls, path: str, raw: _Raw) -> DocumentEntry:
        """The entry of a document with these contents."""
        return cls(path, len(raw), crc32c(raw))

    def check(self, raw: _Raw) -> _Raw:
        """The document's bytes, unless they differ from this entry: then CorruptError."""
        found = DocumentEntry.of(self.path, raw)
        if found != self:
            raise CorruptError(
                f"{self.path} is damaged: it should have {self.bytes} bytes and the checksum "
                f"{hex8(self.crc32c)}, but has {found.bytes} and {hex8(found.crc32c)}; "
                "restore it from a copy, or use another step"
            )
        return raw


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """What a committed step is and where it lies.

    `path` is the step's folder, `created` the time of the commit (ISO 8601, UTC), `writer` the
    program that wrote it, `arrays` and `bytes` the number of arrays and their stored bytes.
    `metadata` is the user's own JSON value.
    """

    step: int
    generation: int
    save_id: str
    created: str
    world_size: int
    writer: str
    arrays: int
    bytes: int
    documents: tuple[DocumentEntry, ...]
    arrays_crc32c: int
    metadata: Json = None
    features: tuple[str, ...] = FEATURES
    format_version: int = FORMAT_VERSION

    @property
    def path(self) -> str:
        """The folder of the step's contents, relative to the store."""
        return step_path(self.step, self.save_id)

    def document(self, path: str) -> DocumentEntry:
        """The entry of one document; CorruptError where the record has none."""
        for entry in self.documents:
            if entry.path == path:
                return entry
        raise CorruptError(f"the commit record of step {self.step} does not list {path}")

    def to_bytes(self) -> _Raw:
        """The whole `zarr.json` of the record's group, sealed."""
        return seal(
            "commit",
            {
                "format_version": self.format_version,
                "features": list(self.features),
                "step": self.step,
                "generation": self.generation,
                "path": self.path,
                "save_id": self.save_id,
                "created": self.created,
                "world_size": self.world_size,
                "writer": self.writer,
                "arrays": self.arrays,
                "bytes": self.bytes,
                "documents": [
                    {"path": entry.path, "bytes": entry.bytes, "crc32c": hex8(entry.crc32c)}
                    for entry in self.documents
                ],
                "arrays_crc32c": hex8(self.arrays_crc32c),
                "metadata": self.metadata,
            },
        )

    @classmethod
    def from_bytes(cls, raw: _Raw, key: str) -> CommitRecord:
        """The record in a `zarr.json`.

        Raises CorruptError where the bytes do not match their checksum, which is looked at before
        anything else, or where the record is not the one that `key` names; FormatError where a
        newer version or a feature that is not known is needed to read the step.
        """
        attributes = unseal(raw, key, "commit")
        _check_version(attributes, key)
        try:
            record = cls(
                step=_int(attributes["step"]),
                generation=_int(attributes["generation"]),
                save_id=_str(attributes["save_id"]),
                created=_str(attributes["created"]),
                world_size=_int(attributes["world_size"]),
                writer=_str(attributes["writer"]),
                arrays=_int(attributes["arrays"]),
                bytes=_int(attributes["bytes"]),
                documents=tuple(map(_entry, expect(attributes["documents"], list, "documents"))),
                arrays_crc32c=int(_str(attributes["arrays_crc32c"]), 16),
                metadata=attributes["metadata"],
                features=tuple(map(_str, expect(attributes["features"], list, "features"))),
                format_version=_int(attributes["format_version"]),
            )
            path = _str(attributes["path"])
        except KeyError as error:
            raise FormatError(
                f"{key} has no attribute {error.args[0]}; it was not written by ucpstore"
            ) from None
        named = parse_commit(key)
        if named is not None and named != (record.step, record.generation):
            raise CorruptError(
                f"{key} holds the record of step {record.step}, generation {record.generation}; "
                "records must not be renamed or copied by hand"
            )
        if path != record.path:
            raise CorruptError(f"{key} names the folder {path!r}, but must name {record.path!r}")
        return record


def check_metadata(metadata: object) -> Json:
    """The user's metadata as it will be read back; StateError where it would not be the same."""
    try:
        raw = canonical(metadata)
        _check_plain(metadata, "metadata")
    except (ValueError, TypeError, RecursionError) as error:
        raise StateError(
            f"metadata must be plain JSON (dicts with string keys, lists, strings, finite numbers, "
            f"booleans, None), but {error}; put other values into the state"
        ) from None
    if len(raw) > MAX_METADATA_BYTES:
        raise StateError(
            f"metadata must have at most {MAX_METADATA_BYTES} bytes as JSON, but has {len(raw)}; "
            "put large values into the state"
        )
    return metadata  # type: ignore[return-value]  # _check_plain has looked at every part


def arrays_crc32c(documents: Iterable[tuple[str, bytes]]) -> int:
    """One checksum over all array metadata: (path below the step, bytes of its `zarr.json`).

    Paths sorted by code point; of each the path, a line feed, the bytes, a line feed.
    """
    value = 0
    for path, raw in sorted(documents):
        value = crc32c(path.encode("ascii") + b"\n" + raw + b"\n", value)
    return value


def _check_version(attributes: Mapping[str, Json], key: str) -> None:
    version = attributes.get("format_version")
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise FormatError(
            f"{key} has format version {version!r}, but this ucpstore reads versions up to "
            f"{FORMAT_VERSION}; upgrade ucpstore to read this step"
        )
    features = expect(attributes.get("features"), list, f"features of {key}")
    unknown = [str(feature) for feature in features if feature not in _KNOWN]
    if unknown:
        raise FormatError(
            f"{key} needs {', '.join(unknown)}, which this ucpstore does not know; "
            "upgrade ucpstore to read this step"
        )


def _entry(value: Json) -> DocumentEntry:
    body: dict[str, Json] = expect(value, dict, "an entry of documents")
    return DocumentEntry(_str(body["path"]), _int(body["bytes"]), int(_str(body["crc32c"]), 16))


def _int(value: Json) -> int:
    return expect(value, int, "a number of a commit record")


def _str(value: Json) -> str:
    return expect(value, str, "a text of a commit record")


def _check_plain(value: object, where: str) -> None:
    # json writes tuples as lists and integer keys as strings without a word.
    if type(value) is dict:
        for key, child in value.items():
            if type(key) is not str:
                raise TypeError(f"{where} has the key {key!r} of type {type(key).__name__}")
            _check_plain(child, f"{where}[{key!r}]")
    elif type(value) is list:
        for index, child in enumerate(value):
            _check_plain(child, f"{where}[{index}]")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise TypeError(f"{where} is a {type(value).__name__}")
