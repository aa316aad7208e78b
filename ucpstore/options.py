"""Tunables: one frozen object whose defaults are meant to be right for everyone.

Every field can be set by an environment variable, `UCPSTORE_` and the field's name in capitals;
an argument wins over the environment. Sizes are in bytes, times in seconds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, fields

from ucpstore.errors import StateError

KIB = 1024
MIB = 1024 * KIB


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

    threads: int = 8
    """Concurrent requests per rank. `UCPSTORE_THREADS`."""

    arrive_timeout_s: float = 60.0
    """How long ranks wait for each other at the start of a call. `UCPSTORE_ARRIVE_TIMEOUT_S`."""

    report_timeout_s: float = 600.0
    """How long rank 0 waits for reports after its own, and how late a rank that is alive may come
    to an exchange. `UCPSTORE_REPORT_TIMEOUT_S`."""

    silence_timeout_s: float = 60.0
    """How long a rank's heartbeat may stand still. `UCPSTORE_SILENCE_TIMEOUT_S`."""

    unfinished_age_s: float = 24 * 3600.0
    """Age past which an unfinished save counts as dead. `UCPSTORE_UNFINISHED_AGE_S`."""

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(f"option {field.name}", getattr(self, field.name), whole=_whole(field))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Options:
        """The defaults, changed by the `UCPSTORE_*` variables that are set."""
        environment = os.environ if environment is None else environment
        given: dict[str, object] = {}
        for field in fields(cls):
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


def _whole(field: Field[object]) -> bool:
    return field.type in ("int", int)


def _check(name: str, value: object, *, whole: bool) -> None:
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
        raise StateError(
            f"{name} must be a {'whole ' if whole else ''}number above 0, but it is {value!r}"
        )
