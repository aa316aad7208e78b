"""PerRank: a value of the state that is meant to differ between ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


class PerRank(Generic[T]):
    """Each rank stores its own `value` and gets its own back: random states, data loaders.

    `axis` tells which ranks share a value. None: none do, the index is the rank in the process
    group of the call. A 1-D DeviceMesh, e.g. `mesh["dp"]`: ranks with the same coordinate on it
    share one, which must be equal. The name of an axis of the call's specification: the same. A
    tuple `(name, index, count)` says it outright.

    `value` is anything a state may hold except DTensors, modules and optimizers; an object with
    `state_dict()` and `load_state_dict()` and a `torch.Generator` are stored by their state.
    Loading restores them, and dicts and lists, in place, and sets `value` to anything else. A
    PerRank may also be part of what an object's `state_dict()` gives; its `load_state_dict()` gets
    the value without it.

    A load gives each index its own where the axis has the name and count that it had at the save.
    Elsewhere it calls `reshape(values, index, count)` on every rank, with the values of all saved
    indices in order and this rank's index and count, and restores what that gives; without
    `reshape` it refuses. Of an object it gets, and gives, what its `state_dict()` gave; of a
    generator its state.
    """

    __slots__ = ("axis", "reshape", "value")

    def __init__(
        self,
        value: T,
        axis: DeviceMesh | tuple[str, int, int] | str | None = None,
        *,
        reshape: Callable[[list[Any], int, int], Any] | None = None,
    ) -> None:
        self.value = value
        self.axis = axis
        self.reshape = reshape

    def __repr__(self) -> str:
        return f"PerRank({self.value!r}, axis={self.axis!r})"
