"""What `load` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The outcome of one load, on one rank.

    `items` were loaded, `skipped` are saved but not in the target. `missing` names were asked for
    and are not saved, `unexpected` names are saved and were not asked for; both are empty under
    `strict`. `bytes_needed` are the bytes of this rank's own target elements, `bytes_read` the
    bytes of data and checksums that this rank read, `metadata_bytes` those of metadata documents
    (read by rank 0 alone). `seconds` holds this rank's time by phase.
    """

    url: str
    step: int
    items: tuple[str, ...]
    skipped: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    bytes_needed: int
    bytes_read: int
    metadata_bytes: int
    seconds: Mapping[str, float]

    def __str__(self) -> str:
        total = sum(self.seconds.values())
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
            f"{self.bytes_needed / 2**20:.1f} MiB needed, {self.bytes_read / 2**20:.1f} MiB read "
            f"in {total:.2f} s{lists}"
        )
