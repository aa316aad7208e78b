"""Exchange rounds: shared objects packed under a byte budget per rank, the same on all ranks.

Objects are taken in global order, and lie in global order within a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ucpstore.plan.parts import Senders

OPEN_ROUNDS = 16
"""How many rounds may be filled at a time: in strict order one busy owner would end each early."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedObject:
    """One object that several ranks fill: its array and number, its bytes when stored, its owner.

    Objects of arrays that are cut alike have the very same senders, where there is no choice.
    """

    array: int
    number: int
    stored_bytes: int
    owner: int
    senders: Senders

    @property
    def needed_bytes(self) -> int:
        """Bytes that the owner receives, and those of its buffer."""
        senders = self.senders
        return senders.total_bytes - senders.bytes_of(self.owner) + self.stored_bytes


def pack_rounds(objects: Sequence[SharedObject], size: int, budget_bytes: int) -> list[int]:
    """The round of each object: the first of the latest `OPEN_ROUNDS` that has room for it.

    In a round, no rank sends, receives and owns buffers of more than `budget_bytes` together.
    Where that is less than 3/2 of what the largest object needs, these 3/2 are the limit: an owner
    with room for nothing else could not send to other owners, and they would take turns.
    """
    needs = [shared.needed_bytes for shared in objects]
    limit = max(budget_bytes, max(needs, default=0) * 3 // 2)
    rounds: list[int] = []
    used: list[npt.NDArray[np.int64]] = []
    for shared, need in zip(objects, needs, strict=True):
        senders = shared.senders
        for number in range(max(0, len(used) - OPEN_ROUNDS), len(used)):
            load = used[number]
            if (
                load[shared.owner] + need <= limit
                and (load[senders.ranks] + senders.sent_bytes).max() <= limit
            ):
                break
        else:
            number = len(used)
            used.append(np.zeros(size, dtype=np.int64))
        used[number][senders.ranks] += senders.sent_bytes
        used[number][shared.owner] += need - senders.bytes_of(shared.owner)
        rounds.append(number)
    return rounds
