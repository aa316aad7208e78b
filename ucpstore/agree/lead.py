"""Rank 0's side of a call: show the call, collect the answers, decide, tell the outcome.

Only rank 0 times others out.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ucpstore.agree import message
from ucpstore.agree.heart import Watch
from ucpstore.agree.keyvalue import StoreGoneError
from ucpstore.agree.message import Failure, Message
from ucpstore.agree.place import CURRENT, Pace, Place
from ucpstore.agree.text import ranks_text
from ucpstore.errors import AgreementError, StateError

_GRACE_S = 2.0
_READ_S = 5.0
_UNREAD_CALLS = 4


def open_call(place: Place) -> None:
    """Draw an id and show it; remove what a dead run or an earlier failed call left."""
    store, unread = place.store, place.group.unread
    left = store.get(CURRENT)
    if left is not None:
        place.remove(left[1:].decode(), 1)
    # The latest stay: ranks that were busy when the call failed may still come to read why.
    for call_id, rounds in unread[:-_UNREAD_CALLS]:
        place.remove(call_id, rounds)
    del unread[:-_UNREAD_CALLS]
    place.attend(secrets.token_hex(8))
    store.set(CURRENT, b"C" + place.id.encode())


def decide_round(
    place: Place,
    answer: Message,
    own: Exception | None,
    decide: Callable[[list[bytes]], bytes],
    timeout_s: float,
) -> tuple[Message, Exception | None]:
    """Collect, decide and publish; the outcome, and the exception that this rank itself met."""
    deciding = False
    try:
        collected = _collect(place, answer, timeout_s)
        failure = _cause(place, collected, timeout_s)
        payload = b""
        if failure is None:
            deciding = True
            try:
                payload = decide([collected.answers[rank].payload for rank in range(place.size)])
            except Exception as error:
                own = error
                # Errors about what the ranks gave name the ranks themselves.
                about_ranks = isinstance(error, (StateError, AgreementError))
                failure = Failure.of(0, error, name_rank=not about_ranks)
        exchangers = {given.exchanger for given in collected.answers.values()}
        exchanger = exchangers.pop() if len(exchangers) == 1 else ""
    except BaseException as error:
        # Interrupted, or the store is gone; whatever was decided, nobody has been told.
        failure = Failure.of(0, error)
        if deciding and place.binding:
            text = f"rank 0 was interrupted while it decided ({type(error).__name__})"
            failure = Failure.of(0, place.lost(text), name_rank=False)
        with contextlib.suppress(StoreGoneError):
            publish(place, place.message(answer.round, b"", failure), 1)
        raise
    outcome = Message(place.kind, answer.round, payload, exchanger, failure)
    publish(place, outcome, len(collected.answers))
    return outcome, own


def publish(place: Place, outcome: Message, readers: int) -> None:
    """Tell the outcome. After a failure, wait a little until so many ranks have read it."""
    try:
        if place.round == 0:
            place.store.delete([CURRENT])
        message.put(place.store, place.key("o"), outcome)
        place.read()
        if outcome.failure is not None:
            place.over = True
            await_readers(place, place.round, readers)
    except StoreGoneError as error:
        if outcome.failure is not None:
            return
        raise place.lost(
            f"rank 0 could not tell the outcome of {place.kind} to the other ranks: the "
            f"key-value store of the process group is gone ({error})"
        ) from error


def await_readers(place: Place, number: int, readers: int) -> None:
    """Wait a little until so many ranks have read the outcome of a round, or note its keys."""
    deadline = time.monotonic() + _READ_S
    pace = Pace(place.store.pause)
    while (value := place.store.get(f"{place.id}/{number}/r")) is not None:
        if int(value) >= readers or time.monotonic() >= deadline:
            # One more round than was reached: a rank may have left a failure there.
            place.group.unread.append((place.id, number + 2))
            return
        pace.pause()


@dataclass(frozen=True, slots=True)
class _Collected:
    """The answers by rank; the ranks without one that fell silent, or else were late."""

    answers: Mapping[int, Message]
    silent: tuple[int, ...]
    late: tuple[int, ...]


def _collect(place: Place, answer: Message, timeout_s: float) -> _Collected:
    store, others = place.store, range(1, place.size)
    pace = Pace(store.pause)
    watch = Watch(store, place.options.silence_timeout_s)
    deadline = time.monotonic() + timeout_s
    failing = False
    silent: tuple[int, ...] = ()
    while True:
        failed, count = place.answered()
        now = time.monotonic()
        if (failed or answer.failure is not None) and not failing:
            # The others get a moment, since theirs may be the first cause.
            failing = True
            deadline = min(deadline, now + _GRACE_S)
        if count >= place.size - 1 or now >= deadline:
            break
        # In the first round nobody is known to have come, so nobody can fall silent.
        if place.round and watch.due():
            beats = {place.beat_key(r): r for r in others if store.get(place.key(f"a{r}")) is None}
            silent = tuple(beats[key] for key in watch.silent(beats))
            if silent:
                break
        pace.pause()
    answers = {0: answer}
    for rank in others:
        key = place.key(f"a{rank}")
        value = store.get(key)
        if value is None:
            continue
        answers[rank] = message.take(store, key, value)
        if answers[rank].failure is not None:  # it may have left without waiting
            message.remove(store, key, value)
    absent = [rank for rank in others if rank not in answers]
    dead = tuple(rank for rank in silent if rank in absent)
    return _Collected(answers, dead, () if dead else tuple(absent))


def _cause(place: Place, collected: _Collected, timeout_s: float) -> Failure | None:
    """Why the round cannot be decided, if it cannot."""
    answers = collected.answers
    failures = [given.failure for given in answers.values() if given.failure is not None]
    if failures:
        first = message.first_of(failures)
        absent = collected.silent or collected.late
        if not absent:
            return first
        # Whoever lost touch with a dead rank fails sooner than the dead rank is found.
        return replace(first, text=f"{first.text} ({ranks_text(absent)} has not answered since)")
    calls = _by(lambda given: given.call, answers)
    if len(calls) > 1:
        who = "; ".join(f"{ranks_text(ranks)} called {call}" for call, ranks in calls.items())
        return _agreement(f"the ranks made different calls: {who}; all must make the same ones")
    rounds = _by(lambda given: given.round, answers)
    if len(rounds) > 1:
        who = "; ".join(f"{ranks_text(ranks)} in {name}" for name, ranks in rounds.items())
        return _agreement(f"the ranks are in different rounds of {place.kind}: {who}")
    if collected.silent:
        return _missing(place.silent_text(collected.silent))
    if collected.late and place.round:
        return _missing(
            f"{ranks_text(collected.late)} did not reach the {answers[0].round} of {place.kind} "
            f"within {timeout_s:g} s after rank 0, though alive; raise report_timeout_s where "
            "ranks may take so much longer than others"
        )
    if collected.late:
        return _missing(
            f"{ranks_text(collected.late)} did not call {place.kind} within {timeout_s:g} s; "
            "every rank of the process group must call it, not rank 0 alone"
        )
    return None


def _by(what: Callable[[Message], str], answers: Mapping[int, Message]) -> dict[str, Sequence[int]]:
    """The ranks by what they said."""
    found: dict[str, list[int]] = {}
    for rank, given in sorted(answers.items()):
        found.setdefault(what(given), []).append(rank)
    return {said: tuple(ranks) for said, ranks in found.items()}


def _agreement(text: str) -> Failure:
    return Failure(0, "AgreementError", text)


def _missing(text: str) -> Failure:
    return Failure(0, "RankMissingError", text)
