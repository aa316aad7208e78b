"""Numbers of bytes as text for people."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(count: int) -> str:
    """A number of bytes: `512 B`, `6.2 MiB`."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{count} B"


def rate(count: int, seconds: float) -> str:
    """Bytes by time: `512 B/s`, `1.2 GiB/s`."""
    return f"{size(round(count / max(seconds, 1e-3)))}/s"
