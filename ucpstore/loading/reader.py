"""Read the chunks that a rank's pieces touch, verify them, and copy them into the target."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from ucpstore.arrays.chain import decode
from ucpstore.arrays.compressed import parse_index
from ucpstore.arrays.packed import Extent
from ucpstore.catalog import StepRef, missing, read_tail
from ucpstore.crew import Crew
from ucpstore.dtypes import itemsize, to_torch
from ucpstore.loading.requests import Range, Request, joined
from ucpstore.options import Options
from ucpstore.staging import BufferPool, Bytes, Values, pool_for, write_local
from ucpstore.storage import Storage


def _decoded(request: Request, found: Range, key: str, buffer: Bytes) -> Iterator[Values]:
    """Where in which view values go, and the verified values, from the bytes of a range."""
    grid, dtype, codec = request.array.grid, request.read.dtype, request.array.codec
    for part in found.parts:
        values = decode(buffer[part.start : part.stop], grid, dtype, codec, key, part.number)
        for view, inside, local in part.copies:
            yield view, local, values[inside]


class Reader:
    """Carries out requests for one committed step with worker threads under the byte budget.

    `done` is told each request that was carried out, from several threads; what it raises ends the
    reading.
    """

    def __init__(
        self,
        storage: Storage,
        ref: StepRef,
        options: Options,
        done: Callable[[Request], None] | None = None,
    ) -> None:
        self._storage = storage
        self._ref = ref
        self._done = done
        self._threads = options.threads
        self._pool: BufferPool = pool_for(options.budget_bytes)
        self._lock = threading.Lock()
        self._stop = False
        self.bytes_read = 0
        """Bytes of chunks, checksums and indexes that were read so far."""

    def run(self, todo: Sequence[Request]) -> None:
        """Read all; after the first error the rest is skipped and the error raised."""
        if len(todo) == 1:
            self._one(todo[0])
            return
        with Crew(min(self._threads, len(todo)), "ucpstore-read") as crew:
            try:
                for request in todo:
                    crew.submit(self._guarded, request, size=request.object.plain_bytes)
                crew.wait()
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
        key = f"{self._ref.path}/{request.read.path}/{request.object.name}"
        known = request.object.range
        try:
            for each in self._found(request, key) if known is None else (known,):
                self._range(request, each, key)
        except FileNotFoundError:
            raise missing(self._storage, self._ref, key) from None
        if self._done is not None:
            self._done(request)

    def _found(self, request: Request, key: str) -> Iterator[Range]:
        """The ranges of a request, from the object's size and its index."""
        grid, chunks = request.array.grid, request.object.chunks
        size, most = self._storage.size(key), self._storage.request_bytes
        if not grid.sharded:
            return joined(chunks, [Extent(0, size)], most)
        tail = read_tail(self._storage, key, grid, size)
        self._count(len(tail))
        return joined(chunks, parse_index(tail, grid, request.object.index, size, key), most)

    def _range(self, request: Request, found: Range, key: str) -> None:
        read, array = request.read, request.array
        # A compressor needs room for one chunk beside what was read.
        room = 0 if array.codec is None else array.grid.chunk_bytes(itemsize(read.dtype))
        buffer = self._pool.acquire(found.bytes + room)
        try:
            self._storage.read_into(key, found.start, buffer[: found.bytes].data)
            write_local(
                [view.tensor for view in read.views],
                _decoded(request, found, key, buffer),
                to_torch(read.dtype),
            )
        finally:
            self._pool.release(buffer)
        self._count(found.bytes)

    def _count(self, size: int) -> None:
        with self._lock:
            self.bytes_read += size
