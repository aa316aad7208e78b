"""Tunables: one frozen object whose defaults are meant to be right for everyone.

Every field but `codecs` can be set by an environment variable, `UCPSTORE_` and the field's name in
capitals; an argument wins over the environment. Sizes are in bytes, times in seconds.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, fields
from fnmatch import fnmatchcase
from typing import TypeAlias, cast

from ucpstore.errors import StateError

KIB = 1024
MIB = 1024 * KIB

GivenCodec: TypeAlias = "str | Mapping[str, object] | None"
"""A codec as a user names it: `"zstd"`, or as in Zarr metadata with a configuration."""

GivenCodecs: TypeAlias = "Mapping[str, GivenCodec] | Iterable[tuple[str, GivenCodec]]"
"""Name patterns and codecs, as a dict or as pairs."""


@dataclass(frozen=True, slots=True)
class Options:
    """How objects are sized, how much memory is used, and how long ranks wait for each other."""

    chunk_bytes: int = 1 * MIB
    """Wished size of a chunk, the unit of reading. `UCPSTORE_CHUNK_BYTES`."""

    least_bytes: int = 1 * MIB
    """Least size of an object that follows the partition's cuts. `UCPSTORE_LEAST_BYTES`."""

    target_bytes: int = 16 * MIB
    """Most bytes that uncut dimensions extend an object to. `UCPSTORE_TARGET_BYTES`."""

    budget_bytes: int = 256 * MIB
    """Most extra host memory per rank while saving or loading. `UCPSTORE_BUDGET_BYTES`."""

    threads: int | None = None
    """Concurrent requests per rank; None: 8 to local files, 16 to an object store, whose requests
    take longer. `UCPSTORE_THREADS`."""

    arrive_timeout_s: float = 60.0
    """How long ranks wait for each other at the start of a call. `UCPSTORE_ARRIVE_TIMEOUT_S`."""

    report_timeout_s: float = 600.0
    """How long rank 0 waits for reports after its own, and how late a rank that is alive may come
    to an exchange. `UCPSTORE_REPORT_TIMEOUT_S`."""

    silence_timeout_s: float = 60.0
    """How long a rank's heartbeat may stand still. `UCPSTORE_SILENCE_TIMEOUT_S`."""

    unfinished_age_s: float = 24 * 3600.0
    """Age past which an unfinished save counts as dead. `UCPSTORE_UNFINISHED_AGE_S`."""

    codecs: GivenCodecs = ()
    """Compressors of arrays: pairs of a name pattern and a codec, or a dict of them.

    Patterns are those of fnmatch over names joined with dots, as in `cast`; the first that matches
    an array decides, None there means no compressor, and arrays without a match have none. One that
    matches nothing is no error: options may serve several programs, and the ranks of a pipeline
    have different names. A tied tensor goes by its first name. A codec is a name that zarr-python
    knows (`"zstd"`, `"blosc"`, `"gzip"`, `"numcodecs.lz4"`), or a mapping as in Zarr metadata:
    `{"name": "zstd", "configuration": {"level": 3}}`. Kept as a tuple of pairs (pattern, JSON
    text), so that options stay hashable. `UCPSTORE_CODECS` is not read: patterns belong to the
    names of one program.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "codecs", _codec_pairs(self.codecs))
        for field in _numbers(type(self)):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                _check(f"option {field.name}", value, whole=_whole(field))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Options:
        """The defaults, changed by the `UCPSTORE_*` variables that are set."""
        environment = os.environ if environment is None else environment
        given: dict[str, object] = {}
        for field in _numbers(cls):
            name = f"UCPSTORE_{field.name.upper()}"
            text = environment.get(name)
            if text is None:
                continue
            whole = _whole(field)
            value: object = text
            with suppress(ValueError):
                value = int(text) if whole else float(text)
            _check(f"environment variable {name}", value, whole=whole)
            given[field.name] = value
        return cls(**given)  # type: ignore[arg-type]  # the loop keeps each field's own type


def codec_for(name: str, options: Options) -> str | None:
    """The codec that `options` give the array of this dotted name, as JSON text."""
    for pattern, text in cast("tuple[tuple[str, str], ...]", options.codecs):
        if fnmatchcase(name, pattern):
            return None if text == _NO_CODEC else text
    return None


def codecs_of(options: Options) -> tuple[tuple[str, str], ...]:
    """Each pattern of `options` that asks for a codec, and the codec as JSON text."""
    pairs = cast("tuple[tuple[str, str], ...]", options.codecs)
    return tuple((pattern, text) for pattern, text in pairs if text != _NO_CODEC)


_NO_CODEC = "null"


def _codec_pairs(given: object) -> tuple[tuple[str, str], ...]:
    pairs = given.items() if isinstance(given, Mapping) else given
    try:
        return tuple((_pattern(pattern), _codec_text(codec)) for pattern, codec in pairs)  # type: ignore[attr-defined]  # anything else raises
    except (TypeError, ValueError) as error:
        raise StateError(
            "option codecs must be pairs of a name pattern and a codec, such as "
            f'(("optim.*", "zstd"),), but it is {given!r} ({error})'
        ) from None


def _pattern(given: object) -> str:
    if not isinstance(given, str):
        raise TypeError(f"{given!r} is no name pattern")
    return given


def _codec_text(given: object) -> str:
    if isinstance(given, str):
        if given.startswith("{") or given == _NO_CODEC:  # as an earlier Options kept it
            return given
        given = {"name": given}
    if given is None:
        return _NO_CODEC
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise TypeError(f"{given!r} is neither the name of a codec nor a mapping with a name")
    if given.keys() - {"name", "configuration"}:
        raise TypeError(f"{given!r} has more than a name and a configuration")
    configuration = given.get("configuration", {})
    if not isinstance(configuration, Mapping):
        raise TypeError(f"the configuration {configuration!r} is no mapping")
    codec = {"name": given["name"], "configuration": dict(configuration)}
    return json.dumps(codec, separators=(",", ":"), sort_keys=True, allow_nan=False)


def _numbers(cls: type[Options]) -> Iterable[Field[object]]:
    return (field for field in fields(cls) if field.name != "codecs")


def _whole(field: Field[object]) -> bool:
    return field.type in ("int", "int | None")


def _check(name: str, value: object, *, whole: bool) -> None:
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
        raise StateError(
            f"{name} must be a {'whole ' if whole else ''}number above 0, but it is {value!r}"
        )
