"""What a verification has seen so far: problems and counts, added to from several threads."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from ucpstore.progress import Progress


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One thing that is wrong: the key of the object or document, and what was found there."""

    key: str
    what: str


class Findings:
    """The problems and counts of one verification, and the `progress` that they are told to."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.problems: list[Problem] = []
        self.documents = 0
        self.arrays = 0
        self.objects = 0
        self.bytes = 0
        self.bytes_read = 0
        self._lock = threading.Lock()

    def problem(self, key: str, what: str | Exception, *names: str) -> None:
        """Add a problem; an error's text loses the key, or other `names` of it, at its start."""
        text = str(what)
        for name in (key, *names):
            if text.startswith((f"{name}: ", f"{name} ")):
                text = text[len(name) :].lstrip(": ")
                break
        with self._lock:
            self.problems.append(Problem(key, text))

    def document(self, key: str, raw: bytes | None, expected: bytes) -> None:
        """Compare a document of fixed bytes; None is one that is missing."""
        with self._lock:
            self.documents += 1
        if raw is None:
            self.problem(key, "is missing; restore it from a copy")
        elif raw != expected:
            self.problem(
                key,
                f"is damaged: {_difference(raw, expected)}; restore it from a copy",
            )

    def read(self, count: int) -> None:
        """Count bytes of objects that were read."""
        with self._lock:
            self.bytes_read += count
        self.progress.add(count, 0)


def _difference(raw: bytes, expected: bytes) -> str:
    if len(raw) != len(expected):
        return f"it should have {len(expected)} bytes, found {len(raw)}"
    at = next(n for n, (a, b) in enumerate(zip(raw, expected, strict=True)) if a != b)
    return f"its byte {at} should be {expected[at]:#04x}, found {raw[at]:#04x}"
