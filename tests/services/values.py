"""Values of types that have no stored form."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Point(NamedTuple):
    x: int


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1
