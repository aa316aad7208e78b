"""Exchange rounds: shared objects packed under a byte budget per rank, the same on all ranks.

Objects are taken in global order, and lie in global order within a round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ucpstore.plan.parts import CutObject

OPEN_ROUNDS = 16
"""How many rounds may be filled at a time: in strict order one busy owner would end each early."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedObject:
    """One object that several ranks fill; `senders` is {rank: part numbers}, the owner's too."""

    array: int
    item: CutObject
    itemsize: int
    owner: int
    senders: Mapping[int, tuple[int, ...]]

    def sent_bytes(self, rank: int) -> int:
        """Bytes that the parts of `rank` have."""
        return self.itemsize * sum(self.item.parts[n].box.size for n in self.senders[rank])


@dataclass(frozen=True, slots=True, eq=False)
class _Traffic:
    """The ranks that fill one object and the bytes of each, the owner's own included."""

    ranks: npt.NDArray[np.int64]
    sent: npt.NDArray[np.int64]
    total: int


def pack_rounds(objects: Sequence[SharedObject], size: int, budget_bytes: int) -> list[int]:
    """The round of each object: the first of the latest `OPEN_ROUNDS` that has room for it.

    In a round, no rank sends, receives and owns buffers of more than `budget_bytes` together.
    Where that is less than 3/2 of what the largest object needs, these 3/2 are the limit: an owner
    with room for nothing else could not send to other owners, and they would take turns.
    """
    traffic: dict[int, _Traffic] = {}
    for shared in objects:
        # Objects of arrays that are cut alike have the very same senders, where there is no choice.
        if id(shared.senders) not in traffic:
            traffic[id(shared.senders)] = _traffic(shared)
    needs = [_need(shared, traffic[id(shared.senders)]) for shared in objects]
    limit = max(budget_bytes, max(needs, default=0) * 3 // 2)
    rounds: list[int] = []
    used: list[npt.NDArray[np.int64]] = []
    for shared, need in zip(objects, needs, strict=True):
        flow = traffic[id(shared.senders)]
        for number in range(max(0, len(used) - OPEN_ROUNDS), len(used)):
            load = used[number]
            if load[shared.owner] + need <= limit and (load[flow.ranks] + flow.sent).max() <= limit:
                break
        else:
            number = len(used)
            used.append(np.zeros(size, dtype=np.int64))
        used[number][flow.ranks] += flow.sent
        used[number][shared.owner] += need - _kept(shared)
        rounds.append(number)
    return rounds


def _traffic(shared: SharedObject) -> _Traffic:
    ranks = sorted(shared.senders)
    sent = [shared.sent_bytes(rank) for rank in ranks]
    return _Traffic(np.array(ranks, dtype=np.int64), np.array(sent, dtype=np.int64), sum(sent))


def _kept(shared: SharedObject) -> int:
    """Bytes that the owner takes from its own memory."""
    return shared.sent_bytes(shared.owner) if shared.owner in shared.senders else 0


def _need(shared: SharedObject, flow: _Traffic) -> int:
    """Bytes that the owner receives, and those of its buffer."""
    return flow.total - _kept(shared) + shared.item.stored_bytes
