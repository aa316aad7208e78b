"""The clients of an S3 bucket, made once per process and kept for all storages that ask alike.

A client reads the machine's certificates and opens connections of its own: making one for every
call of `save` and `load` took longer than many loads.
"""

from __future__ import annotations

import hashlib
import os
import threading
from dataclasses import dataclass, field

from ucpstore.storage.s3_options import Credential, Resolved, S3Options
from ucpstore.storage.s3_requests import Requests

RETRIES = 12
RETRY_TIMEOUT_S = 180.0
FIRST_RETRY_TIMEOUT_S = 12.0  # before the first answer of a process
FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 15.0
KEPT = 8
"""Buckets, or ways to reach one, whose clients a process keeps."""


@dataclass(frozen=True, slots=True)
class Clients:
    """One process's clients. `first` gives up early, for requests before any was answered."""

    endpoint: str
    credential: Credential | None = field(repr=False)
    patient: Requests
    first: Requests
    once: Requests

    @property
    def secrets(self) -> tuple[str, ...]:
        return tuple(str(each) for each in (self.credential or {}).values() if each)


_kept: dict[tuple[object, ...], Clients] = {}
_lock = threading.Lock()
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)


def clients_of(bucket: str, options: S3Options) -> Clients:
    """This process's clients of a bucket under the options and AWS variables as they are now."""
    key = _key(bucket, options)
    with _lock:  # or every thread of a first load would make its own
        found = _kept.get(key)
        if found is None:
            found = _keep(key, _connect(bucket, options))
        return found


def renewed(bucket: str, options: S3Options, used: Clients) -> Clients | None:
    """Clients with credentials looked up again; None where they are those of `used`."""
    key = _key(bucket, options)
    with _lock:
        found = _kept.get(key)
        if found is None or _same(found, used):  # else another thread has just renewed them
            found = _connect(bucket, options)
            if _same(found, used):
                return None
            _keep(key, found)
        return found


def _key(bucket: str, options: S3Options) -> tuple[object, ...]:
    variables = sorted(each for each in os.environ.items() if each[0].startswith("AWS_"))
    digest = hashlib.sha256(repr(variables).encode()).digest()  # they hold secrets
    # A child forked from this process cannot use its connections.
    return (os.getpid(), bucket, options, digest)


def _keep(key: tuple[object, ...], clients: Clients) -> Clients:
    _kept.pop(key, None)
    while len(_kept) >= KEPT:
        _kept.pop(next(iter(_kept)))
    _kept[key] = clients
    return clients


def _same(one: Clients, other: Clients) -> bool:
    return one.secrets[:3] == other.secrets[:3]


def _connect(bucket: str, options: S3Options) -> Clients:
    found = options.resolve()
    make = _s3fs_clients if options.engine == "s3fs" else _obstore_clients
    patient, first, once = make(bucket, found)
    return Clients(
        found.endpoint or f"AWS S3 in {found.region}",
        found.provider() if found.provider else None,
        patient,
        first,
        once,
    )


def _obstore_clients(bucket: str, found: Resolved) -> tuple[Requests, Requests, Requests]:
    from ucpstore.storage.s3_obstore import ObstoreRequests

    def make(retries: int, limit_s: float, timeout_s: float, longest_s: float) -> Requests:
        return ObstoreRequests(
            bucket,
            found,
            retries=retries,
            limit_s=limit_s,
            timeout_s=timeout_s,
            wait_s=FIRST_WAIT_S,
            longest_wait_s=longest_s,
        )

    return (
        make(RETRIES, RETRY_TIMEOUT_S, 300.0, LONGEST_WAIT_S),
        make(RETRIES, FIRST_RETRY_TIMEOUT_S, 15.0, 4.0),
        make(0, 0.0, 60.0, 1.0),
    )


def _s3fs_clients(bucket: str, found: Resolved) -> tuple[Requests, Requests, Requests]:
    from ucpstore.storage.s3_s3fs import S3fsRequests

    patient = S3fsRequests(bucket, found, timeout_s=60.0)
    return patient, S3fsRequests(bucket, found, timeout_s=15.0), patient
