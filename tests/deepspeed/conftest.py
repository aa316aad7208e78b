"""Ranks of their own for DeepSpeed, which keeps state in its modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks.harness import Ranks

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def zero_ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.close()
