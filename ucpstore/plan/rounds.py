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


def pack_rounds(objects: Sequence[SharedObject], size: int, budget_bytes: int) -> list[int]:
    """The round of each object: the first of the latest `OPEN_ROUNDS` that has room for it.

    In a round, no rank sends, receives and owns buffers of more than `budget_bytes` together, save
    that a round may have one object of any size.
    """
    rounds: list[int] = []
    used: list[npt.NDArray[np.int64]] = []
    traffic: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}
    for shared in objects:
        # Objects of arrays that are cut alike have the very same senders, where there is no choice.
        if id(shared.senders) not in traffic:
            traffic[id(shared.senders)] = _traffic(shared)
        ranks, sent = traffic[id(shared.senders)]
        kept = shared.sent_bytes(shared.owner) if shared.owner in shared.senders else 0
        received = int(sent.sum()) - kept
        for number in range(max(0, len(used) - OPEN_ROUNDS), len(used)):
            load = used[number]
            if load[shared.owner] + received + shared.item.stored_bytes > budget_bytes:
                continue
            if (load[ranks] + sent).max() <= budget_bytes:
                break
        else:
            number = len(used)
            used.append(np.zeros(size, dtype=np.int64))
        used[number][ranks] += sent
        used[number][shared.owner] += received + shared.item.stored_bytes - kept
        if used[number].max() > budget_bytes:
            used[number][:] = budget_bytes + 1  # one object that is over by itself stays alone
        rounds.append(number)
    return rounds


def _traffic(shared: SharedObject) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    ranks = sorted(shared.senders)
    return (
        np.array(ranks, dtype=np.int64),
        np.array([shared.sent_bytes(rank) for rank in ranks], dtype=np.int64),
    )
