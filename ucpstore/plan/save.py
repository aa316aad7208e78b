"""Plans of saves: what every rank writes, sends and receives. Pure, and equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ucpstore.dtypes import itemsize as dtype_itemsize
from ucpstore.geometry import Box, GlobalArray, Grid, Index, Layout
from ucpstore.options import Options
from ucpstore.plan.owners import (
    Owners,
    assign_metadata,
    assign_owners,
    assign_senders,
)
from ucpstore.plan.parts import Overlay, overlay_of
from ucpstore.plan.rounds import SharedObject, pack_rounds

ROUND_SHARE = 4
"""A round of the exchange may use the budget divided by this."""


@dataclass(frozen=True, slots=True)
class ObjectWrite:
    """One object that the rank owns and the global boxes that it fills from its own memory.

    `array` is a position in the plan's arrays. The boxes are disjoint.
    """

    array: int
    index: Index
    own: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """A global box of one shared object, sent to the object's owner."""

    array: int
    index: Index
    box: Box


@dataclass(frozen=True, slots=True)
class Message:
    """All transfers between two ranks in one round, in the same order on both."""

    peer: int
    transfers: tuple[Transfer, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """One step of the exchange for one rank; messages by rising peer.

    `writes` are the shared objects that the rank owns and that are complete after this round.
    """

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    writes: tuple[ObjectWrite, ...]


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The part of one rank.

    `writes` need no exchange. `rounds` has the same length on all ranks. `metadata` are the arrays
    whose own metadata the rank writes.
    """

    writes: tuple[ObjectWrite, ...]
    rounds: tuple[Round, ...]
    metadata: Index


class PlannedArray(NamedTuple):
    """An array and its grid."""

    array: GlobalArray
    grid: Grid


@dataclass(frozen=True, slots=True, eq=False)
class SavePlan:
    """What all ranks do, as assignments; `rank` spells out the part of one."""

    arrays: tuple[PlannedArray, ...]
    size: int
    _overlays: tuple[Overlay, ...]
    _owners: tuple[Owners, ...]
    _metadata: Index
    _shared: tuple[SharedObject, ...]
    _rounds: Index
    _latest: dict[int, RankPlan] = field(default_factory=dict, init=False, repr=False)

    @property
    def objects(self) -> int:
        """Number of objects of all arrays."""
        return sum(len(overlay.stored_bytes) for overlay in self._overlays)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all objects without compression."""
        return sum(int(overlay.stored_bytes.sum()) for overlay in self._overlays)

    @property
    def real_bytes(self) -> int:
        """Bytes of all elements."""
        return sum(
            Box.whole(array.shape).size * overlay.itemsize
            for (array, _), overlay in zip(self.arrays, self._overlays, strict=True)
        )

    @property
    def exchanged_bytes(self) -> int:
        """Bytes that ranks send to other ranks."""
        return sum(
            shared.senders.total_bytes - shared.senders.bytes_of(shared.owner)
            for shared in self._shared
        )

    @property
    def rounds(self) -> int:
        """Number of rounds of the exchange, the same on all ranks."""
        return max(self._rounds, default=-1) + 1

    def itemsize(self, array: int) -> int:
        """Bytes per element of the array at that position."""
        return self._overlays[array].itemsize

    def object_bytes(self, write: ObjectWrite) -> int:
        """Bytes of an object without compression."""
        return self.arrays[write.array].grid.object_bytes(write.index, self.itemsize(write.array))

    def owners(self, array: int) -> Index:
        """The owner of each object of the array at that position, in row-major order."""
        return tuple(self._owners[array].tolist())

    def written_bytes(self) -> Index:
        """Bytes of the objects that each rank owns."""
        written = np.zeros(self.size, np.int64)
        for overlay, owners in zip(self._overlays, self._owners, strict=True):
            np.add.at(written, owners, overlay.stored_bytes)
        return tuple(written.tolist())

    def rank(self, rank: int) -> RankPlan:
        """The part of one rank. The latest one is kept: a process asks for its own at each save."""
        part = self._latest.get(rank)
        if part is None:
            part = RankPlan(
                tuple(self._own_writes(rank)),
                tuple(self._rank_rounds(rank)),
                tuple(n for n, writer in enumerate(self._metadata) if writer == rank),
            )
            self._latest.clear()
            self._latest[rank] = part
        return part

    def _own_writes(self, rank: int) -> Iterable[ObjectWrite]:
        for number, (overlay, owners) in enumerate(zip(self._overlays, self._owners, strict=True)):
            for position in ((owners == rank) & ~overlay.shared).nonzero()[0].tolist():
                own = tuple(overlay.box(position, part) for part in overlay.parts_of(position))
                yield ObjectWrite(number, overlay.index(position), own)

    def _rank_rounds(self, rank: int) -> Iterable[Round]:
        members: list[list[SharedObject]] = [[] for _ in range(self.rounds)]
        for shared, number in zip(self._shared, self._rounds, strict=True):
            if shared.owner == rank or shared.senders.number(rank) is not None:
                members[number].append(shared)
        return (self._rank_round(rank, objects) for objects in members)

    def _rank_round(self, rank: int, objects: Sequence[SharedObject]) -> Round:
        sends: dict[int, list[Transfer]] = {}
        receives: dict[int, list[Transfer]] = {}
        writes = []
        for shared in objects:
            if shared.owner == rank:
                own: list[Transfer] = []
                for sender in shared.senders.ranks.tolist():
                    into = own if sender == rank else receives.setdefault(sender, [])
                    into.extend(self._transfers(shared, sender))
                index = self._overlays[shared.array].index(shared.number)
                writes.append(ObjectWrite(shared.array, index, tuple(t.box for t in own)))
            else:
                sends.setdefault(shared.owner, []).extend(self._transfers(shared, rank))
        return Round(_messages(sends), _messages(receives), tuple(writes))

    def _transfers(self, shared: SharedObject, sender: int) -> Iterable[Transfer]:
        overlay = self._overlays[shared.array]
        for part in shared.senders.parts_of(sender):
            yield Transfer(
                shared.array, overlay.index(shared.number), overlay.box(shared.number, part)
            )


def _messages(transfers: dict[int, list[Transfer]]) -> tuple[Message, ...]:
    return tuple(Message(peer, tuple(transfers[peer])) for peer in sorted(transfers))


def plan_save(arrays: Sequence[GlobalArray], size: int, options: Options) -> SavePlan:
    """Plan the save of `arrays` by `size` ranks.

    Every rank gets the same plan from the same arguments: nothing else goes into it.
    """
    made: dict[tuple[Layout, int, bool], Overlay] = {}
    overlays = []
    for array in arrays:
        layout, itemsize = array.layout, dtype_itemsize(array.dtype)
        key = (layout, itemsize, array.mean)
        if key not in made:
            made[key] = overlay_of(layout, itemsize, options, mean=array.mean)
        overlays.append(made[key])
    owners, loads = assign_owners(overlays, size)
    shared = _share(overlays, owners, size)
    return SavePlan(
        tuple(PlannedArray(a, c.grid) for a, c in zip(arrays, overlays, strict=True)),
        size,
        tuple(overlays),
        tuple(owners),
        tuple(assign_metadata(owners, loads)),
        shared,
        tuple(pack_rounds(shared, size, options.budget_bytes // ROUND_SHARE)),
    )


def _share(
    overlays: Sequence[Overlay], owners: Sequence[Owners], size: int
) -> tuple[SharedObject, ...]:
    sent = [0] * size
    shared = []
    for array, (overlay, own) in enumerate(zip(overlays, owners, strict=True)):
        for number in overlay.shared.nonzero()[0].tolist():
            owner = int(own[number])
            senders = assign_senders(overlay, number, owner, sent)
            size_bytes = int(overlay.stored_bytes[number])
            shared.append(SharedObject(array, number, size_bytes, owner, senders))
    return tuple(shared)
