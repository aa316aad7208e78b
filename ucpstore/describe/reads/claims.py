"""Memory that a load reads into, and which of it overlaps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from ucpstore.describe.place import Place
from ucpstore.describe.tensors.memory import Memory, memory_of, share_elements
from ucpstore.describe.tensors.numpys import Array


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """Memory that is read into from the array at `path`.

    `memory` is what the user passed, a plain tensor or a numpy array; `kept` keeps that alive, so
    that the memory is not used again.
    """

    path: str
    place: Place
    kept: object
    memory: torch.Tensor | Array


@dataclass(slots=True, eq=False)
class Claims:
    """What one load reads into, numpy arrays that are filled from a copy apart from the rest."""

    _by_memory: dict[Memory, Claim] = field(default_factory=dict)
    _copied: list[Claim] = field(default_factory=list)

    def add(self, claim: Claim, memory: Memory | None) -> Claim:
        """Claim `memory`, if any; the claim that has it, another where it was claimed before."""
        return claim if memory is None else self._by_memory.setdefault(memory, claim)

    def add_copied(self, claim: Claim) -> None:
        """Claim a numpy array that is filled from a copy."""
        self._copied.append(claim)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether something is read into the same memory."""
        memory = memory_of(tensor)
        return memory is not None and memory in self._by_memory

    def overlapping(self) -> Iterator[tuple[Claim, Claim]]:
        """Claims of different views that have elements in common."""
        return _overlapping([*self._by_memory.values(), *self._copied])


def _overlapping(claims: Iterable[Claim]) -> Iterator[tuple[Claim, Claim]]:
    """Claims that share elements. Not those of one array that see it in the same way.

    What counts is where memory lies: a numpy array and a tensor over it have no storage in common.
    """
    by_device: dict[object, list[tuple[int, int, Claim]]] = {}
    for claim in claims:
        first, end = _span(claim.memory)
        if first < end:
            by_device.setdefault(_device(claim.memory), []).append((first, end, claim))
    for spans in by_device.values():
        spans.sort(key=lambda span: span[0])
        for at, (_, end, one) in enumerate(spans):
            for first, _, other in spans[at + 1 :]:
                if first >= end:
                    break
                alike = one.path == other.path and _layout(one.memory) == _layout(other.memory)
                if not alike and share_elements(one.memory, other.memory):
                    yield one, other


def _device(memory: torch.Tensor | Array) -> torch.device:
    return memory.device if isinstance(memory, torch.Tensor) else torch.device("cpu")


def _layout(memory: torch.Tensor | Array) -> tuple[object, ...]:
    return (_start(memory), tuple(memory.shape), _strides(memory))


def _span(memory: torch.Tensor | Array) -> tuple[int, int]:
    """The addresses of the first byte and of the one behind the last; equal without elements."""
    start = _start(memory)
    if not start or 0 in memory.shape:
        return 0, 0
    if isinstance(memory, torch.Tensor) and memory.is_contiguous():
        return start, start + memory.nbytes
    reach = [(n - 1) * step for n, step in zip(memory.shape, _strides(memory), strict=True)]
    end = start + memory.itemsize + sum(each for each in reach if each > 0)
    return start + sum(each for each in reach if each < 0), end


def _start(memory: torch.Tensor | Array) -> int:
    """The address of the first element."""
    if isinstance(memory, np.ndarray):
        return int(memory.__array_interface__["data"][0])
    return memory.data_ptr()


def _strides(memory: torch.Tensor | Array) -> tuple[int, ...]:
    """In bytes."""
    if isinstance(memory, np.ndarray):
        return memory.strides
    return tuple(step * memory.itemsize for step in memory.stride())
