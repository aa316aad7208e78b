"""Put a rank's objects into the store: encode from tensors, exchange what is shared, write.

Objects that this rank fills alone are encoded and written by worker threads while the calling
thread goes through the exchange rounds, which every rank enters in the same order.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain

import numpy as np

from ucpstore.arrays.chain import Encoder, buffer_bytes, encoder
from ucpstore.arrays.raw import RawArray, copy_raw, part, raw_dtype
from ucpstore.crew import Crew
from ucpstore.describe import LocalArray
from ucpstore.dtypes import itemsize, to_torch
from ucpstore.exchange import Exchanger
from ucpstore.format.documents import canonical
from ucpstore.geometry import Box
from ucpstore.options import Options
from ucpstore.plan import Message, ObjectWrite, RankPlan, Round, SavePlan, Transfer
from ucpstore.saving.means import Sum
from ucpstore.staging import BufferPool, Bytes, pool_for, read_parts
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
    rank: int,
    exchanger: Callable[[], Exchanger],
    options: Options,
    done: Callable[[ObjectWrite], None] | None = None,
) -> Written:
    """Write all objects of one rank's part of a plan below `prefix`.

    `local` are the arrays of `rank` by path; `exchanger` is called where the plan has an exchange.
    `done` is told each object that was put, from several threads; what it raises ends the write.
    """
    return _Writer(storage, prefix, plan, local, rank, options, done).run(rank_plan, exchanger)


_Received = tuple[int, Box, RawArray]
"""Whose values they are, of which part of the global array, and the values."""


class _Writer:
    """Writes the objects of one rank of one save; used once."""

    def __init__(
        self,
        storage: Storage,
        prefix: str,
        plan: SavePlan,
        local: Mapping[str, LocalArray],
        rank: int,
        options: Options,
        done: Callable[[ObjectWrite], None] | None,
    ) -> None:
        self._storage = storage
        self._prefix = prefix
        self._plan = plan
        self._local = local
        self._rank = rank
        self._done = done
        self._threads = options.threads or storage.requests
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
        with Crew(self._threads, "ucpstore-write") as own:
            try:
                for each in rank_plan.writes:
                    size = self._buffer_bytes(each)
                    own.submit(self._guard, self._write_own, each, size=size)
                if rank_plan.rounds:
                    self._exchange(rank_plan.rounds, exchanger())
                own.wait()
            except BaseException as error:
                self._fail(error)
        if self._failed is not None:
            raise self._failed
        return Written(self._objects, self._bytes, self._exchanged)

    def _write_own(self, write: ObjectWrite) -> None:
        with self._pool.take(self._buffer_bytes(write)) as buffer:
            made = self._encoder(write, buffer)
            self._fill_own(made, write)
            self._put(write, made)

    def _exchange(self, rounds: Sequence[Round], exchanger: Exchanger) -> None:
        # A pool of their own: these hold buffers when they are handed over, and must not queue
        # behind tasks that wait for buffers.
        with Crew(2, "ucpstore-shared") as shared:
            for each in rounds:
                sends = {message.peer: self._pack(message) for message in each.sends}
                receives = {
                    message.peer: np.empty(self._message_bytes(message), np.uint8)
                    for message in each.receives
                }
                exchanger.exchange(sends, receives)
                self._exchanged += sum(buffer.size for buffer in sends.values())
                self._finish_round(each, receives, shared)
            shared.wait()

    def _finish_round(self, each: Round, receives: Mapping[int, Bytes], shared: Crew) -> None:
        received = self._unpack(each.receives, receives)
        for write in each.writes:
            if self._failed is not None:
                break
            size = self._buffer_bytes(write)
            buffer = self._pool.acquire(size)
            try:
                made = self._encoder(write, buffer[:size])
                parts = received.get((write.array, write.index), ())
                if self._plan.arrays[write.array].array.mean:
                    self._fill_means(made, write, parts)
                else:
                    self._fill_own(made, write)
                    for _, box, values in parts:
                        made.fill(box, values)
            except BaseException:
                self._pool.release(buffer)
                raise
            shared.submit(self._put_shared, write, made, buffer, size=size)

    def _put_shared(self, write: ObjectWrite, made: Encoder, buffer: Bytes) -> None:
        try:
            self._guard(self._put, write, made)
        finally:
            self._pool.release(buffer)

    def _pack(self, message: Message) -> Bytes:
        """The values of a message's transfers, one after the other, each in row-major order."""
        buffer = np.empty(self._message_bytes(message), np.uint8)
        start = 0
        for transfer in message.transfers:
            size = self._transfer_bytes(transfer)
            target = self._raw_view(buffer[start : start + size], transfer)
            for box, values in self._own_values(transfer.array, transfer.box):
                copy_raw(part(target, box.relative_to(transfer.box.offset)), values)
            start += size
        return buffer

    def _unpack(
        self, messages: Sequence[Message], buffers: Mapping[int, Bytes]
    ) -> dict[tuple[int, tuple[int, ...]], list[_Received]]:
        received: dict[tuple[int, tuple[int, ...]], list[_Received]] = {}
        for message in messages:
            start = 0
            for transfer in message.transfers:
                size = self._transfer_bytes(transfer)
                view = self._raw_view(buffers[message.peer][start : start + size], transfer)
                received.setdefault((transfer.array, transfer.index), []).append(
                    (message.peer, transfer.box, view)
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

    def _fill_own(self, made: Encoder, write: ObjectWrite) -> None:
        for region in write.own:
            for box, values in self._own_values(write.array, region):
                made.fill(box, values)

    def _fill_means(self, made: Encoder, write: ObjectWrite, received: Sequence[_Received]) -> None:
        """Fill each part with the mean of what its holders have, in the order of the ranks."""
        by_box: dict[Box, dict[int, RawArray | None]] = {
            box: {self._rank: None} for box in write.own
        }
        for peer, box, values in received:
            by_box.setdefault(box, {})[peer] = values
        dtype = self._plan.arrays[write.array].array.dtype
        for box, held in by_box.items():
            total = Sum(box, dtype)
            for _, given in sorted(held.items(), key=lambda each: each[0]):
                own = self._own_values(write.array, box) if given is None else [(box, given)]
                for inner, values in own:
                    total.add(inner, values)
            made.fill(box, total.mean(len(held)))

    def _own_values(self, number: int, region: Box) -> Iterator[tuple[Box, RawArray]]:
        """What this rank holds of a region of an array, in the dtype in which it is stored."""
        array = self._plan.arrays[number].array
        local = self._local[array.path]
        dtype = to_torch(array.dtype)
        return chain.from_iterable(
            read_parts(view.tensor, view.pieces, region, dtype) for view in local.views
        )

    def _put(self, write: ObjectWrite, made: Encoder) -> None:
        data = made.finish()
        self._storage.put(f"{self._prefix}/{self._key(write)}", data)
        with self._lock:
            self._objects += 1
            self._bytes += data.nbytes
        if self._done is not None:
            self._done(write)

    def _buffer_bytes(self, write: ObjectWrite) -> int:
        array, grid = self._plan.arrays[write.array]
        return buffer_bytes(grid, write.index, array.dtype, array.codec)

    def _encoder(self, write: ObjectWrite, buffer: Bytes) -> Encoder:
        array, grid = self._plan.arrays[write.array]
        return encoder(buffer, grid, write.index, array.dtype, array.codec)

    def _key(self, write: ObjectWrite) -> str:
        array, grid = self._plan.arrays[write.array]
        return f"{array.path}/{grid.key(write.index)}"

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
