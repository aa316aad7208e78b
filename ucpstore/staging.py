"""Host memory between tensors and storage: reused buffers under a byte budget, and box copies.

Fresh memory costs five to thirty times as much to touch first as memory that was touched before,
so buffers are kept and used again, over calls too.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import EllipsisType
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

    All are parts of one region of `limit` bytes, the lowest that is free first, so that memory is
    used again whatever sizes are asked for, and what was never needed is never touched. `limit`
    becomes less where the system does not give so much. Buffers begin in the middle of a page; see
    `_PLACE`.

    Thread-safe. `take` and `acquire` block until the bytes are free, and are served in the order
    in which they were called: else workers that ask again and again would keep a thread waiting
    that other ranks wait for. Buffers come back dirty.
    """

    def __init__(self, limit: int) -> None:
        self.limit = min(limit, _MOST)
        self._region: Bytes | None = None
        self._out: dict[int, tuple[int, int]] = {}
        """Start and stop of what is out, by identity; a larger request has stop 0."""
        self._waiting: deque[object] = deque()
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
        capacity = -(-max(size, 1) // _PAGE) * _PAGE
        with self._changed:
            region = self._reserved()
            start = None if self._waiting else self._place(capacity)
            if start is None:
                start = self._await_turn(capacity)
            if capacity > self.limit:
                buffer, span = _placed(capacity), (0, 0)
            else:
                buffer = region[start : start + capacity]
                span = (start, start + capacity)
            self._out[id(buffer)] = span
            return buffer

    def _reserved(self) -> Bytes:
        """The region; a smaller one than was asked for where the system does not give so much."""
        while self._region is None:
            try:
                self._region = _placed(self.limit)
            except MemoryError:
                if self.limit <= _PAGE:
                    raise
                self.limit //= 2
        return self._region

    def _place(self, capacity: int) -> int | None:
        """Where a buffer fits now, or None."""
        if capacity > self.limit:
            return None if self._out else 0
        start = 0
        for first, stop in sorted(self._out.values()):
            if stop == 0:
                return None  # a larger one is out
            if first - start >= capacity:
                break
            start = stop
        return start if start + capacity <= self.limit else None

    def _await_turn(self, capacity: int) -> int:
        turn = object()
        self._waiting.append(turn)
        found: list[int] = []

        def fits() -> bool:
            start = self._place(capacity) if self._waiting[0] is turn else None
            if start is not None:
                found.append(start)
            return start is not None

        try:
            self._changed.wait_for(fits)
        finally:
            self._waiting.remove(turn)
            self._changed.notify_all()  # the next one may fit as well
        return found[-1]

    def release(self, buffer: Bytes) -> None:
        """Give back what `acquire` returned."""
        with self._changed:
            del self._out[id(buffer)]
            if self._waiting:
                self._changed.notify_all()


_PAGE = 4096

_PLACE = _PAGE // 2
"""Where in a page buffers begin.

A copy whose target lies 1 to 63 bytes further into its page than its source is three to six times
as slow (4K aliasing). Files begin at 0, tensors at 64, most rows are some KiB apart: half a page is
far from all. See docs/design/009-buffers-begin-in-the-middle-of-a-page.md.
"""


def _placed(size: int) -> Bytes:
    """Fresh memory that begins in the middle of a page."""
    memory = np.empty(size + _PAGE, np.uint8)
    start = (_PLACE - memory.ctypes.data) % _PAGE
    return memory[start : start + size]


_MOST = 1 << 46
"""More bytes than any machine has."""


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
        raw = raw_array(tensor)
        return raw if raw.shape == box.shape else part(raw, box)
    return raw_array(tensor[box.slices()].cpu())


class LocalWriter:
    """Puts raw values of `dtype` into parts of local tensors, converted to each tensor's dtype.

    Use it as a context manager: at the end of the block autograd is told of what has changed.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        self._tensors = tensors
        self._dtype = dtype
        self._raw: dict[int, RawArray] = {}

    def __enter__(self) -> LocalWriter:
        return self

    def put(self, number: int, where: tuple[EllipsisType | slice, ...], values: RawArray) -> None:
        """Copy to a part of the tensor of this number, an index expression."""
        raw = self._raw.get(number)
        if raw is None:
            tensor = self._tensors[number]
            if tensor.device.type != "cpu" or tensor.dtype != self._dtype:
                self._convert(tensor, where, values)
                return
            raw = self._raw[number] = raw_array(tensor)
        copy_raw(raw[where], values)

    def _convert(
        self, tensor: torch.Tensor, where: tuple[EllipsisType | slice, ...], values: RawArray
    ) -> None:
        import torch

        source = torch.empty(values.shape, dtype=self._dtype, device="cpu")
        copy_raw(raw_array(source), values)
        # torch forbids to change elsewhere what was made in inference mode
        with torch.inference_mode() if tensor.is_inference() else nullcontext():
            tensor[where].copy_(source)

    def __exit__(self, *_: object) -> None:
        import torch

        for number in self._raw:
            if not self._tensors[number].is_inference():
                # or a backward pass over values that are gone would give wrong gradients
                torch.autograd.graph.increment_version(self._tensors[number])
