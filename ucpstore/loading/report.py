"""What `load` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ucpstore.units import rate, size


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The outcome of one load, on one rank.

    `items` were loaded, `skipped` are saved but not in the target. `missing` names were asked for
    and are not saved, `unexpected` names are saved and were not asked for; both are empty under
    `strict`. `arrays` counts the stored arrays that this rank read from. `bytes_needed` are the
    bytes of this rank's own target elements, `bytes_read` the bytes of data and checksums that this
    rank read, `total_bytes_read` those of all ranks together, `metadata_bytes` those of metadata
    documents (read by rank 0 alone). `seconds` holds this rank's time by phase: `resolve`, `plan`,
    `read`, `apply` and `agree` (waiting for the other ranks).
    """

    url: str
    step: int
    items: tuple[str, ...]
    skipped: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    arrays: int
    bytes_needed: int
    bytes_read: int
    total_bytes_read: int
    metadata_bytes: int
    seconds: Mapping[str, float]

    def __str__(self) -> str:
        total = sum(self.seconds.values())
        phases = ", ".join(f"{name} {value:.3f}" for name, value in self.seconds.items())
        others = ""
        if self.total_bytes_read != self.bytes_read:
            others = f" here and {size(self.total_bytes_read)} by all ranks"
        lists = "".join(
            f", {len(names)} {word}"
            for word, names in (
                ("items skipped", self.skipped),
                ("missing", self.missing),
                ("unexpected", self.unexpected),
            )
            if names
        )
        return (
            f"loaded step {self.step} from {self.url}: {', '.join(self.items) or 'nothing'}, "
            f"{self.arrays} arrays, {size(self.bytes_needed)} needed, "
            f"{size(self.bytes_read)} read{others} in {total:.2f} s, "
            f"{rate(self.total_bytes_read, total)} ({phases}){lists}"
        )
