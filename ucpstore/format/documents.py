"""JSON documents in canonical form, checksums, and the group documents of a store.

Canonical form: keys in the order written, no spaces, ASCII only, no NaN or infinity. So equal
values written by this package are equal bytes.

A sealed document is a group whose last attribute is the crc32c of the whole document, at a fixed
place from its end. It is checked on the raw bytes, before anything is parsed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Final, TypeVar

import google_crc32c
import numpy as np
import numpy.typing as npt

from ucpstore.errors import CorruptError, FormatError

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

_T = TypeVar("_T")

_SEAL_HEAD: Final = b',"crc32c":"'
_SEAL_TAIL: Final = b'"}}}'
_DIGITS: Final = slice(-len(_SEAL_TAIL) - 8, -len(_SEAL_TAIL))
_ZEROS: Final = b"00000000"

_ENCODER: Final = json.JSONEncoder(
    ensure_ascii=True, allow_nan=False, separators=(",", ":"), check_circular=False
)


def canonical(value: object) -> bytes:
    """The canonical JSON bytes of a value; ValueError for NaN, TypeError for what is not JSON."""
    return _ENCODER.encode(value).encode("ascii")


def parse(raw: bytes, key: str) -> dict[str, Json]:
    """The JSON object in a document; CorruptError, naming `key`, where there is none."""
    try:
        value = json.loads(raw, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{key} is not a JSON document: {error}") from None
    if not isinstance(value, dict):
        raise CorruptError(f"{key} must hold a JSON object, but holds a {type(value).__name__}")
    return value


def expect(value: Json, kind: type[_T], what: str) -> _T:
    """The value, which must be of exactly this JSON type; FormatError, naming `what`, else."""
    if type(value) is not kind:
        raise FormatError(
            f"{what} should be a JSON {kind.__name__}, but is {str(value)[:80]!r}; "
            "it was written by something else, or by a newer ucpstore"
        )
    return value


def crc32c(buffer: bytes | npt.NDArray[np.uint8], value: int = 0) -> int:
    """The crc32c (Castagnoli) of a buffer, going on from `value`; holds the GIL meanwhile."""
    extended: int = google_crc32c.extend(value, buffer)
    return extended


def hex8(value: int) -> str:
    """A 32-bit number as eight lower-case hex digits."""
    return f"{value:08x}"


def members(values: Mapping[str, bytes]) -> bytes:
    """The canonical bytes of an object from those of its values."""
    return b"{" + b",".join([canonical(key) + b":" + raw for key, raw in values.items()]) + b"}"


def group(attributes: bytes = b"{}", consolidated: Mapping[str, bytes] | None = None) -> bytes:
    """The `zarr.json` of a group with attributes in canonical form.

    `consolidated` maps paths below it to the bytes of their documents. Its order is kept: callers
    sort it by path.
    """
    parts = {"zarr_format": b"3", "node_type": b'"group"'}
    if consolidated is not None:
        parts["consolidated_metadata"] = members(
            {
                "kind": b'"inline"',
                "must_understand": b"false",
                "metadata": members(consolidated),
            }
        )
    return members({**parts, "attributes": attributes})


def marked(kind: str, **attributes: object) -> bytes:
    """The `zarr.json` of a group with `attributes.ucpstore` of this kind."""
    return group(canonical({"ucpstore": {"kind": kind, **attributes}}))


def seal(kind: str, attributes: Mapping[str, object]) -> bytes:
    """A group document with these attributes under `ucpstore` and the checksum as the last."""
    raw = marked(kind, **attributes, crc32c=_ZEROS.decode())
    return raw[: _DIGITS.start] + hex8(crc32c(raw)).encode() + _SEAL_TAIL


def unseal(raw: bytes, key: str, kind: str) -> dict[str, Json]:
    """The attributes of a sealed document, checked before it is parsed, without the checksum.

    Raises CorruptError, naming `key`, for damage and for a document of another kind.
    """
    digits = raw[_DIGITS]
    framed = raw.endswith(_SEAL_TAIL) and raw[: _DIGITS.start].endswith(_SEAL_HEAD)
    whole = hex8(crc32c(raw[: _DIGITS.start] + _ZEROS + _SEAL_TAIL)).encode()
    if not framed or digits != whole:
        found = digits.decode("ascii", "backslashreplace") if framed else "no checksum"
        raise CorruptError(
            f"{key} is damaged: its checksum should be {whole.decode()}, found {found}; "
            "restore it from a copy, or use another step"
        )
    return attributes_of(parse(raw, key), key, kind)


def attributes_of(document: Mapping[str, Json], key: str, kind: str) -> dict[str, Json]:
    """`attributes.ucpstore` of a parsed document of this kind, without `kind` and `crc32c`."""
    attributes = document.get("attributes")
    mine = attributes.get("ucpstore") if isinstance(attributes, dict) else None
    if not isinstance(mine, dict) or mine.get("kind") != kind:
        found = mine.get("kind") if isinstance(mine, dict) else "no attributes of ucpstore"
        raise CorruptError(f"{key} should be a {kind} document of ucpstore, but has {found!r}")
    return {name: value for name, value in mine.items() if name not in ("kind", "crc32c")}


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is more than a number can be")
    return value


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


PLAIN: Final = group()
"""The group of a dict inside an item."""

LAYOUT: Final = 1
"""Version of the folders of a store; the version of a step's contents is in its record."""

ROOT: Final = marked("store", layout=LAYOUT)
COMMITS: Final = marked("commits")
STEPS: Final = marked("steps")
TAGS: Final = marked("tags")
WORK: Final = marked("work")

TOMBSTONE: Final = marked("tombstone")
"""Put in the place of a step group, by put-if-absent, so that its save can no longer commit."""
