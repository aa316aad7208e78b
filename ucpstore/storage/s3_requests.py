"""The seam inside S3: one method per request, so that two libraries can send them.

`ucpstore.storage.objects` knows what a storage promises, when to ask again and what an error means
to the user; what implements `Requests` knows one library.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ucpstore.storage.s3_errors import Failure


@dataclass(frozen=True, slots=True)
class Listed:
    """One object of a listing: its whole path in the bucket, bytes, and Unix seconds."""

    path: str
    size: int
    modified: float


class Requests(Protocol):
    """Requests to one bucket. Paths are keys of the bucket, taken literally.

    An absent object raises FileNotFoundError; every failure is one of `errors`.
    """

    @property
    def errors(self) -> tuple[type[BaseException], ...]:
        """What a request raises when it fails."""

    @property
    def resends(self) -> bool:
        """Whether the library itself sends again what met a busy server or a broken connection."""

    def failure(self, error: BaseException) -> Failure:
        """What one of `errors` says."""

    def put(self, path: str, data: memoryview) -> None:
        """Write an object whole."""

    def create(self, path: str, data: memoryview) -> int | None:
        """Put if absent: None, or the status of the answer that something is there."""

    def get(self, path: str) -> bytes:
        """The whole object."""

    def get_into(self, path: str, start: int, view: memoryview) -> int:
        """Fill `view` from byte `start` on; how many bytes there were, 0 where none is."""

    def head(self, path: str) -> int:
        """The size in bytes."""

    def page(
        self, prefix: str, after: object | None, count: int
    ) -> tuple[Sequence[Listed], object | None]:
        """Up to `count` objects below `prefix`, and what to pass as `after` for the next ones."""

    def folders(self, prefix: str) -> Iterable[str]:
        """The common prefixes below `prefix`, whole, with or without the slash at their end."""

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects; absent ones are fine."""

    def copy(self, source: str, target: str) -> None:
        """Copy inside the bucket, on the server."""
