"""Numbers of bytes as text."""

from __future__ import annotations

import pytest

from ucpstore.units import rate, size


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (6_508_513, "6.2 MiB"), (3 << 40, "3.0 TiB")],
)
def test_size(count: int, shown: str) -> None:
    assert size(count) == shown


def test_rate() -> None:
    assert rate(3 << 20, 1.5) == "2.0 MiB/s"
    assert rate(0, 0.0) == "0 B/s"
