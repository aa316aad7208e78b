"""Read the chunks that a rank's pieces touch, verify them, and copy them into the target."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ucpstore.arrays.packed import chunk_offset, decode_chunk, slot_bytes
from ucpstore.arrays.raw import part as region
from ucpstore.catalog import StepRef, missing
from ucpstore.describe import Read
from ucpstore.dtypes import itemsize, to_torch
from ucpstore.geometry import Grid, Index
from ucpstore.options import MIB, Options
from ucpstore.plan import ChunkRead, plan_reads
from ucpstore.staging import BufferPool, pool_for, write_local
from ucpstore.storage import Storage

REQUEST_BYTES = 8 * MIB
"""Adjacent chunks are read in one request up to this size."""


@dataclass(frozen=True, slots=True)
class Request:
    """One contiguous range of one object: chunks that follow each other, and where they go."""

    read: Read
    grid: Grid
    index: Index
    chunks: tuple[ChunkRead, ...]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one chunk with its checksum."""
        return slot_bytes(self.grid, itemsize(self.read.dtype))

    @property
    def bytes(self) -> int:
        """Bytes to read."""
        return self.slot_bytes * len(self.chunks)


def requests(read: Read, grid: Grid) -> Iterator[Request]:
    """The ranges to read for one target: no chunk that it does not touch, none twice."""
    slot = slot_bytes(grid, itemsize(read.dtype))
    most = max(1, REQUEST_BYTES // slot)
    for each in plan_reads(read.pieces, grid):
        run: list[ChunkRead] = []
        for chunk in each.chunks:
            if run and (chunk.number != run[-1].number + 1 or len(run) == most):
                yield Request(read, grid, each.index, tuple(run))
                run = []
            run.append(chunk)
        if run:
            yield Request(read, grid, each.index, tuple(run))


class Reader:
    """Carries out requests for one committed step with worker threads under the byte budget."""

    def __init__(self, storage: Storage, ref: StepRef, options: Options) -> None:
        self._storage = storage
        self._ref = ref
        self._threads = options.threads
        self._pool: BufferPool = pool_for(options.budget_bytes)
        self._lock = threading.Lock()
        self._stop = False
        self.bytes_read = 0
        """Bytes of data and checksums that were read so far."""

    def run(self, todo: Sequence[Request]) -> None:
        """Read all; after the first error the rest is skipped and the error raised."""
        if len(todo) == 1:
            self._one(todo[0])
            return
        with ThreadPoolExecutor(min(self._threads, max(1, len(todo))), "ucpstore-read") as pool:
            futures = [pool.submit(self._guarded, request) for request in todo]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                self._stop = True
                raise

    def _guarded(self, request: Request) -> None:
        if not self._stop:
            try:
                self._one(request)
            except BaseException:
                self._stop = True
                raise

    def _one(self, request: Request) -> None:
        read, grid = request.read, request.grid
        key = f"{self._ref.path}/{read.path}/{grid.key(request.index)}"
        start = chunk_offset(grid, request.chunks[0].number, itemsize(read.dtype))
        slot = request.slot_bytes
        dtype = to_torch(read.dtype)
        with self._pool.take(request.bytes) as buffer:
            try:
                self._storage.read_into(key, start, buffer.data)
            except FileNotFoundError:
                raise missing(self._storage, self._ref, key) from None
            for position, chunk in enumerate(request.chunks):
                part = buffer[position * slot : (position + 1) * slot]
                values = decode_chunk(part, grid, read.dtype, key, chunk.number)
                for inside, local in chunk.copies:
                    write_local(read.tensor, local, region(values, inside), dtype)
        with self._lock:
            self.bytes_read += request.bytes
