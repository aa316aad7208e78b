"""From what the user writes to a storage: paths, `file://`, `s3://`, and all that fsspec knows."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from ucpstore.errors import StateError
from ucpstore.storage.local import LocalStorage

if TYPE_CHECKING:
    from ucpstore.storage.base import Storage

_KNOWN = "a path, file:///path, s3://bucket/prefix, memory://name, or another URL of fsspec's"
# What pathlib or os.path makes of a URL: one slash, or the scheme as a folder of its own.
_FLATTENED = re.compile(
    r"(?:^(?=s3:)|^(?=[^/]*:/)|/(?=[^/]*:(?:/|$)))(s3|gs|gcs|az|abfss?|https?|memory|hdfs):",
    re.IGNORECASE,
)


def open_storage(
    url: str | os.PathLike[str], storage_options: Mapping[str, object] | None = None
) -> Storage:
    """The storage that `url` names. Nothing is read, written or connected to yet.

    A relative path is taken from the current folder, now; `~` is expanded; a trailing slash means
    nothing. `storage_options` are those of S3, or of fsspec's file system (docs/storage.md); local
    folders and memory have none. Raises StateError for a URL or an option that is not understood.
    """
    if not isinstance(url, str | os.PathLike):
        raise StateError(
            f"url must be a path or a URL, but it is a {type(url).__name__}; the url comes first, "
            "as in save(url, state, step=...) and load(url, state)"
        )
    text = os.fsdecode(url)
    if storage_options is not None and not isinstance(storage_options, Mapping):
        raise StateError(
            f"storage_options must be a dict, but it is a {type(storage_options).__name__}; "
            "pass {'endpoint_url': ...} or the like"
        )
    options = dict(storage_options or {})
    if "::" in text and _is_chained(text):
        return _fsspec(text, options)
    scheme, separator, rest = text.partition("://")
    if not separator or text.startswith(("/", ".", "~")):
        _no_options(text, options)
        return LocalStorage(_local_path(text))
    scheme = scheme.lower()
    if scheme in ("s3", "s3a"):
        from ucpstore.storage.objects import S3Storage

        return S3Storage.from_url(text, options)
    if scheme == "file":
        _no_options(text, options)
        return LocalStorage(_local_path(_file_path(text)))
    if scheme == "memory":
        _no_options(text, options)
    return _fsspec(f"{scheme}://{_normal(rest)}", options)


def _is_chained(text: str) -> bool:
    from ucpstore.storage import fsspec_places

    return fsspec_places.is_chained(text)


def _fsspec(url: str, options: Mapping[str, object]) -> Storage:
    from ucpstore.storage.fsspec_storage import FsspecStorage

    return FsspecStorage.from_url(url, options)


def _normal(rest: str) -> str:
    """Without empty segments, but for the slash that a local path begins with."""
    begin = "/" if rest.startswith("/") else ""
    return begin + "/".join(each for each in rest.split("/") if each)


def _local_path(text: str) -> str:
    """The absolute folder. `..` and symbolic links are left to the system."""
    flattened = _FLATTENED.search(text)
    if flattened:
        scheme = flattened[1].lower()
        rest = text[flattened.end() :].strip("/")
        raise StateError(
            f"{text!r} looks like a URL that lost a slash, as pathlib does to it; write the text "
            f"'{scheme}://{rest}'"
        )
    if text.lower().startswith("file:/"):  # RFC 8089 knows the form with one slash too
        text = _file_path(text)
    if not text or "\0" in text:
        raise StateError(f"{text!r} is not a path; give {_KNOWN}")
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        raise StateError(f"{text!r}: there is no such user, so '~' has no meaning") from None
    return str(path.absolute())


def _file_path(text: str) -> str:
    parts = urlsplit(text, allow_fragments=False)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise StateError(f"{text!r} names a host, not a path; write three slashes: file:///path")
    return unquote(parts.path + (f"?{parts.query}" if parts.query else ""))


def _no_options(text: str, options: Mapping[str, object]) -> None:
    if options:
        names = ", ".join(sorted(options))
        raise StateError(f"{text!r} takes no storage options, but these were given: {names}")
