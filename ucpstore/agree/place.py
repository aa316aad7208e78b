"""Where a call's messages lie in the key-value store, and what both sides do with them.

How the ranks of a call meet: rank 0 draws an id and sets `current`; the others wait for an id they
have not taken part in and answer under it. Rank 0 removes `current` before it tells the outcome
of the first round, so an id that can be found has no outcome yet, and an id that a dead run left
is overtaken by the next: who answered under it joins the newer one.

Keys of round k of call `id`: `id/k/a<rank>` an answer, `id/k/n` the number of answers (failed ones
add `FAILED` too), `id/k/o` the outcome, `id/k/r` the number of ranks that have read it. A rank
deletes its own answer, the last reader the rest. `id/b<rank>` are heartbeats, and `id/m<rank>`
counts how often a rank has come to meet the others within rounds, `id/m` how often all have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ucpstore.agree import message
from ucpstore.agree.message import Failure, Message
from ucpstore.agree.text import ranks_text
from ucpstore.errors import OutcomeUnknownError, RankMissingError, UcpstoreError
from ucpstore.options import Options

if TYPE_CHECKING:
    from ucpstore.agree.group import Group

FAILED = 1 << 32
CURRENT = "current"

_ATTENDED_CALLS = 16


class Place:
    """One rank's place in a call: which call, which round, and whether it is over for the rank."""

    def __init__(self, group: Group, kind: str, options: Options) -> None:
        self.group = group
        self.store = group.store
        self.rank = group.rank
        self.size = group.size
        self.kind = kind
        self.options = options
        self.id = ""
        self.round = 0
        self.over = False
        self.exchanger = group.exchanger
        """The exchange that this call uses and its name, once all ranks are known to have it."""
        self.commits = True
        """What `Call.round` was told about the present round."""
        self.meetings = 0
        """How often this rank has come to meet others, over all rounds."""
        self._counted = ""

    @property
    def binding(self) -> bool:
        """Whether what rank 0 decides in the present round holds even where nobody is told."""
        return self.commits and self.round > 0

    def key(self, name: str) -> str:
        """The key of `name` in the present round."""
        return f"{self.id}/{self.round}/{name}"

    def beat_key(self, rank: int) -> str:
        """The key of a rank's heartbeat."""
        return f"{self.id}/b{rank}"

    def come(self) -> None:
        """Come to a meeting of all ranks."""
        self.meetings += 1
        self.store.add(f"{self.id}/m{self.rank}", 1)
        self.store.add(f"{self.id}/m", 1)

    def complete(self) -> bool:
        """Whether all ranks have come to the meeting that this rank is at."""
        return self._came("") >= self.size * self.meetings

    def absent(self) -> list[int]:
        """The ranks that have not come to it."""
        return [rank for rank in range(self.size) if self._came(rank) < self.meetings]

    def forget_meetings(self) -> None:
        """Remove what this rank left for the meetings of this call, at its end."""
        if self.meetings:
            self.store.delete([f"{self.id}/m{self.rank}"])
            if self.rank == 0:
                self.store.delete([f"{self.id}/m"])

    def _came(self, who: int | str) -> int:
        return int(self.store.get(f"{self.id}/m{who}") or 0)

    def attend(self, call_id: str) -> None:
        """Take part in a call from now on."""
        self.id = call_id
        self.group.attended.append(call_id)
        del self.group.attended[:-_ATTENDED_CALLS]
        self.group.heart.start(self.beat_key(self.rank), self.options.silence_timeout_s)

    def message(self, round_name: str, payload: bytes, failure: Failure | None) -> Message:
        """What this rank has to say in a round."""
        name = self.exchanger[0] if self.exchanger else ""
        return Message(self.kind, round_name, payload, name, failure)

    def answer(self, answer: Message) -> None:
        """Give this rank's answer, or replace it by a failure."""
        message.put(self.store, self.key(f"a{self.rank}"), answer)
        # Who gives up waiting replaces its answer: it failed, but was counted before.
        counted = self._counted == self.key("n")
        self._counted = self.key("n")
        self.store.add(self._counted, (not counted) + (FAILED if answer.failure else 0))

    def answered(self) -> tuple[int, int]:
        """How many of the other ranks have failed in the present round, and how many answered."""
        value = self.store.get(self.key("n"))
        return divmod(int(value) if value else 0, FAILED)

    def read(self) -> None:
        """Count this rank as a reader of the outcome; the last one removes the round."""
        if self.store.add(self.key("r"), 1) >= self.size:
            message.remove(self.store, self.key("o"))
            self.store.delete([self.key("n"), self.key("r")])

    def remove(self, call_id: str, rounds: int) -> None:
        """Remove every key of a call that nobody is in any more."""
        for number in range(rounds):
            start = f"{call_id}/{number}/"
            for rank in range(1, self.size):
                message.remove(self.store, f"{start}a{rank}")
            message.remove(self.store, f"{start}o")
            self.store.delete([f"{start}n", f"{start}r"])
        for kind in "bm":
            self.store.delete(f"{call_id}/{kind}{rank}" for rank in range(self.size))
        self.store.delete([f"{call_id}/m"])

    def lost(self, text: str) -> UcpstoreError:
        """The error for a rank that can no longer learn the outcome."""
        if not self.binding:
            return RankMissingError(text)
        return OutcomeUnknownError(f"{text}; whether the {self.kind} took effect is not known")

    def silent_text(self, ranks: Sequence[int]) -> str:
        return (
            f"{ranks_text(ranks)} stopped answering during {self.kind}: no sign of life for "
            f"{self.options.silence_timeout_s:g} s; the process was killed, or its machine is gone"
        )


class Pace:
    """Pauses that grow with the time already waited, so that looking costs and delays little."""

    def __init__(self, pause: Callable[[float], None]) -> None:
        self._pause = pause
        self._start = time.monotonic()

    def pause(self) -> None:
        waited = time.monotonic() - self._start
        self._pause(min(max(waited / 8, 2e-4), 0.25))
