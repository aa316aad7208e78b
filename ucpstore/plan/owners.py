"""Who writes each object and who sends each part: the least loaded of those that can.

All ranks compute the same answer: loads are integers, the order is fixed, ties go to the lowest
rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ucpstore.geometry import Index, Numbers
from ucpstore.plan.parts import NOBODY, Overlay, Senders

REQUEST_COST_BYTES = 256 * 1024
"""Counted per object beside its bytes: else one rank with a little less data than the others would
write all small arrays, each with a request and a sync of its own."""

Owners = npt.NDArray[np.int32]
"""The owner of each object of one array, in row-major order."""


class LeastLoaded:
    """Loads of ranks, and which of a set of ranks bears the least."""

    def __init__(self, loads: npt.ArrayLike) -> None:
        self._loads = np.array(loads, dtype=np.int64)

    @property
    def loads(self) -> Index:
        """The load of every rank."""
        return tuple(self._loads.tolist())

    def add(self, rank: int, load: int) -> None:
        """Give the rank more load."""
        self._loads[rank] += load

    def pick(self, ranks: Numbers) -> int:
        """The least loaded of `ranks`, which rise: the lowest rank among equals."""
        return int(ranks[self._loads[ranks].argmin()])


def assign_owners(overlays: Sequence[Overlay], size: int) -> tuple[list[Owners], LeastLoaded]:
    """The owners of the objects of every array, one entry of `overlays` each, and the ranks' loads.

    Objects without a choice count first; the others follow from large to small.
    """
    loads = np.zeros(size, dtype=np.int64)
    owners: list[Owners] = []
    choices: list[tuple[int, int, int]] = []
    for number, overlay in enumerate(overlays):
        costs = overlay.stored_bytes + REQUEST_COST_BYTES
        fixed = overlay.settled != NOBODY
        np.add.at(loads, overlay.settled[fixed], costs[fixed])
        owners.append(overlay.settled.astype(np.int32))
        (free,) = np.nonzero(~fixed)
        choices.extend(
            (-cost, number, position)
            for cost, position in zip(costs[free].tolist(), free.tolist(), strict=True)
        )
    ranks = LeastLoaded(loads)
    for cost, number, position in sorted(choices):
        owner = ranks.pick(overlays[number].candidates(position))
        owners[number][position] = owner
        ranks.add(owner, -cost)
    return owners, ranks


def assign_metadata(owners: Sequence[Owners], ranks: LeastLoaded) -> list[int]:
    """The rank that writes each array's metadata: the owner of its first object.

    An array without objects goes to the least loaded rank.
    """
    everyone = np.arange(len(ranks.loads))
    writers = []
    for own in owners:
        if own.size:
            writers.append(int(own[0]))
            continue
        writers.append(ranks.pick(everyone))
        ranks.add(writers[-1], REQUEST_COST_BYTES)
    return writers


def assign_senders(overlay: Overlay, number: int, owner: int, sent: list[int]) -> Senders:
    """Who sends what of a shared object, every part once.

    The owner takes from its own memory what it holds; the rest comes from the holder that has been
    given the least to send, in bytes, where there was a choice. `sent` are the bytes that each rank
    has to send; it is changed.
    """
    sole = overlay.sole.get(number)
    if sole is not None:
        return sole
    parts = overlay.parts_of(number)
    sizes = (overlay.sizes[parts.start : parts.stop] * overlay.itemsize).tolist()
    senders: list[int] = []
    for part, size in zip(parts, sizes, strict=True):
        holders = overlay.blocks.holders(overlay.of_blocks[part]).tolist()
        if owner in holders:
            senders.append(owner)
            continue
        sender = min(holders, key=sent.__getitem__)
        sent[sender] += size
        senders.append(sender)
    return Senders.of(np.array(senders), np.array(sizes), parts.start)
