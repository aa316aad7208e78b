"""Objects that give and take their own state: schedulers, loaders, scalers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeGuard


class Stateful(Protocol):
    """What an object must offer to be part of a state."""

    def state_dict(self) -> Mapping[str, object]: ...

    def load_state_dict(self, state: object) -> object: ...


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Whether a value (not a class) has `state_dict` and `load_state_dict`."""
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )
