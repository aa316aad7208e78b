"""How far a DeepSpeed engine is, as an item of the state that it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


class Counters:
    """How far an engine is; items of this kind need not be in a checkpoint."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, int]:
        """The counters that DeepSpeed saves too."""
        return {name: int(getattr(self._engine, name)) for name in _COUNTERS}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Set them."""
        for name in _COUNTERS:
            setattr(self._engine, name, state[name])
