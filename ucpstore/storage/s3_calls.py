"""Calls to one S3 bucket: sent again where that can help, and failures turned into our errors.

Requests are sent again, with growing waits, while the server answers 5xx or the connection breaks.
What must be sent once is sent again only where the server answered that it did nothing: after a
lost answer, a second try could not tell its own first success from someone else's.
"""

from __future__ import annotations

import os
import random
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from ucpstore.errors import OutcomeUnknownError
from ucpstore.storage.s3_clients import (
    FIRST_WAIT_S,
    LONGEST_WAIT_S,
    RETRIES,
    Clients,
    clients_of,
    limit_s,
    renewed,
)
from ucpstore.storage.s3_errors import Failure
from ucpstore.storage.s3_options import S3Options
from ucpstore.storage.s3_requests import Requests

T = TypeVar("T")


class S3Calls:
    """The way to a bucket; `url` is that of the storage, for messages."""

    def __init__(self, bucket: str, url: str, options: S3Options) -> None:
        self._bucket = bucket
        self._url = url
        self._options = options
        self._made: tuple[int, Clients] | None = None
        self._answered = False

    def where(self, key: str) -> str:
        """The URL of a key, for messages; of `""`, that of the storage."""
        return f"{self._url}/{key}" if key else self._url

    def send(
        self,
        action: str,
        key: str,
        call: Callable[[Requests], T],
        *,
        quick: bool = True,
        once: bool = False,
        met: deque[Failure] | None = None,
    ) -> T:
        """Run one request, again where that can help, and turn its failure into our errors.

        Credentials from the environment or a profile may have been renewed since they were read:
        if the server refuses them and others are found, the request is sent with those, once.
        `once` sends again only what the server has answered and not begun; `met` gets those
        answers.
        """
        renewed = False
        waits = _Waits()
        while True:
            clients = self._clients()
            first = quick and not self._answered
            requests = clients.once if once else clients.first if first else clients.patient
            try:
                result = call(requests)
            except requests.errors as error:
                failure = requests.failure(error)
                absent = isinstance(error, FileNotFoundError) or failure.missing_object
            else:
                self._answered = True
                return result
            # Outside of the except block: the server's answer, which may hold a token, must not
            # hang on our error as its context.
            self._answered = self._answered or failure.answered
            if absent and not failure.missing_bucket:
                raise FileNotFoundError(f"no object {self.where(key)}")
            if failure.stale_credentials and not renewed and self._renew(clients):
                renewed = True
                continue
            again = failure.idle if once else failure.passing and not requests.resends
            if again and waits.wait(limit_s(answered=self._answered)):
                if met is not None:
                    met.append(failure)
                continue
            refusal = failure.refusal(
                action, self.where(key), self._bucket, clients.endpoint, clients.secrets
            )
            if once and not (failure.certain and all(each.certain for each in met or ())):
                raise OutcomeUnknownError(f"{refusal}. Whether it was written is not known: look")
            raise refusal

    def close(self) -> None:
        """Connections stay for the process's other storages and the next call."""
        self._made = None

    def _clients(self) -> Clients:
        made = self._made
        if made is None or made[0] != os.getpid():
            made = self._made = (os.getpid(), clients_of(self._bucket, self._options))
        return made[1]

    def _renew(self, used: Clients) -> bool:
        """Look the credentials up again; whether there are others than those that were used."""
        fresh = renewed(self._bucket, self._options, used)
        if fresh is not None:
            self._made = (os.getpid(), fresh)
        return fresh is not None


class _Waits:
    """Growing waits between the tries of one request, as obstore does it."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._tries = 0

    def wait(self, limit_s: float) -> bool:
        """Wait before the next try; False, at once, where tries or time are used up."""
        wait_s = min(FIRST_WAIT_S * 2**self._tries, LONGEST_WAIT_S) * random.uniform(0.75, 1.0)
        if self._tries >= RETRIES or time.monotonic() - self._began + wait_s > limit_s:
            return False
        self._tries += 1
        time.sleep(wait_s)
        return True
