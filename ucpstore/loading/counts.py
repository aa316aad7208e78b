"""How far a rank's reads are, in bytes and in whole objects."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from ucpstore.geometry import Index
from ucpstore.loading.requests import Request
from ucpstore.progress import Progress


class ReadCounts:
    """Begins the phase `read`, and counts its requests as they are done, in any thread."""

    def __init__(self, progress: Progress, todo: Sequence[Request]) -> None:
        self._progress = progress
        self._left = Counter(map(_object, todo))
        self._lock = threading.Lock()
        progress.phase(
            "read",
            total_bytes=sum(request.object.plain_bytes for request in todo),
            total_objects=len(self._left),
        )

    def done(self, request: Request) -> None:
        """Count a request; its object once nothing of it is left."""
        with self._lock:
            self._left[_object(request)] -= 1
            whole = self._left[_object(request)] == 0
        self._progress.add(request.object.plain_bytes, int(whole))


def _object(request: Request) -> tuple[str, Index]:
    return request.read.path, request.object.index
