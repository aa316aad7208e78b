"""The other ranks' side of a call: find it, answer, and wait for what rank 0 says."""

from __future__ import annotations

import contextlib
import time

from ucpstore.agree import message
from ucpstore.agree.heart import Watch
from ucpstore.agree.keyvalue import StoreGoneError
from ucpstore.agree.message import Failure, Message
from ucpstore.agree.place import CURRENT, Pace, Place
from ucpstore.errors import RankMissingError

_LOOK_S = 0.2
_LEAVE_S = 1.0


def follow_round(place: Place, answer: Message) -> Message:
    """Answer, and wait for the outcome as long as rank 0's heart beats."""
    if not place.id:
        _find(place, place.options.arrive_timeout_s)
    place.answer(answer)
    try:
        value = _await_outcome(place, answer)
    except BaseException as error:
        # Rank 0 may be there after all: it must not count on this rank.
        if not isinstance(error, StoreGoneError):
            with contextlib.suppress(StoreGoneError):
                leave(place, place.message(answer.round, b"", Failure.of(place.rank, error)))
        raise
    outcome = message.take(place.store, place.key("o"), value)
    # It holds, even where rank 0 has ended by now and the store with it.
    with contextlib.suppress(StoreGoneError):
        message.remove(place.store, place.key(f"a{place.rank}"))
        place.read()
    return outcome


def leave(place: Place, answer: Message) -> None:
    """Tell rank 0 that this rank fails in this round, and do not wait for it."""
    if not place.id:
        with contextlib.suppress(RankMissingError):
            _find(place, min(_LEAVE_S, place.options.arrive_timeout_s))
    if place.id:
        place.answer(answer)
        place.read()


def _await_outcome(place: Place, answer: Message) -> bytes:
    store = place.store
    pace = Pace(store.pause)
    watch = Watch(store, place.options.silence_timeout_s)
    next_look = time.monotonic() + _LOOK_S
    while (value := store.get(place.key("o"))) is None:
        if watch.due() and watch.silent([place.beat_key(0)]):
            raise place.lost(place.silent_text([0]))
        now = time.monotonic()
        if place.round == 0 and now >= next_look:
            next_look = now + _LOOK_S
            if _overtaken(place):
                place.answer(answer)
                watch = Watch(store, place.options.silence_timeout_s)
        pace.pause()
    return value


def _find(place: Place, timeout_s: float) -> None:
    """Wait for an id that this rank has not taken part in."""
    deadline = time.monotonic() + timeout_s
    pace = Pace(place.store.pause)
    while not _overtaken(place):
        if time.monotonic() >= deadline:
            raise RankMissingError(
                f"rank 0 did not call {place.kind} within {timeout_s:g} s; every rank of the "
                "process group must call it"
            )
        pace.pause()


def _overtaken(place: Place) -> bool:
    """Whether a call is shown that this rank has not taken part in; it does so then."""
    value = place.store.get(CURRENT)
    if value is None or value[1:].decode() in place.group.attended:
        return False
    if place.id:  # a dead run's, which nobody answers any more
        place.group.heart.stop(place.beat_key(place.rank))
        message.remove(place.store, place.key(f"a{place.rank}"))
        place.store.delete([place.key("n")])
    place.attend(value[1:].decode())
    return True
