"""A bar on stderr that follows events, where stderr is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ucpstore.units import rate, size

if TYPE_CHECKING:
    from ucpstore.progress import ProgressCallback, ProgressEvent


class Lines:
    """What a bar says of a verification of one or several steps."""

    def __init__(self) -> None:
        self._steps = 0
        self._place = 0

    def of(self, event: ProgressEvent) -> tuple[str, str]:
        """The text before the bar, and the one behind it."""
        if event.phase == "records":
            self._steps = event.total_objects or 0
            return "commit records", f"{event.done_objects} of {self._steps}"
        if event.phase == "documents":
            self._place += 1
        place = f" ({self._place} of {self._steps})" if self._steps > 1 else ""
        return f"step {event.step}{place}", self._amount(event)

    def _amount(self, event: ProgressEvent) -> str:
        if event.total_objects is None:
            return "its documents"
        if not event.total_bytes:
            return f"{event.done_objects} of {event.total_objects} looked at"
        speed = rate(event.done_bytes, event.seconds)
        return f"{size(event.done_bytes)} of {size(event.total_bytes)}, {speed}"


@contextmanager
def bar(wanted: bool) -> Iterator[ProgressCallback | None]:
    """A function that shows events as a bar; None where nobody would see it.

    The bar is gone once the context is left.
    """
    if not wanted or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    shown = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        console=Console(stderr=True),
        transient=True,
    )
    lines = Lines()
    with shown:
        task = shown.add_task("", total=1, amount="")

        def show(event: ProgressEvent) -> None:
            before, behind = lines.of(event)
            done = event.done_bytes if event.total_bytes else event.done_objects
            # A total of None would keep that of the phase before.
            total = event.total_bytes or event.total_objects or 1
            shown.update(task, description=before, total=total, completed=done, amount=behind)

        yield show
