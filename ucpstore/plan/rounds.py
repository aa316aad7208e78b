"""Exchange rounds: shared objects in global order, packed under a byte budget per rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ucpstore.plan.parts import CutObject


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


def pack_rounds(objects: Sequence[SharedObject], size: int, budget_bytes: int) -> list[int]:
    """The round of each object, rising.

    In a round, no rank sends, receives and owns buffers of more than `budget_bytes` together, save
    that a round always has one object.
    """
    rounds: list[int] = []
    current = 0
    used = np.zeros(size, dtype=np.int64)
    traffic: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}
    for shared in objects:
        # Objects of arrays that are cut alike have the very same senders, where there is no choice.
        if id(shared.senders) not in traffic:
            traffic[id(shared.senders)] = _traffic(shared)
        ranks, sent = traffic[id(shared.senders)]
        kept = shared.sent_bytes(shared.owner) if shared.owner in shared.senders else 0
        own = int(sent.sum()) - 2 * kept + shared.item.stored_bytes
        used[ranks] += sent
        used[shared.owner] += own
        over = used[ranks].max() > budget_bytes or used[shared.owner] > budget_bytes
        if over and rounds and rounds[-1] == current:
            current += 1
            used[:] = 0
            used[ranks] += sent
            used[shared.owner] += own
        rounds.append(current)
    return rounds


def _traffic(shared: SharedObject) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    ranks = sorted(shared.senders)
    return (
        np.array(ranks, dtype=np.int64),
        np.array([shared.sent_bytes(rank) for rank in ranks], dtype=np.int64),
    )
