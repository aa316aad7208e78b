"""Calls: one save or load that every rank of a group takes part in, in rounds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from ucpstore.agree import follow, lead
from ucpstore.agree.heart import Watch
from ucpstore.agree.keyvalue import StoreGoneError
from ucpstore.agree.message import Failure
from ucpstore.agree.place import Pace, Place
from ucpstore.agree.text import ranks_text
from ucpstore.errors import AgreementError, RankMissingError, UcpstoreError
from ucpstore.options import Options

if TYPE_CHECKING:
    from ucpstore.agree.group import Group


class GivenUpError(AgreementError):
    """What a rank was doing with others in a round was given up, since one of them failed.

    Whoever raises it from `produce` does not count as failed: the round has its cause elsewhere.
    """


class Call:
    """A collective call under way. Use it as a context manager, or end it with `close`.

    Rounds may run in any thread, one after the other. After a round has raised, the call is over.
    """

    def __init__(self, group: Group, kind: str, options: Options) -> None:
        self.group = group
        self.rank = group.rank
        self.size = group.size
        self._place = Place(group, kind, options)
        self._closed = False

    @property
    def kind(self) -> str:
        """The verb that messages show."""
        return self._place.kind

    @property
    def id(self) -> str:
        """Names the call on all ranks; empty until the first round has begun."""
        return self._place.id

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
        commits: bool = True,
    ) -> bytes:
        """Every rank gives `produce()`, rank 0 decides over all (by rank), all return the decision.

        An exception of any `produce`, or of `decide` on rank 0, is raised on all ranks: the rank
        that met it raises it as it is, the others an error of the same class (`AgreementError`
        where the class is not one of ucpstore's) whose text names the rank. Of several, the lowest
        rank's. A `KeyboardInterrupt` or `SystemExit` is told to the others and raised at once.

        `timeout_s` is how long rank 0 waits for answers after its own; the others wait for rank 0
        as long as its heart beats. Raises `RankMissingError` on all ranks where some do not come.
        Where rank 0 is lost, a round that `commits`, so that its decision holds although nobody
        has heard of it, raises `OutcomeUnknownError`; every other round, as the first of a call
        always is, `RankMissingError`.
        """
        place = self._place
        place.commits = commits
        if place.over or self._closed:
            raise AgreementError(f"this {self.kind} is over; begin another call")
        try:
            if self.size == 1:
                outcome = decide([produce()])
            elif place.round:
                outcome = self._run(name, produce, decide, timeout_s)
            else:
                with self._opening():
                    outcome = self._run(name, produce, decide, timeout_s)
        except StoreGoneError as error:
            place.over = True
            text = (
                "the key-value store of the process group is gone, and with it the process that "
                f"hosted it ({error})"
            )
            # Rank 0 gets here only where it has not decided.
            raise (RankMissingError(text) if self.rank == 0 else place.lost(text)) from error
        except BaseException:
            place.over = True
            self._drop_exchanger()
            raise
        place.round += 1
        return outcome

    def _run(
        self,
        name: str,
        produce: Callable[[], bytes],
        decide: Callable[[list[bytes]], bytes],
        timeout_s: float,
    ) -> bytes:
        place = self._place
        if self.rank == 0 and not place.id:
            lead.open_call(place)
        own: Exception | None = None
        payload = b""
        try:
            payload = produce()
        except GivenUpError:
            pass  # the round fails with what the other rank met
        except Exception as error:
            own = error
        except BaseException as error:
            self._leave(name, error)
            raise
        failure = None if own is None else Failure.of(self.rank, own)
        answer = place.message(name, payload, failure)
        if self.rank == 0:
            outcome, own = lead.decide_round(place, answer, own, decide, timeout_s)
        else:
            outcome = follow.follow_round(place, answer)
        if place.exchanger and (outcome.failure or place.exchanger[0] != outcome.exchanger):
            self._drop_exchanger()
        if outcome.failure is None:
            return outcome.payload
        agreed = outcome.failure.error()
        if own is None:
            raise agreed
        if outcome.failure.rank != self.rank:
            raise agreed from own
        own.add_note(f"met on rank {self.rank}; every rank of the {self.kind} raises it")
        raise own

    @property
    def exchanger(self) -> object:
        """The exchange that all ranks have in this call, None before there is one.

        Kept for the next calls of the group, until a call that uses it fails. The call holds on to
        it, since calls of other threads may replace that of the group meanwhile.
        """
        return self._place.exchanger[1] if self._place.exchanger else None

    @exchanger.setter
    def exchanger(self, made: object) -> None:
        self._place.exchanger = self.group.exchanger = (self.id, made)

    def _drop_exchanger(self) -> None:
        if self.group.exchanger is self._place.exchanger:
            self.group.exchanger = None
        self._place.exchanger = None

    def meet(self, what: str, timeout_s: float) -> None:
        """Wait until all ranks have come here as often as this one, for what they then do together.

        For use in `produce` of a round, by all ranks alike. A rank that is late but alive is waited
        for. Raises `RankMissingError`, which names `what` and the ranks, where some stop answering
        or do not come in time, and `GivenUpError` where a rank has failed.
        """
        place = self._place
        if self.size == 1:
            return
        place.come()
        deadline = time.monotonic() + timeout_s
        pace = Pace(place.store.pause)
        watch = Watch(place.store, place.options.silence_timeout_s)
        while not place.complete():
            if place.answered()[0] or place.store.get(place.key("o")) is not None:
                raise GivenUpError(f"{what} of {self.kind} was given up: another rank failed")
            late = time.monotonic() >= deadline
            if late or watch.due():
                beats = {place.beat_key(rank): rank for rank in place.absent()}
                missed = f"{ranks_text(beats.values())} did not take part in {what} of {self.kind}"
                silent = [beats[key] for key in watch.silent(beats)]
                if silent:
                    raise RankMissingError(f"{missed}: {place.silent_text(silent)}")
                if late and beats:
                    raise RankMissingError(f"{missed} within {timeout_s:g} s, or died")
            pace.pause()

    def close(self, error: BaseException | None = None) -> None:
        """End the call. `error` is what ended it early on this rank; the others will raise it.

        Rank 0 waits a little for the last outcome to be read, since its process may be the one
        that hosts the key-value store.
        """
        place = self._place
        if self._closed:
            return
        self._closed = True
        if self.size == 1:
            return
        if error is not None and not place.over:
            self._leave("", error)
        elif self.rank == 0 and place.round:
            with contextlib.suppress(StoreGoneError):
                lead.await_readers(place, place.round - 1, self.size)
        if place.id:
            self.group.heart.stop(place.beat_key(self.rank))
        with contextlib.suppress(StoreGoneError):
            place.forget_meetings()

    def _leave(self, name: str, error: BaseException) -> None:
        """Tell the others that this rank fails in the present round, and do not wait for them."""
        place = self._place
        place.over = True
        answer = place.message(name, b"", Failure.of(self.rank, error))
        with contextlib.suppress(StoreGoneError, UcpstoreError):
            if self.rank:
                follow.leave(place, answer)
            elif place.id:
                lead.publish(place, answer, 1)

    @contextlib.contextmanager
    def _opening(self) -> Iterator[None]:
        """Let one call at a time look for its ranks."""
        timeout_s = self._place.options.arrive_timeout_s
        if not self.group.opening.acquire(timeout=timeout_s):
            raise AgreementError(
                f"{self.kind} cannot begin: another call on the same process group has been "
                f"looking for its ranks for {timeout_s:g} s"
            )
        try:
            yield
        finally:
            self.group.opening.release()
