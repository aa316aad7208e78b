"""The exchange: ranks send pieces straight into each other's buffers, one message per pair.

Between processes it is a gloo group of ucpstore's own, built from the class on a prefix of the
group's key-value store: `new_group` would have to be entered by every rank of the default group,
and would change the names of the groups that the caller makes next. Threads of a local group hand
the bytes over through queues.
"""

from __future__ import annotations

import datetime
import queue
import re
import threading
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from ucpstore.agree import Call, Group, KeyValue
from ucpstore.agree.keyvalue import C10dStore
from ucpstore.agree.text import ranks_text
from ucpstore.errors import AgreementError, RankMissingError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroupGloo, Work

Bytes = npt.NDArray[np.uint8]

_LATER_S = 1.0


class Exchanger(Protocol):
    """Sends and receives between the ranks of one group. Made by `exchanger_of`."""

    def exchange(self, sends: Mapping[int, Bytes], receives: Mapping[int, Bytes]) -> None:
        """Send `sends[r]` to each rank r and fill `receives[r]` with what it sent here.

        One-dimensional, contiguous arrays of bytes; both ends know the size. All ranks call it
        the same number of times. Empty arrays are not sent. Buffers are the caller's again on
        return. Raises `RankMissingError`, naming the peers, where one does not come in time, falls
        silent, or a message does not go through, and `GivenUpError` where a rank has failed; the
        exchange is unusable then. To be called in a round.
        """


def exchanger_of(call: Call, timeout_s: float, *, transfer_s: float | None = None) -> Exchanger:
    """The exchange of the group behind `call`, made anew where there is none that all ranks have.

    After the call's first round, every rank of the group must ask for it in the same calls. It is
    kept for later calls and dropped when a call fails. `timeout_s` is how much later than this
    rank another may come to an exchange. `transfer_s`, the same where None, bounds how long making
    connections takes, and moving the messages once all are there.
    """
    transfer_s = timeout_s if transfer_s is None else transfer_s
    group = call.group
    connection = call.exchanger
    if isinstance(group.store, C10dStore) and group.size > 1:
        if not isinstance(connection, _Connection):
            call.exchanger = connection = _Connection(call, group.store, transfer_s)
        return _Gloo(connection, call, timeout_s, transfer_s)
    if not isinstance(connection, _Mailboxes):
        call.exchanger = connection = _mailboxes_of(group.store)
    return _Local(connection, call, timeout_s, transfer_s)


class _Connection:
    """The gloo group of one `Group`, which lasts until an operation fails."""

    def __init__(self, call: Call, store: C10dStore, timeout_s: float) -> None:
        from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

        self.gloo: ProcessGroupGloo | None = None
        _forget_last(call, store)
        name = f"exchange/{call.id}"
        here = f"{name}/here"
        store.set(f"{here}{call.rank}", b"H")
        try:
            self.gloo = ProcessGroupGloo(
                PrefixStore(name, store.client),
                call.rank,
                call.size,
                datetime.timedelta(seconds=timeout_s),
            )
        except RuntimeError as error:
            absent = [rank for rank in range(call.size) if store.get(f"{here}{rank}") is None]
            if absent:
                raise _missing(call.kind, dict.fromkeys(absent, error), timeout_s) from error
            raise RankMissingError(
                f"the ranks of {call.kind} could not connect to each other over gloo within "
                f"{timeout_s:g} s; where the machines have several networks, set "
                f"GLOO_SOCKET_IFNAME ({_first_line(error)})"
            ) from error


_last: weakref.WeakKeyDictionary[Group, str] = weakref.WeakKeyDictionary()
"""The call that made the latest connection of a group."""


def _forget_last(call: Call, store: C10dStore) -> None:
    """Remove what this rank left in the key-value store for the connection that this replaces."""
    last = _last.get(call.group)
    _last[call.group] = call.id
    if last is not None:
        # Gloo leaves its own address under the second (torch 2.8 to 2.13).
        left = (f"here{call.rank}", f"0/{call.rank}")
        store.delete(f"exchange/{last}/{name}" for name in left)


class _Gloo:
    def __init__(
        self, connection: _Connection, call: Call, timeout_s: float, transfer_s: float
    ) -> None:
        self._connection = connection
        self._call = call
        self._timeout_s = timeout_s
        self._transfer_s = transfer_s
        # So that calls of several threads do not get each other's messages.
        self._tag = int(call.id[:7], 16)

    def exchange(self, sends: Mapping[int, Bytes], receives: Mapping[int, Bytes]) -> None:
        import torch

        gloo = self._connection.gloo
        if gloo is None:
            raise AgreementError("the exchange failed before; begin another call")
        # Gloo knows nothing of hearts, and a time limit that passes in it kills the group. All have
        # to be there, not the peers alone: one of these may be waiting for another.
        self._call.meet("the exchange", self._timeout_s)
        works: list[tuple[int, Work]] = []
        failed: dict[int, RuntimeError] = {}
        # Receives first, so that no message has to wait in a socket for its buffer.
        # The stub of the class leaves out what its base binds.
        receive, send = gloo.recv, gloo.send  # type: ignore[attr-defined]
        for buffers, post in ((receives, receive), (sends, send)):
            for peer, buffer in buffers.items():
                if not buffer.size:
                    continue
                try:
                    works.append((peer, post([torch.from_numpy(buffer)], peer, self._tag)))
                except RuntimeError as error:
                    failed.setdefault(peer, error)
        deadline = time.monotonic() + (_LATER_S if failed else self._transfer_s)
        for peer, work in works:
            left_s = max(deadline - time.monotonic(), 0.001)
            try:
                work.wait(datetime.timedelta(seconds=left_s))
            except RuntimeError as error:
                failed.setdefault(peer, error)
                # The rest either went through or goes the same way.
                deadline = min(deadline, time.monotonic() + _LATER_S)
        if failed:
            # A time limit kills a gloo group.
            self._connection.gloo = None
            raise _missing(self._call.kind, failed, self._transfer_s)


class _Mailboxes:
    """One queue per call and ordered pair of ranks."""

    def __init__(self) -> None:
        self._queues: dict[tuple[str, int, int], queue.SimpleQueue[Bytes]] = {}
        self._lock = threading.Lock()

    def between(self, name: str, source: int, target: int) -> queue.SimpleQueue[Bytes]:
        with self._lock:
            return self._queues.setdefault((name, source, target), queue.SimpleQueue())


_mailboxes: weakref.WeakKeyDictionary[KeyValue, _Mailboxes] = weakref.WeakKeyDictionary()
_mailboxes_lock = threading.Lock()


def _mailboxes_of(store: KeyValue) -> _Mailboxes:
    """The mailboxes that the groups of one dict share."""
    with _mailboxes_lock:
        return _mailboxes.setdefault(store, _Mailboxes())


class _Local:
    def __init__(
        self, mailboxes: _Mailboxes, call: Call, timeout_s: float, transfer_s: float
    ) -> None:
        self._mailboxes = mailboxes
        self._call = call
        self._timeout_s = timeout_s
        self._transfer_s = transfer_s

    def exchange(self, sends: Mapping[int, Bytes], receives: Mapping[int, Bytes]) -> None:
        for peer, buffer in sends.items():
            if buffer.size:
                self._queue(self._call.rank, peer).put(buffer.copy())
        self._call.meet("the exchange", self._timeout_s)
        deadline = time.monotonic() + self._transfer_s
        for peer, buffer in receives.items():
            if not buffer.size:
                continue
            try:
                left_s = max(deadline - time.monotonic(), 0)
                sent = self._queue(peer, self._call.rank).get(timeout=left_s)
            except queue.Empty as error:
                raise _missing(self._call.kind, {peer: error}, self._transfer_s) from None
            if sent.size != buffer.size:
                raise AgreementError(
                    f"{ranks_text([peer])} sent {sent.size} bytes, but {buffer.size} were expected"
                )
            buffer[:] = sent

    def _queue(self, source: int, target: int) -> queue.SimpleQueue[Bytes]:
        return self._mailboxes.between(self._call.id, source, target)


def _missing(kind: str, failed: Mapping[int, BaseException], timeout_s: float) -> RankMissingError:
    reasons = sorted({_first_line(error) for error in failed.values()} - {""})
    reason = f" ({'; '.join(reasons)})" if reasons else ""
    error = RankMissingError(
        f"{ranks_text(failed)} did not take part in the exchange of {kind} within "
        f"{timeout_s:g} s, or died{reason}"
    )
    error.__cause__ = next(iter(failed.values()))
    return error


def _first_line(error: BaseException) -> str:
    """What went wrong, without gloo's source lines and advice."""
    line = str(error).split("\n", 1)[0].split(" This is typically", 1)[0]
    return re.sub(r"^(\[\S+\.cc:\d+\] )+", "", line).rstrip(". ")
