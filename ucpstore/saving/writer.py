"""Put a rank's objects into the store: encode from tensors, exchange what is shared, write.

Objects that this rank fills alone are encoded and written by worker threads while the calling
thread goes through the exchange rounds, which every rank enters in the same order.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from ucpstore.arrays.packed import ObjectEncoder
from ucpstore.arrays.raw import RawArray, copy_raw, part, raw_dtype
from ucpstore.describe import LocalArray
from ucpstore.dtypes import itemsize
from ucpstore.exchange import Exchanger
from ucpstore.format.documents import canonical
from ucpstore.geometry import Box, Grid
from ucpstore.options import Options
from ucpstore.plan import Message, ObjectWrite, RankPlan, Round, SavePlan, Transfer
from ucpstore.staging import BufferPool, Bytes, parts, pool_for, read_local
from ucpstore.storage import Storage

_Json = bytes  # Written has a field named bytes


@dataclass(frozen=True, slots=True)
class Written:
    """What one rank put into the store, objects and their bytes, and bytes it sent to others."""

    objects: int
    bytes: int
    exchanged_bytes: int

    def __add__(self, other: Written) -> Written:
        return Written(
            self.objects + other.objects,
            self.bytes + other.bytes,
            self.exchanged_bytes + other.exchanged_bytes,
        )

    def to_bytes(self) -> _Json:
        return canonical(asdict(self))

    @classmethod
    def from_bytes(cls, data: _Json) -> Written:
        return cls(**json.loads(data))


def write_objects(
    storage: Storage,
    prefix: str,
    plan: SavePlan,
    rank_plan: RankPlan,
    local: Mapping[str, LocalArray],
    exchanger: Callable[[], Exchanger],
    options: Options,
) -> Written:
    """Write all objects of one rank's part of a plan below `prefix`.

    `local` are the rank's arrays by path; `exchanger` is called where the plan has an exchange.
    """
    return _Writer(storage, prefix, plan, local, options).run(rank_plan, exchanger)


class _Writer:
    """Writes the objects of one rank of one save; used once."""

    def __init__(
        self,
        storage: Storage,
        prefix: str,
        plan: SavePlan,
        local: Mapping[str, LocalArray],
        options: Options,
    ) -> None:
        self._storage = storage
        self._prefix = prefix
        self._plan = plan
        self._local = local
        self._threads = options.threads
        self._pool: BufferPool = pool_for(options.budget_bytes)
        self._lock = threading.Lock()
        self._failed: BaseException | None = None
        self._objects = 0
        self._bytes = 0
        self._exchanged = 0

    def run(self, rank_plan: RankPlan, exchanger: Callable[[], Exchanger]) -> Written:
        """Write everything that `rank_plan` asks for.

        An object that cannot be put does not end the exchange, so that no other rank waits for this
        one. Raises the first error once all that was begun is over.
        """
        with ThreadPoolExecutor(self._threads, "ucpstore-write") as own:
            futures = [own.submit(self._guard, self._write_own, each) for each in rank_plan.writes]
            try:
                if rank_plan.rounds:
                    self._exchange(rank_plan.rounds, exchanger())
            except BaseException as error:
                self._fail(error)
            _drain(futures, self._fail)
        if self._failed is not None:
            raise self._failed
        return Written(self._objects, self._bytes, self._exchanged)

    def _write_own(self, write: ObjectWrite) -> None:
        grid, dtype, path = self._facts(write.array)
        with self._pool.take(grid.object_bytes(write.index, itemsize(dtype))) as buffer:
            encoder = ObjectEncoder(buffer, grid, write.index, dtype)
            self._fill_own(encoder, path, write.own)
            self._put(f"{path}/{grid.key(write.index)}", encoder)

    def _exchange(self, rounds: Sequence[Round], exchanger: Exchanger) -> None:
        # A pool of their own: these hold buffers when they are handed over, and must not queue
        # behind tasks that wait for buffers.
        with ThreadPoolExecutor(2, "ucpstore-shared") as shared:
            futures: list[Future[None]] = []
            try:
                for each in rounds:
                    sends = {message.peer: self._pack(message) for message in each.sends}
                    receives = {
                        message.peer: np.empty(self._message_bytes(message), np.uint8)
                        for message in each.receives
                    }
                    exchanger.exchange(sends, receives)
                    self._exchanged += sum(buffer.size for buffer in sends.values())
                    futures.extend(self._finish_round(each, receives, shared))
            finally:
                _drain(futures, self._fail)

    def _finish_round(
        self, each: Round, receives: Mapping[int, Bytes], shared: ThreadPoolExecutor
    ) -> list[Future[None]]:
        received = self._unpack(each.receives, receives)
        futures = []
        for write in each.writes:
            if self._failed is not None:
                break
            grid, dtype, path = self._facts(write.array)
            size = grid.object_bytes(write.index, itemsize(dtype))
            buffer = self._pool.acquire(size)
            try:
                encoder = ObjectEncoder(buffer[:size], grid, write.index, dtype)
                self._fill_own(encoder, path, write.own)
                for box, values in received.get((write.array, write.index), ()):
                    encoder.fill(box, values)
                key = f"{path}/{grid.key(write.index)}"
                future = shared.submit(self._guard, self._put, key, encoder)
            except BaseException:
                self._pool.release(buffer)
                raise
            future.add_done_callback(partial(self._give_back, buffer))
            futures.append(future)
        return futures

    def _give_back(self, buffer: Bytes, _: Future[None]) -> None:
        self._pool.release(buffer)

    def _pack(self, message: Message) -> Bytes:
        """The values of a message's transfers, one after the other, each in row-major order."""
        buffer = np.empty(self._message_bytes(message), np.uint8)
        start = 0
        for transfer in message.transfers:
            size = self._transfer_bytes(transfer)
            target = self._raw_view(buffer[start : start + size], transfer)
            local = self._local[self._plan.arrays[transfer.array].array.path]
            for piece in parts(local.pieces, transfer.box):
                inside = piece.box.relative_to(transfer.box.offset)
                copy_raw(part(target, inside), read_local(local.tensor, piece.local))
            start += size
        return buffer

    def _unpack(
        self, messages: Sequence[Message], buffers: Mapping[int, Bytes]
    ) -> dict[tuple[int, tuple[int, ...]], list[tuple[Box, RawArray]]]:
        received: dict[tuple[int, tuple[int, ...]], list[tuple[Box, RawArray]]] = {}
        for message in messages:
            start = 0
            for transfer in message.transfers:
                size = self._transfer_bytes(transfer)
                view = self._raw_view(buffers[message.peer][start : start + size], transfer)
                received.setdefault((transfer.array, transfer.index), []).append(
                    (transfer.box, view)
                )
                start += size
        return received

    def _raw_view(self, buffer: Bytes, transfer: Transfer) -> RawArray:
        dtype = self._plan.arrays[transfer.array].array.dtype
        return buffer.view(raw_dtype(itemsize(dtype))).reshape(transfer.box.shape)

    def _transfer_bytes(self, transfer: Transfer) -> int:
        return transfer.box.size * itemsize(self._plan.arrays[transfer.array].array.dtype)

    def _message_bytes(self, message: Message) -> int:
        return sum(self._transfer_bytes(transfer) for transfer in message.transfers)

    def _fill_own(self, encoder: ObjectEncoder, path: str, boxes: Sequence[Box]) -> None:
        local = self._local.get(path)
        for box in boxes:
            assert local is not None
            for piece in parts(local.pieces, box):
                encoder.fill(piece.box, read_local(local.tensor, piece.local))

    def _put(self, key: str, encoder: ObjectEncoder) -> None:
        data = encoder.finish()
        self._storage.put(f"{self._prefix}/{key}", data)
        with self._lock:
            self._objects += 1
            self._bytes += data.nbytes

    def _facts(self, array: int) -> tuple[Grid, str, str]:
        planned = self._plan.arrays[array]
        return planned.grid, planned.array.dtype, planned.array.path

    def _guard(self, action: Callable[..., None], *arguments: object) -> None:
        """Run a task unless another has failed, and remember its failure."""
        if self._failed is None:
            try:
                action(*arguments)
            except BaseException as error:
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._failed is None:
                self._failed = error


def _drain(futures: Sequence[Future[None]], fail: Callable[[BaseException], None]) -> None:
    """Wait for all; an interrupt is remembered and the rest still waited for."""
    for future in futures:
        try:
            future.result()
        except BaseException as error:
            fail(error)
            future.exception()
