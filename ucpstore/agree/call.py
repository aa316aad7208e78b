"""Calls: one save or load that every rank of a group takes part in, in rounds.

How the ranks of a call meet: rank 0 draws an id and sets `current`; the others wait for an id they
have not taken part in and answer under it. Rank 0 removes `current` before it tells the outcome
of the first round, so an id that can be found has no outcome yet, and an id that a dead run left
is overtaken by the next: who answered under it joins the newer one.

Keys of round k of call `id`: `id/k/a<rank>` an answer, `id/k/n` the number of answers (failed ones
add `_FAILED` too), `id/k/o` the outcome, `id/k/r` the number of ranks that have read it. A rank
deletes its own answer, the last reader the rest. `id/b<rank>` are heartbeats.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from ucpstore.agree import message
from ucpstore.agree.heart import Watch
from ucpstore.agree.keyvalue import StoreGoneError
from ucpstore.agree.message import Failure, Message
from ucpstore.errors import (
    AgreementError,
    OutcomeUnknownError,
    RankMissingError,
    StateError,
    UcpstoreError,
)
from ucpstore.options import Options

if TYPE_CHECKING:
    from ucpstore.agree.group import Group

_FAILED = 1 << 32
_CURRENT = "current"
_GRACE_S = 2.0
_READ_S = 5.0
_UNREAD_CALLS = 4


class Call:
    """A collective call under way. Use it as a context manager, or end it with `close`.

    Rounds may run in any thread, one after the other. After a round has raised, the call is over.
    """

    def __init__(self, group: Group, kind: str, options: Options) -> None:
        self.group = group
        self.rank = group.rank
        self.size = group.size
        self.kind = kind
        self.options = options
        self.id = ""
        """Names the call on all ranks; empty until the first round has found it."""
        self._round = 0
        self._answered = ""
        self._over = False
        self._closed = False

    def __enter__(self) -> Call:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(error)

    def round(
        self,
        name: str,
        produce: Callable[[], bytes],
        decide: Callable[[list[bytes]], bytes],
        *,
        timeout_s: float,
    ) -> bytes:
        """Every rank gives `produce()`, rank 0 decides over all (by rank), all return the decision.

        An exception of any `produce`, or of `decide` on rank 0, is raised on all ranks: the rank
        that met it raises it as it is, the others an error of the same class (`AgreementError`
        where the class is not one of ucpstore's) whose text names the rank. Of several, the lowest
        rank's. A `KeyboardInterrupt` or `SystemExit` is told to the others and raised at once.

        `timeout_s` is how long rank 0 waits for answers after its own; the others wait for rank 0
        as long as its heart beats. Raises `RankMissingError` on all ranks where some do not come,
        and `OutcomeUnknownError` where rank 0 is lost after the first round.
        """
        if self._over or self._closed:
            raise AgreementError(f"this {self.kind} is over; begin another call")
        if self.size == 1:
            try:
                outcome = decide([produce()])
            except BaseException:
                self._over = True
                raise
            self._round += 1
            return outcome
        try:
            if self._round:
                return self._run(name, produce, decide, timeout_s)
            with self._opening():
                return self._run(name, produce, decide, timeout_s)
        except StoreGoneError as error:
            self._over = True
            text = (
                "the key-value store of the process group is gone, and with it the process that "
                f"hosted it ({error})"
            )
            # Rank 0 gets here only where it has not decided.
            raise (RankMissingError(text) if self.rank == 0 else self._lost(text)) from error
        except BaseException:
            self._over = True
            raise

    def close(self, error: BaseException | None = None) -> None:
        """End the call. `error` is what ended it early on this rank; the others will raise it.

        Rank 0 waits a little for the last outcome to be read, since its process may be the one
        that hosts the key-value store.
        """
        if self._closed:
            return
        self._closed = True
        if self.size == 1 or not self.id:
            if self.size > 1 and error is not None and not self._over:
                self._abort(error)
            return
        if error is not None and not self._over:
            self._abort(error)
        elif self.rank == 0 and self._round:
            with contextlib.suppress(StoreGoneError):
                self._await_readers(self._round - 1, self.size)
        self.group.heart.stop(self._beat_key(self.rank))

    # The round, as rank 0 sees it and as the others do.

    def _run(
        self,
        name: str,
        produce: Callable[[], bytes],
        decide: Callable[[list[bytes]], bytes],
        timeout_s: float,
    ) -> bytes:
        if self.rank == 0 and not self.id:
            self._open()
        own: BaseException | None = None
        payload = b""
        try:
            payload = produce()
        except BaseException as error:
            own = error
        failure = None if own is None else Failure.of(self.rank, own)
        answer = self._message(name, payload, failure)
        if own is not None and not isinstance(own, Exception):
            with contextlib.suppress(StoreGoneError):
                self._leave(answer)
            raise own
        if self.rank == 0:
            outcome, own = self._decide(name, answer, own, decide, timeout_s)
        else:
            outcome = self._follow(answer, timeout_s)
        self._round += 1
        if outcome.failure is None:
            if self.group.exchanger is not None and self.group.exchanger[0] != outcome.exchanger:
                self.group.exchanger = None
            return outcome.payload
        self.group.exchanger = None
        agreed = outcome.failure.error()
        if own is None:
            raise agreed
        if outcome.failure.rank != self.rank:
            raise agreed from own
        own.add_note(f"met on rank {self.rank}; every rank of the {self.kind} raises it")
        raise own

    def _decide(
        self,
        name: str,
        answer: Message,
        own: BaseException | None,
        decide: Callable[[list[bytes]], bytes],
        timeout_s: float,
    ) -> tuple[Message, BaseException | None]:
        """Rank 0: collect, decide, publish."""
        missing: tuple[int, ...] = ()
        try:
            answers, silent, late = self._collect(name, answer, timeout_s)
            missing = (*silent, *late)
            failure = self._cause(name, answers, silent, late, timeout_s)
            payload = b""
            if failure is None:
                try:
                    payload = decide([answers[rank].payload for rank in range(self.size)])
                except Exception as error:
                    own = error
                    # Errors about what the ranks gave name ranks themselves.
                    about_ranks = isinstance(error, (StateError, AgreementError))
                    failure = Failure.of(0, error, name_rank=not about_ranks)
            same = {given.exchanger for given in answers.values()}
            outcome = Message(
                self.kind, name, payload, same.pop() if len(same) == 1 else "", failure
            )
        except BaseException as error:
            # Interrupted: whatever was decided, nobody has been told.
            with contextlib.suppress(StoreGoneError):
                self._publish(self._message(name, b"", Failure.of(0, error)), ())
            raise
        self._publish(outcome, missing)
        return outcome, own

    def _collect(
        self, name: str, answer: Message, timeout_s: float
    ) -> tuple[dict[int, Message], tuple[int, ...], tuple[int, ...]]:
        """The answers that came, and the ranks that fell silent and that were late."""
        store, others = self.group.store, range(1, self.size)
        count_key = self._key("n")
        pace = _Pace(store.pause)
        watch = Watch(store, self.options.silence_timeout_s)
        deadline = time.monotonic() + timeout_s
        failing = False
        silent: tuple[int, ...] = ()
        while True:
            value = store.get(count_key)
            failed, count = divmod(int(value) if value else 0, _FAILED)
            now = time.monotonic()
            if (failed or answer.failure is not None) and not failing:
                failing = True
                deadline = min(deadline, now + _GRACE_S)
            if count >= self.size - 1 or now >= deadline:
                break
            # Before the first outcome nobody is known to have come, so nobody can fall silent.
            if self._round and watch.due():
                waiting = [rank for rank in others if store.get(self._key(f"a{rank}")) is None]
                beats = {self._beat_key(rank): rank for rank in waiting}
                silent = tuple(beats[key] for key in watch.silent(beats))
                if silent:
                    break
            pace.pause()
        answers = {0: answer}
        for rank in others:
            value = store.get(self._key(f"a{rank}"))
            if value is not None:
                answers[rank] = message.take(store, self._key(f"a{rank}"), value)
                if answers[rank].failure is not None:  # it may have left without waiting
                    message.remove(store, self._key(f"a{rank}"), value)
        late = tuple(rank for rank in others if rank not in answers and rank not in silent)
        if silent:
            late = ()
        return answers, tuple(rank for rank in silent if rank not in answers), late

    def _cause(
        self,
        name: str,
        answers: dict[int, Message],
        silent: Sequence[int],
        late: Sequence[int],
        timeout_s: float,
    ) -> Failure | None:
        failures = [given.failure for given in answers.values() if given.failure is not None]
        if failures:
            return message.first_of(failures)
        others = {given.call: rank for rank, given in answers.items() if given.call != self.kind}
        if others:
            calls = "; ".join(
                f"{ranks_text(r for r, given in answers.items() if given.call == call)} "
                f"called {call}"
                for call in (self.kind, *others)
            )
            text = f"the ranks made different calls: {calls}; every rank must make the same ones"
            return Failure(0, "AgreementError", text)
        rounds = {given.round for given in answers.values()}
        if len(rounds) > 1:
            text = f"the ranks are in different rounds of {self.kind}: {', '.join(sorted(rounds))}"
            return Failure(0, "AgreementError", text)
        if silent:
            return Failure(0, "RankMissingError", self._silent_text(silent))
        if not late:
            return None
        if self._round:
            text = (
                f"{ranks_text(late)} did not reach {name} of {self.kind} within {timeout_s:g} s "
                "after rank 0, though alive; raise report_timeout_s where so much time is due"
            )
        else:
            text = (
                f"{ranks_text(late)} did not call {self.kind} within {timeout_s:g} s; every rank "
                f"of the process group must call it, not rank 0 alone"
            )
        return Failure(0, "RankMissingError", text)

    def _publish(self, outcome: Message, missing: Sequence[int]) -> None:
        store, key = self.group.store, self._key("o")
        try:
            if self._round == 0:
                store.delete([_CURRENT])
            message.put(store, key, outcome)
            self._read()
            if outcome.failure is not None:
                self._over = True
                self._await_readers(self._round, self.size - len(missing))
        except StoreGoneError as error:
            if outcome.failure is not None:
                return
            raise OutcomeUnknownError(
                f"rank 0 could not tell the outcome of {self.kind} to the other ranks: the "
                f"key-value store of the process group is gone ({error})"
            ) from error

    def _follow(self, answer: Message, timeout_s: float) -> Message:
        """The other ranks: answer, and wait for what rank 0 says."""
        if self._round:
            self._answer(answer)
        else:
            self._find(time.monotonic() + self.options.arrive_timeout_s)
            self._answer(answer)
        store = self.group.store
        pace = _Pace(store.pause)
        watch = Watch(store, self.options.silence_timeout_s)
        next_look = time.monotonic() + 0.2
        try:
            while (value := store.get(self._key("o"))) is None:
                if watch.due() and watch.silent([self._beat_key(0)]):
                    raise self._lost(self._silent_text([0]))
                now = time.monotonic()
                if self._round == 0 and now >= next_look:
                    next_look = now + 0.2
                    if self._overtaken():
                        self._answer(answer)
                        watch = Watch(store, self.options.silence_timeout_s)
                pace.pause()
        except BaseException as error:
            if not isinstance(error, StoreGoneError):
                # Rank 0 may be there after all: it must not count on this rank.
                with contextlib.suppress(StoreGoneError):
                    self._leave(self._message(answer.round, b"", Failure.of(self.rank, error)))
            raise
        outcome = message.take(store, self._key("o"), value)
        message.remove(store, self._key(f"a{self.rank}"))
        self._read()
        return outcome

    # Meeting.

    def _open(self) -> None:
        """Rank 0: draw an id and show it, and remove what a dead run or a failed call left."""
        store = self.group.store
        left = store.get(_CURRENT)
        if left is not None:
            self._remove_keys(left[1:].decode(), 1)
        for unread in self.group.unread[:-_UNREAD_CALLS]:
            self._remove_keys(*unread)
        del self.group.unread[:-_UNREAD_CALLS]
        self._attend(secrets.token_hex(8))
        store.set(_CURRENT, b"C" + self.id.encode())

    def _find(self, deadline: float) -> None:
        """The other ranks: wait for an id that this rank has not taken part in."""
        pace = _Pace(self.group.store.pause)
        while not self._overtaken():
            if time.monotonic() >= deadline:
                raise RankMissingError(
                    f"rank 0 did not call {self.kind} within {self.options.arrive_timeout_s:g} s; "
                    "every rank of the process group must call it"
                )
            pace.pause()

    def _overtaken(self) -> bool:
        """Whether a newer id is shown, which this rank then takes part in."""
        value = self.group.store.get(_CURRENT)
        if value is None:
            return False
        shown = value[1:].decode()
        if shown in self.group.attended:
            return False
        if self.id:
            self.group.heart.stop(self._beat_key(self.rank))
            message.remove(self.group.store, self._key(f"a{self.rank}"))
            self.group.store.delete([self._key("n")])
        self._attend(shown)
        return True

    def _attend(self, call_id: str) -> None:
        self.id = call_id
        self.group.attended.append(call_id)
        del self.group.attended[:-16]
        self.group.heart.start(self._beat_key(self.rank), self.options.silence_timeout_s)

    @contextlib.contextmanager
    def _opening(self) -> Iterator[None]:
        if not self.group.opening.acquire(timeout=self.options.arrive_timeout_s):
            raise AgreementError(
                f"{self.kind} cannot begin: another call on the same process group has been "
                f"looking for its ranks for {self.options.arrive_timeout_s:g} s"
            )
        try:
            yield
        finally:
            self.group.opening.release()

    # Keys.

    def _key(self, name: str) -> str:
        return f"{self.id}/{self._round}/{name}"

    def _beat_key(self, rank: int) -> str:
        return f"{self.id}/b{rank}"

    def _message(self, name: str, payload: bytes, failure: Failure | None) -> Message:
        exchanger = self.group.exchanger
        return Message(self.kind, name, payload, exchanger[0] if exchanger else "", failure)

    def _answer(self, answer: Message) -> None:
        message.put(self.group.store, self._key(f"a{self.rank}"), answer)
        # Who gives up waiting replaces its answer: it failed, but was counted before.
        counted = self._answered == self._key("n")
        self._answered = self._key("n")
        amount = (0 if counted else 1) + (_FAILED if answer.failure else 0)
        self.group.store.add(self._answered, amount)

    def _read(self) -> None:
        """Count this rank as a reader of the round; the last one removes the round."""
        store = self.group.store
        if store.add(self._key("r"), 1) >= self.size:
            message.remove(store, self._key("o"))
            store.delete([self._key("n"), self._key("r")])

    def _remove_keys(self, call_id: str, rounds: int) -> None:
        store = self.group.store
        for number in range(rounds):
            start = f"{call_id}/{number}/"
            for rank in range(1, self.size):
                message.remove(store, f"{start}a{rank}")
            message.remove(store, f"{start}o")
            store.delete([f"{start}n", f"{start}r"])
        store.delete(f"{call_id}/b{rank}" for rank in range(self.size))

    def _await_readers(self, number: int, readers: int) -> None:
        """Rank 0: wait until so many ranks have read the outcome of a round."""
        store = self.group.store
        deadline = time.monotonic() + _READ_S
        pace = _Pace(store.pause)
        while (value := store.get(f"{self.id}/{number}/r")) is not None:
            if int(value) >= readers or time.monotonic() >= deadline:
                self.group.unread.append((self.id, number + 2))
                return
            pace.pause()

    # Leaving early.

    def _leave(self, answer: Message) -> None:
        """Tell the others that this rank fails in this round, and do not wait for them."""
        self._over = True
        if self.rank == 0:
            self._publish(answer, range(1, self.size))
            return
        if not self.id:
            with contextlib.suppress(RankMissingError):
                self._find(time.monotonic() + min(1.0, self.options.arrive_timeout_s))
        if self.id:
            self._answer(answer)
            self._read()

    def _abort(self, error: BaseException) -> None:
        with contextlib.suppress(StoreGoneError, UcpstoreError):
            if self.rank == 0 and not self.id:
                return
            self._leave(self._message("", b"", Failure.of(self.rank, error)))

    def _lost(self, text: str) -> UcpstoreError:
        if self._round == 0:
            return RankMissingError(text)
        return OutcomeUnknownError(f"{text}; whether the {self.kind} took effect is not known")

    def _silent_text(self, ranks: Sequence[int]) -> str:
        return (
            f"{ranks_text(ranks)} stopped answering during {self.kind}: no sign of life for "
            f"{self.options.silence_timeout_s:g} s; the process was killed, or its machine is gone"
        )


class _Pace:
    """Pauses that grow with the time already waited, so that looking costs and delays little."""

    def __init__(self, pause: Callable[[float], None]) -> None:
        self._pause = pause
        self._start = time.monotonic()

    def pause(self) -> None:
        waited = time.monotonic() - self._start
        self._pause(min(max(waited / 16, 1e-4), 0.25))


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 0, 2, 5-9`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [
        str(first)
        if first == last
        else f"{first}, {last}"
        if last == first + 1
        else f"{first}-{last}"
        for first, last in runs
    ]
    one = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"rank{'' if one else 's'} {', '.join(words)}"
