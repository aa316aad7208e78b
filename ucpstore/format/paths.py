"""Keys of the state tree as segments of storage paths.

The tree document holds the path of every array, so segments are made and never decoded. What has
to hold is that different sibling keys get different segments and that a segment is a valid Zarr
node name and file name. `%.` never comes from escaping a character: it marks what is not the
plain text of a key.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Sequence

from ucpstore.errors import UnsupportedError

MAX_SEGMENT_BYTES = 200
"""Longer segments are cut and end in a hash, so that a name fits in any file system."""

MAX_PATH_BYTES = 768
"""Longest path of an array below its step, which leaves room for the rest of an S3 key (1024)."""

_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")
_HASH_DIGITS = 32
_UNCHANGED = re.compile(r"[A-Za-z0-9-][A-Za-z0-9_.-]{0,199}")


def escape(key: str) -> str:
    """The segment of a string key; different keys give different segments.

    ASCII letters, digits, `_`, `-` and `.` stay, every other byte of the UTF-8 form is `%XX`.
    Escaped too are a leading `__` (reserved by Zarr), names made of dots only, and `zarr.json` in
    any case. The empty key is `%.empty`.
    """
    if _UNCHANGED.fullmatch(key) and key.lower() != "zarr.json":
        return key
    if not key:
        return "%.empty"
    data = key.encode("utf-8", "surrogatepass")
    if key.strip(".") == "":
        segment = "%2E" * len(data)
    elif key.lower() == "zarr.json":
        segment = key.replace(".", "%2E")
    else:
        segment = "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in data)
        if segment.startswith("__"):
            segment = "%5F" + segment[1:]
    return _shorten(segment)


def segment_of(key: object, siblings: Collection[object]) -> str:
    """The segment of a dict key or list index; two sibling keys never share one.

    A key that is not a string has the segment of its text, `0` or `None`, with its type in front,
    `%.int.0`, where a string key of the same text is among `siblings` (the keys of the dict; a
    dict or set makes this fast). Raises UnsupportedError where two keys cannot be told apart, as
    two NaN, and for keys that are of no storable type.
    """
    if isinstance(key, str):
        return escape(key)
    text = key_text(key)
    if "nan" in text and sum(_text_or_none(other) == text for other in siblings) > 1:
        raise UnsupportedError(
            f"two keys of the same dict read {text}, so their tensors have no distinct paths; "
            "use keys that differ"
        )
    if text in siblings:
        return _shorten(f"%.{type(key).__name__}." + escape(text))
    return escape(text)


def key_text(key: object) -> str:
    """A text for a key, the same in every process; keys of different types differ in it.

    Strings are quoted. Raises UnsupportedError for a type that cannot be a key of the tree.
    """
    kind = type(key)
    if key is None or kind in (bool, int, float, complex, str, bytes):
        return repr(key)
    if kind is tuple:
        inner = ", ".join(key_text(item) for item in _items(key))
        return f"({inner})"
    if kind is frozenset:
        inner = ", ".join(sorted(key_text(item) for item in _items(key)))
        return f"frozenset({inner})"
    module = kind.__module__.partition(".")[0]
    if module == "numpy" and hasattr(key, "dtype") and hasattr(key, "item"):
        return f"{kind.__name__}({key.item()!r})"
    if module == "torch" and kind.__name__ in ("dtype", "device", "Size"):
        return f"{kind.__name__}({key})"
    raise UnsupportedError(
        f"a dict key of type {kind.__module__}.{kind.__qualname__} cannot be stored; "
        "use a string or a number"
    )


def join(*segments: str) -> str:
    """Join escaped segments or paths with `/`, leaving out empty ones.

    Raises UnsupportedError, naming the path, where it is longer than `MAX_PATH_BYTES`.
    """
    path = "/".join(segment for segment in segments if segment)
    if len(path) > MAX_PATH_BYTES:
        raise UnsupportedError(
            f"{path[:80]}...: the path of a tensor has {len(path)} bytes once escaped, "
            f"but at most {MAX_PATH_BYTES} can be stored; shorten the keys or nest less deeply"
        )
    return path


def find_clash(paths: Iterable[str], *, ignore_case: bool = False) -> tuple[str, str] | None:
    """Two array paths that cannot both be stored, or None.

    Paths clash where they are equal or one lies inside the other; on a file system that ignores
    case also where a leading part of one equals one of the other but for case.
    """
    arrays: dict[str, str] = {}
    folders: dict[str, tuple[str, str]] = {}
    for path in sorted(paths):
        name = path.lower() if ignore_case else path
        if name in arrays:
            return arrays[name], path
        if name in folders:
            return folders[name][1], path
        arrays[name] = path
        end = path.find("/")
        while end != -1:
            folder = path[:end]
            name = folder.lower() if ignore_case else folder
            if name in arrays:
                return arrays[name], path
            spelled, first = folders.setdefault(name, (folder, path))
            if spelled != folder:
                return first, path
            end = path.find("/", end + 1)
    return None


def _shorten(segment: str) -> str:
    if len(segment) <= MAX_SEGMENT_BYTES:
        return segment
    digest = hashlib.sha256(segment.encode("ascii")).hexdigest()[:_HASH_DIGITS]
    head = segment[: MAX_SEGMENT_BYTES - 2 - _HASH_DIGITS]
    # An escape cut in half would read as a wrong one.
    cut = head.rfind("%", len(head) - 2)
    return f"{head if cut == -1 else head[:cut]}%.{digest}"


def _items(key: object) -> Sequence[object]:
    return list(key)  # type: ignore[call-overload, no-any-return]  # only for tuple and frozenset


def _text_or_none(key: object) -> str | None:
    return None if isinstance(key, str) else key_text(key)
