"""From a URL of any fsspec protocol to its file system, and what is known of that protocol."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from ucpstore.errors import StateError
from ucpstore.storage.s3_options import S3Options

if TYPE_CHECKING:
    import fsspec  # type: ignore[import-untyped]  # it has no types

# Places with real folders, which have to be made; in others `makedirs` may make a bucket.
_FOLDERS = {"arrow_hdfs", "file", "ftp", "hdfs", "local", "sftp", "smb", "ssh", "webhdfs"}
# Where one request creates an object unless it is there. Others look first, which is a race.
_EXCLUSIVE = {"abfs", "abfss", "az", "file", "gcs", "gs", "local", "memory"}
# Where one listing goes through the whole tree, and its errors are not left out.
_FLAT = {"abfs", "abfss", "az", "gcs", "gs", "hf", "memory", "oss", "s3", "s3a"}
# Whose clients answer one call at a time: paramiko's would hand one thread the answer of another.
_PARALLEL = {"arrow_hdfs", "file", "hdfs", "local", "memory"}
_COMMON = (
    "asynchronous",
    "batch_size",
    "listings_expiry_time",
    "loop",
    "max_paths",
    "skip_instance_cache",
    "use_listings_cache",
)
_PLAIN_NAMES = {
    "account_name",
    "cache_storage",
    "endpoint_url",
    "engine",
    "host",
    "hostname",
    "path",
    "project",
    "protocol",
    "region_name",
    "user",
    "username",
}
_PASSWORD = re.compile(r"(://[^/:@\s]*):[^/@\s]*@")
_SECRET_QUERY = re.compile(r"([?&][^=&]*(?:sig|token|key|secret|passw|cred)[^=&]*=)[^&\s]*", re.I)


@dataclass(frozen=True, slots=True)
class Place:
    """A URL that is understood; `connect` may be called in any process."""

    url: str
    """For messages, without secrets."""
    _text: str = field(repr=False)
    _options: Mapping[str, object] = field(repr=False)
    protocol: str
    """Of the file system that keeps the bytes, behind those that cache or cut."""
    chained: bool
    secrets: tuple[str, ...] = field(repr=False)

    @property
    def folders(self) -> bool:
        """Whether folders are real, so that they have to be made."""
        return self.protocol in _FOLDERS

    @property
    def exclusive(self) -> bool:
        """Whether one request can create an object unless it is there."""
        return self.protocol in _EXCLUSIVE and not self.chained

    @property
    def flat(self) -> bool:
        """Whether one call lists the whole tree."""
        return self.protocol in _FLAT and not self.chained

    @property
    def quoted(self) -> bool:
        """Whether paths are URLs, in which `%` has a meaning."""
        return self.protocol in ("http", "https")

    def serial(self, fs: fsspec.AbstractFileSystem) -> bool:
        """Whether calls must not overlap."""
        return self.chained or not (fs.async_impl or self.protocol in _PARALLEL)

    def connect(self) -> tuple[fsspec.AbstractFileSystem, str]:
        """A new file system of this process, shared with nobody, and the root's path in it."""
        import fsspec

        fs, root = fsspec.url_to_fs(self._text, **_arguments(self))
        link = fs
        while link is not None:  # as an option, some would hand it on to their library
            if (kept := getattr(link, "dircache", None)) is not None:
                kept.use_listings_cache = False
            link = vars(link).get("fs")
        if self._text.startswith("dir::"):
            root = ""  # fsspec gives the folder both to the file system and as the path in it
        return fs, str(root).rstrip("/")

    def redact(self, text: str) -> str:
        """`text` without any value that may be a secret."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return _hide(text)


def open_place(text: str, options: Mapping[str, object]) -> Place:
    """Raises StateError where the protocol or an option is not known, or its package is missing."""
    import fsspec

    shown = _hide(text)
    links = [_protocol(each, shown) for each in text.split("::")]
    classes = []
    for name in links:
        try:
            classes.append(fsspec.get_filesystem_class(name))
        except ValueError:
            raise StateError(
                f"{shown!r}: scheme {name!r} is not known; give a path, file:///path, "
                "s3://bucket/prefix, memory://name, or a URL that fsspec knows"
            ) from None
        except ImportError as error:
            raise StateError(f"{shown!r} needs a package that is missing: {error}") from error
    given = dict(options)
    if len(links) == 1:
        _check_names(shown, classes[0], given)
    elif links[-1] in ("s3", "s3a") and links[-1] not in given:
        known = {name: value for name, value in given.items() if S3Options.knows(name)}
        given = {name: value for name, value in given.items() if name not in known}
        given[links[-1]] = known
    return Place(shown, text, given, links[-1], len(links) > 1, tuple(_secrets(text, options)))


def is_chained(text: str) -> bool:
    """Whether `text` begins like `protocol::`; a path may hold `::` too."""
    name, separator, rest = text.partition("::")
    if not separator or not re.fullmatch(r"[A-Za-z0-9_]+", name):
        return False
    import fsspec

    return "://" in rest or name.lower() in fsspec.available_protocols()


def _protocol(link: str, shown: str) -> str:
    name, separator, _ = link.partition("://")
    name = name.lower()
    if not separator and not re.fullmatch(r"[a-z0-9_]+", name):
        raise StateError(f"{shown!r}: every part of a chained URL must name its protocol")
    return name


def _check_names(shown: str, cls: type, options: Mapping[str, object]) -> None:
    """fsspec takes any option without a word; refuse what looks like a known one misspelt."""
    known = {*_COMMON}
    more = False
    for each in cls.__mro__:
        if each.__name__ == "AbstractFileSystem":
            break
        if "__init__" in vars(each):
            parameters = inspect.signature(vars(each)["__init__"]).parameters.values()
            known |= {one.name for one in parameters if one.kind is not one.VAR_KEYWORD}
            more = any(one.kind is one.VAR_KEYWORD for one in parameters)
            if not more:
                break
    known -= {"self", "args"}
    for name in options:
        if name in known:
            continue
        near = difflib.get_close_matches(str(name), known, 1, 0.5 if not more else 0.75)
        if near or not more:
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise StateError(
                f"unknown storage option {name!r} of {shown}; {hint}"
                f"Known are {', '.join(sorted(known - {*_COMMON}))}"
            )


def _arguments(place: Place) -> dict[str, object]:
    """The arguments for fsspec; an instance is shared with nobody."""
    given = dict(place._options)
    if not place.chained:
        if place.quoted:
            given["encoded"] = True
        return {**given, "skip_instance_cache": True}
    inner = given.pop(place.protocol, None) or {}
    inner = dict(inner) if isinstance(inner, Mapping) else {}
    if place.protocol in ("s3", "s3a"):
        from ucpstore.storage.s3_s3fs import arguments

        bucket = place._text.rpartition("://")[2].split("/")[0]
        inner = arguments(bucket, S3Options.parse(inner).resolve(), 60.0)
    inner["skip_instance_cache"] = True
    return {**given, "skip_instance_cache": True, place.protocol: inner}


def _hide(text: str) -> str:
    return _SECRET_QUERY.sub(r"\1***", _PASSWORD.sub(r"\1:***@", text))


def _secrets(text: str, options: Mapping[str, object]) -> list[str]:
    """The password of the URL and the texts among the options, longest first."""
    found = set()
    for link in text.split("::"):
        try:
            password = urlsplit(link).password
        except ValueError:
            continue
        found |= {password, unquote(password)} if password else set()

    def collect(values: Mapping[str, object]) -> None:
        for name, value in values.items():
            if isinstance(value, Mapping):
                collect(value)
            elif isinstance(value, str) and name not in _PLAIN_NAMES and len(value) >= 4:
                found.add(value)

    collect(options)
    return sorted((each for each in found if each), key=len, reverse=True)
