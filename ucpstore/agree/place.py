"""Where a call's messages lie in the key-value store, and what both sides do with them.

How the ranks of a call meet: rank 0 draws an id and sets `current`; the others wait for an id they
have not taken part in and answer under it. Rank 0 removes `current` before it tells the outcome
of the first round, so an id that can be found has no outcome yet, and an id that a dead run left
is overtaken by the next: who answered under it joins the newer one.

Keys of round k of call `id`: `id/k/a<rank>` an answer, `id/k/n` the number of answers (failed ones
add `FAILED` too), `id/k/o` the outcome, `id/k/r` the number of ranks that have read it. A rank
deletes its own answer, the last reader the rest. `id/b<rank>` are heartbeats.
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
        self.commits = True
        """What `Call.round` was told about the present round."""
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

    def attend(self, call_id: str) -> None:
        """Take part in a call from now on."""
        self.id = call_id
        self.group.attended.append(call_id)
        del self.group.attended[:-_ATTENDED_CALLS]
        self.group.heart.start(self.beat_key(self.rank), self.options.silence_timeout_s)

    def message(self, round_name: str, payload: bytes, failure: Failure | None) -> Message:
        """What this rank has to say in a round."""
        exchanger = self.group.exchanger
        return Message(self.kind, round_name, payload, exchanger[0] if exchanger else "", failure)

    def answer(self, answer: Message) -> None:
        """Give this rank's answer, or replace it by a failure."""
        message.put(self.store, self.key(f"a{self.rank}"), answer)
        # Who gives up waiting replaces its answer: it failed, but was counted before.
        counted = self._counted == self.key("n")
        self._counted = self.key("n")
        self.store.add(self._counted, (not counted) + (FAILED if answer.failure else 0))

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
        self.store.delete(f"{call_id}/b{rank}" for rank in range(self.size))

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
        self._pause(min(max(waited / 16, 1e-4), 0.25))
