"""PerRank: a value of the state that is meant to differ between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


class PerRank(Generic[T]):
    """Each rank stores its own `value` and gets its own back: random states, data loaders.

    `axis` tells which ranks share a value. None: none do, the index is the rank in the process
    group of the call. A 1-D DeviceMesh, e.g. `mesh["dp"]`: ranks with the same coordinate on it
    share one, which must be equal. A tuple `(name, index, count)` says it outright, for jobs that
    use no DeviceMesh.

    `value` is anything a state may hold except DTensors, modules and optimizers; an object with
    `state_dict()` and `load_state_dict()` and a `torch.Generator` are stored by their state.
    Loading restores them, and dicts and lists, in place, and sets `value` to anything else.
    It needs the same axis name and count as the save had.
    """

    __slots__ = ("axis", "value")

    def __init__(self, value: T, axis: DeviceMesh | tuple[str, int, int] | None = None) -> None:
        self.value = value
        self.axis = axis

    def __repr__(self) -> str:
        return f"PerRank({self.value!r}, axis={self.axis!r})"
