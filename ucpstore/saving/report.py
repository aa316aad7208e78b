"""What `save` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ucpstore.units import rate, size


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The outcome of one save, on one rank.

    `bytes` and `objects` count what this rank wrote, `total_bytes` and `total_objects` what all
    ranks wrote together (known on every rank). `seconds` holds this rank's time by phase:
    `describe`, `begin`, `plan`, `write` and `commit` (waiting for the other ranks included).
    """

    url: str
    step: int
    generation: int
    path: str
    arrays: int
    objects: int
    bytes: int
    exchanged_bytes: int
    total_objects: int
    total_bytes: int
    seconds: Mapping[str, float]

    def __str__(self) -> str:
        total = sum(self.seconds.values())
        phases = ", ".join(f"{name} {value:.3f}" for name, value in self.seconds.items())
        return (
            f"saved step {self.step} to {self.url}: {self.arrays} arrays, "
            f"{self.total_objects} objects, {size(self.total_bytes)} in {total:.2f} s, "
            f"{rate(self.total_bytes, total)} ({phases})"
        )


class SaveHandle:
    """A save that was begun. `result()` gives its report once it is committed."""

    def __init__(self, report: SaveReport) -> None:
        self._report = report

    def result(self) -> SaveReport:
        """The report; raises what made the save fail. Saves block, so it returns at once."""
        return self._report

    def __str__(self) -> str:
        return str(self._report)

    def __repr__(self) -> str:
        return f"<SaveHandle: {self._report}>"
