"""The `ranks` fixture; see `ranks.harness`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks.harness import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Real ranks, each a process of its own: `ranks.run(4, function, *args)`."""
    ranks = Ranks()
    yield ranks
    ranks.close()
