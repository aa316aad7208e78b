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
from ucpstore.loading.requests import Part, Range, Request, joined
from ucpstore.options import Options
from ucpstore.staging import BufferPool, LocalWriter, pool_for
from ucpstore.storage import Storage


def _slices(parts: Sequence[Part], most_bytes: int) -> list[list[Part]]:
    """Chunks that are read together, of up to `most_bytes` or one."""
    found: list[list[Part]] = []
    for part in parts:
        if found and part.stop - found[-1][0].start <= most_bytes:
            found[-1].append(part)
        else:
            found.append([part])
    return found


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
        self._threads = options.threads or storage.requests
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
        size = self._storage.size(key)
        if not grid.sharded:
            return joined(chunks, [Extent(0, size)])
        tail = read_tail(self._storage, key, grid, size)
        self._count(len(tail))
        return joined(chunks, parse_index(tail, grid, request.object.index, size, key))

    def _range(self, request: Request, found: Range, key: str) -> None:
        read, array = request.read, request.array
        grid, dtype, codec = array.grid, read.dtype, array.codec
        slices = _slices(found.parts, self._storage.read_bytes)
        most = max([parts[-1].stop - parts[0].start for parts in slices])
        # A compressor needs room for one chunk beside what was read.
        room = 0 if codec is None else grid.chunk_bytes(itemsize(dtype))
        writer = LocalWriter([view.tensor for view in read.views], to_torch(dtype))
        buffer = self._pool.acquire(most + room)
        try:
            with self._storage.reading(key) as fill, writer:
                for parts in slices:
                    start = parts[0].start
                    fill(found.start + start, buffer[: parts[-1].stop - start].data)
                    for part in parts:
                        stored = buffer[part.start - start : part.stop - start]
                        values = decode(stored, grid, dtype, codec, key, part.number)
                        for view, inside, local in part.copies:
                            writer.put(view, local, values[inside])
        finally:
            self._pool.release(buffer)
        self._count(found.bytes)

    def _count(self, size: int) -> None:
        with self._lock:
            self.bytes_read += size
