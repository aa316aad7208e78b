"""The systems that are compared, each behind the same four calls; every rank calls them together.

`save(place, tree)` writes fresh files below a place that nothing has used; on return the
checkpoint is complete and durable. `load(place, tree)` fills the target. All use their defaults
but for what is said here.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import google_crc32c
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

import ucpstore
from benchmarks.compare.state import HIDDEN, SLICED, Tree
from ucpstore.storage.files import start_writing, sync_files

MIB = 2**20
SYNCED_TOGETHER = "bare loop synced together"


class System(Protocol):
    """One system under test."""

    name: str
    reshards: bool

    def save(self, place: str, tree: Tree) -> None:
        """Write a checkpoint that is complete on return."""

    def load(self, place: str, tree: Tree) -> None:
        """Fill the tensors of `tree`, all of them or a part of what was saved."""

    def read_slice(self, place: str) -> torch.Tensor:
        """The slice that `state.SLICED` names, by one process without the others."""


class Ucpstore:
    """ucpstore, with nothing set."""

    name, reshards = "ucpstore", True

    def save(self, place: str, tree: Tree) -> None:
        ucpstore.save(place, tree, step=1)

    def load(self, place: str, tree: Tree) -> None:
        ucpstore.load(place, tree)

    def read_slice(self, place: str) -> torch.Tensor:
        item, name, rows = SLICED
        return ucpstore.CheckpointStore(place).open()[item][name][:rows]


class Dcp:
    """torch.distributed.checkpoint: one synced file a rank, written by `threads` threads."""

    reshards = True

    def __init__(self, threads: int) -> None:
        self.name = f"DCP, {threads} thread{'s' if threads > 1 else ''}"
        self._threads = threads

    def save(self, place: str, tree: Tree) -> None:
        if place.startswith("s3://"):
            writer = FsspecWriter(place, thread_count=self._threads, sync_files=False, **s3fs())
        else:
            writer = dcp.FileSystemWriter(place, thread_count=self._threads, sync_files=True)
        dcp.save(tree, storage_writer=writer)

    def load(self, place: str, tree: Tree) -> None:
        s3 = place.startswith("s3://")
        reader = FsspecReader(place, **s3fs()) if s3 else dcp.FileSystemReader(place)
        dcp.load(tree, storage_reader=reader)

    def read_slice(self, place: str) -> torch.Tensor:
        # DCP reads whole tensors into one process.
        item, name, rows = SLICED
        whole = torch.empty(HIDDEN, HIDDEN, dtype=torch.bfloat16)
        s3 = place.startswith("s3://")
        reader = FsspecReader(place, **s3fs()) if s3 else dcp.FileSystemReader(place)
        dcp.load({item: {name: whole}}, storage_reader=reader, no_dist=True)
        return whole[:rows]


def s3fs() -> dict[str, object]:
    """What s3fs does not read from the environment by itself."""
    return {"client_kwargs": {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}}


class Bare:
    """The same bytes in objects of one size by 4 threads a rank: write, crc32c, fsync; no more.

    What a store that checks its bytes could reach on this machine at best; it cannot reshard. With
    `together` all files are begun, and then synced, as ucpstore does it.
    """

    reshards = False

    def __init__(self, object_mib: int, *, together: bool = False) -> None:
        self.name = f"{SYNCED_TOGETHER if together else 'bare loop'}, {object_mib} MiB"
        self._size = object_mib * MIB
        self._together = together

    def _parts(self, tree: Tree) -> list[tuple[str, np.ndarray]]:
        numbers = itertools.count()
        rank = dist.get_rank()
        return [
            (f"{rank}-{next(numbers)}", flat[start : start + self._size])
            for tensors in tree.values()
            for tensor in tensors.values()
            for flat in [tensor.to_local().reshape(-1).view(torch.uint8).numpy()]
            for start in range(0, flat.size, self._size)
        ]

    def save(self, place: str, tree: Tree) -> None:
        with ThreadPoolExecutor(4) as pool:
            if place.startswith("s3://"):
                list(pool.map(lambda part: put_object(place, *part), self._parts(tree)))
            else:
                Path(place).mkdir(parents=True, exist_ok=True)
                end = start_writing if self._together else os.fsync
                paths = pool.map(lambda part: put_file(place, *part, end), self._parts(tree))
                sync_files(list(paths) if self._together else [])
        dist.barrier()

    def read_slice(self, place: str) -> torch.Tensor:
        raise AssertionError("a bare loop knows no slices")

    def load(self, place: str, tree: Tree) -> None:
        with ThreadPoolExecutor(4) as pool:
            get = get_object if place.startswith("s3://") else get_file
            list(pool.map(lambda part: get(place, *part), self._parts(tree)))
        dist.barrier()


class BareChunks(Bare):
    """The bare loop with chunks of 512 by 1024 elements, as arrays that can be resharded have them.

    Eight chunks a file, each with its checksum. A load reads a chunk into a buffer that stays in
    the cache, checks it and copies its rows into the target: what any reader of such chunks has to
    do, without names, documents, plans or agreement.
    """

    def __init__(self) -> None:
        super().__init__(8)
        self.name = "bare loop of chunks, 8 MiB"
        self._buffers = threading.local()

    def _files(self, tree: Tree) -> list[tuple[str, list[np.ndarray]]]:
        """Names of files, and the views of local tensors that are their chunks."""
        chunks: list[np.ndarray] = []
        for tensors in tree.values():
            for tensor in tensors.values():
                local = tensor.to_local()
                size = {2: np.uint16, 4: np.uint32}[local.element_size()]
                values = local.view(torch.uint8).numpy().view(size)
                rows = values[:, None] if values.ndim == 1 else values
                chunks += [
                    rows[first : first + 512, start : start + 1024]
                    for first in range(0, rows.shape[0], 512)
                    for start in range(0, rows.shape[1], 1024)
                ]
        rank = dist.get_rank()
        return [(f"{rank}-{at}", chunks[at : at + 8]) for at in range(0, len(chunks), 8)]

    def save(self, place: str, tree: Tree) -> None:
        Path(place).mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda file: self._put(place, *file), self._files(tree)))
        dist.barrier()

    def load(self, place: str, tree: Tree) -> None:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda file: self._get(place, *file), self._files(tree)))
        dist.barrier()

    def _put(self, place: str, name: str, chunks: list[np.ndarray]) -> None:
        stored = [np.ascontiguousarray(chunk).reshape(-1).view(np.uint8) for chunk in chunks]
        parts = [
            part for each in stored for part in (each, np.frombuffer(checksum(each), np.uint8))
        ]
        put_file(place, name, np.concatenate(parts), os.fsync)

    def _get(self, place: str, name: str, chunks: list[np.ndarray]) -> None:
        if not hasattr(self._buffers, "own"):
            self._buffers.own = np.empty(512 * 1024 * 4 + 4, np.uint8)
        descriptor = os.open(f"{place}/{name}", os.O_RDONLY)
        try:
            start = 0
            for chunk in chunks:
                buffer = self._buffers.own[: chunk.nbytes + 4]
                if os.preadv(descriptor, [buffer.data], start) != buffer.size:
                    raise AssertionError(f"{name} is too short")
                values = buffer[:-4]
                if checksum(values) != buffer[-4:].tobytes():
                    raise AssertionError(f"{name} is damaged")
                chunk[...] = values.view(chunk.dtype).reshape(chunk.shape)
                start += buffer.size
        finally:
            os.close(descriptor)


def checksum(data: np.ndarray) -> bytes:
    """The crc32c of an array's bytes, as it is stored."""
    return int(google_crc32c.value(data)).to_bytes(4, "little")


def all_systems(url: str) -> list[System]:
    """Everything that takes part. DCP through s3fs gains nothing from threads, which it shares."""
    bare: list[System] = [Bare(4), Bare(8), Bare(16)]
    if url.startswith("s3://"):
        return [Ucpstore(), Dcp(1), *bare]
    return [Ucpstore(), Dcp(1), Dcp(4), *bare, Bare(8, together=True), BareChunks()]


def put_file(place: str, name: str, data: np.ndarray, end: Callable[[int], None]) -> str:
    """Write a file and its checksum, and `end` it; its path."""
    path = f"{place}/{name}"
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    try:
        written = 0
        while written < data.size:
            written += os.write(descriptor, data[written:].data)
        os.write(descriptor, google_crc32c.value(data).to_bytes(4, "little"))
        end(descriptor)
    finally:
        os.close(descriptor)
    return path


def get_file(place: str, name: str, data: np.ndarray) -> None:
    descriptor = os.open(f"{place}/{name}", os.O_RDONLY)
    try:
        found = 0
        while found < data.size:
            found += os.preadv(descriptor, [data[found:].data], found)
        expected = int.from_bytes(os.pread(descriptor, 4, data.size), "little")
    finally:
        os.close(descriptor)
    if google_crc32c.value(data) != expected:
        raise AssertionError(f"{name} is damaged")


def put_object(place: str, name: str, data: np.ndarray) -> None:
    import obstore

    store, prefix = client(place)
    google_crc32c.value(data)
    obstore.put(store, f"{prefix}/{name}", data.data, use_multipart=False)


def get_object(place: str, name: str, data: np.ndarray) -> None:
    import obstore

    store, prefix = client(place)
    found = np.frombuffer(obstore.get(store, f"{prefix}/{name}").bytes(), np.uint8)
    google_crc32c.value(found)
    data[...] = found


_clients: dict[str, object] = {}


def client(place: str) -> tuple[object, str]:
    """An obstore client of the bucket, made once, and the prefix."""
    from obstore.store import S3Store

    bucket, _, prefix = place.removeprefix("s3://").partition("/")
    if bucket not in _clients:
        _clients[bucket] = S3Store(
            bucket,
            endpoint=os.environ["AWS_ENDPOINT_URL"],
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )
    return _clients[bucket], prefix


def timed(action: object) -> float:
    """Seconds from a barrier until the slowest rank has returned."""
    assert callable(action)
    dist.barrier()
    start = time.perf_counter()
    action()
    elapsed = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return float(elapsed)
