"""Host memory between tensors and storage: reused buffers under a byte budget, and box copies.

Fresh memory costs five to thirty times as much to touch first as memory that was touched before,
so buffers are kept and used again, over calls too.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ucpstore.arrays.raw import RawArray, copy_raw, part, raw_array
from ucpstore.geometry import Box, Piece
from ucpstore.options import MIB

if TYPE_CHECKING:
    import torch

Bytes = npt.NDArray[np.uint8]


class BufferPool:
    """Reused host buffers. At most `limit` bytes are out at once; a larger request goes alone.

    Thread-safe. `take` and `acquire` block until the bytes are free, and are served in the order
    in which they were called: else workers that ask again and again would keep a thread waiting
    that other ranks wait for. Buffers come back dirty.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._out = 0
        self._waiting: deque[object] = deque()
        self._kept: list[Bytes] = []
        self._kept_bytes = 0
        self._changed = threading.Condition()

    @contextmanager
    def take(self, size: int) -> Iterator[Bytes]:
        """A buffer of exactly `size` bytes, given back at the end of the block."""
        buffer = self.acquire(size)
        try:
            yield buffer[:size]
        finally:
            self.release(buffer)

    def acquire(self, size: int) -> Bytes:
        """A buffer of at least `size` bytes; the caller hands the same object to `release`."""
        capacity = _capacity(size)
        with self._changed:
            if self._waiting or not self._fits(capacity):
                self._await_turn(capacity)
            self._out += capacity
            for position in range(len(self._kept) - 1, -1, -1):
                if self._kept[position].size == capacity:
                    self._kept_bytes -= capacity
                    return self._kept.pop(position)
            while self._kept and self._kept_bytes + self._out > self.limit:
                self._kept_bytes -= self._kept.pop(0).size
        try:
            return np.empty(capacity, np.uint8)
        except BaseException:
            with self._changed:
                self._out -= capacity
                self._changed.notify_all()
            raise

    def _fits(self, capacity: int) -> bool:
        return self._out == 0 or self._out + capacity <= self.limit

    def _await_turn(self, capacity: int) -> None:
        turn = object()
        self._waiting.append(turn)
        try:
            self._changed.wait_for(lambda: self._waiting[0] is turn and self._fits(capacity))
        finally:
            self._waiting.remove(turn)
            self._changed.notify_all()  # the next one may fit as well

    def release(self, buffer: Bytes) -> None:
        """Give back what `acquire` returned."""
        with self._changed:
            self._out -= buffer.size
            if self._kept_bytes + self._out + buffer.size <= self.limit:
                self._kept.append(buffer)
                self._kept_bytes += buffer.size
            self._changed.notify_all()


def _capacity(size: int) -> int:
    """Round up so that buffers of nearly equal sizes serve each other."""
    if size <= MIB:
        return 1 << max(12, (size - 1).bit_length())
    step = MIB // 4
    return -(-size // step) * step


_pools: dict[int, BufferPool] = {}
_pools_lock = threading.Lock()


def _after_fork() -> None:
    """Buffers that are out belong to threads that a child does not have."""
    global _pools_lock
    _pools_lock = threading.Lock()
    _pools.clear()


os.register_at_fork(after_in_child=_after_fork)


def pool_for(budget_bytes: int) -> BufferPool:
    """The process's pool for a budget; half of the budget is left to everything else."""
    limit = max(budget_bytes // 2, 1)
    with _pools_lock:
        pool = _pools.get(limit)
        if pool is None:
            pool = _pools[limit] = BufferPool(limit)
        return pool


def parts(pieces: Sequence[Piece], region: Box) -> Iterator[Piece]:
    """The parts of `pieces` that lie in `region` of the global array."""
    for piece in pieces:
        common = piece.part(region)
        if common is not None:
            yield common


CONVERTED_BYTES = 1 * MIB
"""About as many bytes of values are converted at once, so that the copies stay small."""


def read_parts(
    tensor: torch.Tensor, pieces: Sequence[Piece], region: Box, dtype: torch.dtype
) -> Iterator[tuple[Box, RawArray]]:
    """The values of what `pieces` hold of a region, as `dtype`, and the boxes that they fill.

    Boxes are those of the global array. Values that are converted come in small parts.
    """
    for piece in parts(pieces, region):
        if tensor.dtype == dtype:
            yield piece.box, read_local(tensor, piece.local)
            continue
        size = max(tensor.dtype.itemsize, dtype.itemsize)
        for box in _small(piece.box, max(1, CONVERTED_BYTES // size)):
            for each in parts((piece,), box):
                yield box, raw_array(tensor[each.local.slices()].to(dtype).cpu())


def _small(box: Box, elements: int) -> Iterator[Box]:
    """The box cut along its dimensions, first ones first, into boxes of at most `elements`."""
    if box.size <= elements:
        yield box
        return
    dim = next(dim for dim, extent in enumerate(box.shape) if extent > 1)
    rows = max(1, elements * box.shape[dim] // box.size)
    for start in range(0, box.shape[dim], rows):
        offset, shape = list(box.offset), list(box.shape)
        offset[dim] += start
        shape[dim] = min(rows, shape[dim] - start)
        yield from _small(Box(tuple(offset), tuple(shape)), elements)


def read_local(tensor: torch.Tensor, box: Box) -> RawArray:
    """The values of a box of the local tensor as a raw host array; a view where memory is host's.

    Waits for the device where the tensor lies on one.
    """
    if tensor.device.type == "cpu":
        return part(raw_array(tensor), box)
    return raw_array(tensor[box.slices()].cpu())


def write_local(tensor: torch.Tensor, box: Box, values: RawArray, dtype: torch.dtype) -> None:
    """Put raw values of `dtype` into a box of the local tensor, converted to the tensor's dtype."""
    import torch

    if tensor.device.type == "cpu" and tensor.dtype == dtype:
        copy_raw(part(raw_array(tensor), box), values)
        if not tensor.is_inference():
            # or a backward pass over values that are gone would give wrong gradients, not an error
            torch.autograd.graph.increment_version(tensor)
        return
    source = torch.empty(box.shape, dtype=dtype)
    copy_raw(raw_array(source), values)
    tensor[box.slices()].copy_(source)
