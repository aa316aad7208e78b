"""Read the chunks that a rank's pieces touch, verify them, and copy them into the target."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ucpstore.arrays.chain import check_codec, decode
from ucpstore.arrays.compressed import parse_index
from ucpstore.arrays.metadata import ArrayMetadata
from ucpstore.arrays.packed import Extent, chunk_extent, slot_bytes
from ucpstore.arrays.raw import part as region
from ucpstore.catalog import StepRef, missing, read_tail
from ucpstore.crew import Crew
from ucpstore.describe import Read
from ucpstore.dtypes import itemsize, to_torch
from ucpstore.geometry import Index
from ucpstore.options import MIB, Options
from ucpstore.plan import ChunkRead, plan_reads
from ucpstore.staging import BufferPool, pool_for, write_local
from ucpstore.storage import Storage

REQUEST_BYTES = 8 * MIB
"""Adjacent chunks are read in one request up to this size."""


@dataclass(frozen=True, slots=True)
class Request:
    """Chunks of one object in stored order, and where they go.

    One contiguous range, but where the array has a compressor: then all chunks that are needed of
    the object, whose index tells the ranges.
    """

    read: Read
    array: ArrayMetadata
    index: Index
    chunks: tuple[ChunkRead, ...]

    @property
    def plain_bytes(self) -> int:
        """Bytes of the chunks and their checksums, as they are without a compressor."""
        return len(self.chunks) * slot_bytes(self.array.grid, itemsize(self.read.dtype))


def requests(read: Read, array: ArrayMetadata) -> Iterator[Request]:
    """What to read for one target: no chunk that it does not touch, none twice.

    Raises UnsupportedError, naming the array, for a compressor that is not there.
    """
    check_codec(array, read.path)
    slot = slot_bytes(array.grid, itemsize(read.dtype))
    most = max(1, REQUEST_BYTES // slot)
    for each in plan_reads(read.pieces, array.grid):
        if array.codec is not None:
            yield Request(read, array, each.index, each.chunks)
            continue
        run: list[ChunkRead] = []
        for chunk in each.chunks:
            if run and (chunk.number != run[-1].number + 1 or len(run) == most):
                yield Request(read, array, each.index, tuple(run))
                run = []
            run.append(chunk)
        if run:
            yield Request(read, array, each.index, tuple(run))


@dataclass(frozen=True, slots=True)
class _Range:
    """Chunks that follow each other in an object, and where each starts and ends, in bytes."""

    chunks: Sequence[ChunkRead]
    extents: Sequence[Extent]

    @property
    def start(self) -> int:
        return self.extents[0].offset

    @property
    def bytes(self) -> int:
        return self.extents[-1].stop - self.start


def _packed(request: Request) -> Iterator[_Range]:
    """The one range of a request whose offsets follow from the grid."""
    grid, size = request.array.grid, itemsize(request.read.dtype)
    extents = [chunk_extent(grid, each.number, size) for each in request.chunks]
    yield _Range(request.chunks, extents)


def _joined(chunks: Sequence[ChunkRead], extents: Sequence[Extent]) -> Iterator[_Range]:
    """Ranges of chunks that lie next to each other; `extents` are those of all stored chunks."""
    run: list[ChunkRead] = []
    for chunk in sorted(chunks, key=lambda each: extents[each.number].offset):
        here = extents[chunk.number]
        if run and (
            here.offset != extents[run[-1].number].stop
            or here.stop - extents[run[0].number].offset > REQUEST_BYTES
        ):
            yield _Range(run, [extents[each.number] for each in run])
            run = []
        run.append(chunk)
    yield _Range(run, [extents[each.number] for each in run])


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
                    crew.submit(self._guarded, request, size=request.plain_bytes)
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
        key = f"{self._ref.path}/{request.read.path}/{request.array.grid.key(request.index)}"
        try:
            ranges = _packed(request) if request.array.codec is None else self._found(request, key)
            for each in ranges:
                self._range(request, each, key)
        except FileNotFoundError:
            raise missing(self._storage, self._ref, key) from None
        if self._done is not None:
            self._done(request)

    def _found(self, request: Request, key: str) -> Iterator[_Range]:
        """The ranges of a request, from the object's size and its index."""
        grid = request.array.grid
        size = self._storage.size(key)
        if not grid.sharded:
            return _joined(request.chunks, [Extent(0, size)])
        tail = read_tail(self._storage, key, grid, size)
        self._count(len(tail))
        return _joined(request.chunks, parse_index(tail, grid, request.index, size, key))

    def _range(self, request: Request, each: _Range, key: str) -> None:
        read, array = request.read, request.array
        # A compressor needs room for one chunk beside what was read.
        room = 0 if array.codec is None else array.grid.chunk_bytes(itemsize(read.dtype))
        dtype = to_torch(read.dtype)
        with self._pool.take(each.bytes + room) as buffer:
            self._storage.read_into(key, each.start, buffer[: each.bytes].data)
            for chunk, extent in zip(each.chunks, each.extents, strict=True):
                stored = buffer[extent.offset - each.start : extent.stop - each.start]
                values = decode(stored, array.grid, read.dtype, array.codec, key, chunk.number)
                for inside, local in chunk.copies:
                    write_local(read.tensor, local, region(values, inside), dtype)
        self._count(each.bytes)

    def _count(self, size: int) -> None:
        with self._lock:
            self.bytes_read += size
