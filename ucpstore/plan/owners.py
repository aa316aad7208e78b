"""Who writes each object and who sends each part: the least loaded of those that can.

All ranks compute the same answer: loads are integers, the order is fixed, ties go to the lowest
rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ucpstore.geometry import Index
from ucpstore.plan.parts import NOBODY, Cut, CutObject

REQUEST_COST_BYTES = 256 * 1024
"""Counted per object beside its bytes: else one rank with a little less data than the others would
write all small arrays, each with a request and a sync of its own."""

Owners = npt.NDArray[np.int32]
"""The owner of each object of one array, in row-major order."""


class LeastLoaded:
    """Loads of ranks, and which of a set of ranks bears the least."""

    def __init__(self, loads: Sequence[int]) -> None:
        self._loads = list(loads)
        self._heaps: dict[Index, list[tuple[int, int]]] = {}

    @property
    def loads(self) -> Index:
        """The load of every rank."""
        return tuple(self._loads)

    def add(self, rank: int, load: int) -> None:
        """Give the rank more load; loads never shrink."""
        self._loads[rank] += load

    def pick(self, ranks: Index) -> int:
        """The least loaded of `ranks`, the lowest rank among equals."""
        heap = self._heaps.get(ranks)
        if heap is None:
            heap = self._heaps[ranks] = [(self._loads[rank], rank) for rank in ranks]
            heapq.heapify(heap)
        # Entries may be out of date, but only too low: one that is up to date and on top is least.
        while heap[0][0] != self._loads[heap[0][1]]:
            rank = heap[0][1]
            heapq.heapreplace(heap, (self._loads[rank], rank))
        return heap[0][1]


def assign_owners(cuts: Sequence[Cut], size: int) -> tuple[list[Owners], LeastLoaded]:
    """The owners of the objects of every array, one entry of `cuts` each, and the ranks' loads.

    Objects without a choice count first; the others follow from large to small.
    """
    loads = np.zeros(size, dtype=np.int64)
    owners: list[Owners] = []
    choices: list[tuple[int, int, int]] = []
    for number, cut in enumerate(cuts):
        costs = np.array([_cost(item) for item in cut.objects], dtype=np.int64)
        fixed = cut.settled != NOBODY
        np.add.at(loads, cut.settled[fixed], costs[fixed])
        owners.append(cut.settled.copy() if cut.open_objects else cut.settled)
        choices.extend((-_cost(cut.objects[o]), number, o) for o in cut.open_objects)
    ranks = LeastLoaded(loads.tolist())
    for cost, number, position in sorted(choices):
        owner = ranks.pick(cuts[number].objects[position].candidates)
        owners[number][position] = owner
        ranks.add(owner, -cost)
    return owners, ranks


def _cost(item: CutObject) -> int:
    return item.stored_bytes + REQUEST_COST_BYTES


def assign_metadata(owners: Sequence[Owners], ranks: LeastLoaded) -> list[int]:
    """The rank that writes each array's metadata: the owner of its first object.

    An array without objects goes to the least loaded rank.
    """
    everyone = tuple(range(len(ranks.loads)))
    writers = []
    for own in owners:
        if own.size:
            writers.append(int(own[0]))
            continue
        writers.append(ranks.pick(everyone))
        ranks.add(writers[-1], REQUEST_COST_BYTES)
    return writers


def assign_senders(
    item: CutObject, itemsize: int, owner: int, sent: LeastLoaded
) -> dict[int, tuple[int, ...]]:
    """{rank: part numbers} of a shared object, every part once.

    The owner takes from its own memory what it holds; the rest comes from the holder that has been
    given the least to send, in bytes, where there was a choice.
    """
    if item.sole_senders is not None:
        return item.sole_senders
    senders: dict[int, list[int]] = {}
    for number, part in enumerate(item.parts):
        holders = part.block.ranks
        if owner in holders:
            sender = owner
        else:
            sender = holders[0] if len(holders) == 1 else sent.pick(holders)
            sent.add(sender, part.box.size * itemsize)
        senders.setdefault(sender, []).append(number)
    return {rank: tuple(numbers) for rank, numbers in senders.items()}
