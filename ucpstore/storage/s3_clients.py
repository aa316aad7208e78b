"""The clients of an S3 bucket, made once per process and kept for all storages that ask alike.

A client reads the machine's certificates and opens connections of its own, too much work for every
call of `save` and `load`.
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


def limit_s(*, answered: bool) -> float:
    """For how long requests are tried: longer where the place has `answered` this process."""
    return RETRY_TIMEOUT_S if answered else FIRST_RETRY_TIMEOUT_S


_kept: dict[tuple[object, ...], Clients] = {}
_lock = threading.Lock()


def _after_fork() -> None:
    """A child cannot use its parent's connections, nor wait for its parent's threads."""
    global _lock
    _lock = threading.Lock()
    _kept.clear()


os.register_at_fork(after_in_child=_after_fork)


def clients_of(bucket: str, options: S3Options) -> Clients:
    """This process's clients of a bucket as options, variables and files are now."""
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
    """All that a look-up would depend on: the options, variables, and AWS's files."""
    variables = sorted(each for each in os.environ.items() if _matters(each[0]))
    files = [
        _version(os.environ.get(variable, default))
        for variable, default in (
            ("AWS_CONFIG_FILE", "~/.aws/config"),
            ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
        )
    ]
    digest = hashlib.sha256(repr(variables).encode()).digest()  # they hold secrets
    return (bucket, options, digest, *files)


def _matters(variable: str) -> bool:
    return variable.startswith(("AWS_", "SSL_CERT_")) or variable.lower().endswith("_proxy")


def _version(path: str) -> tuple[str, int, int]:
    """The file's path, and when and how long it was written."""
    path = os.path.expanduser(path)  # noqa: PTH111  # pathlib raises where there is no home
    try:
        found = os.stat(path)  # noqa: PTH116
    except OSError:
        return path, 0, 0
    return path, found.st_mtime_ns, found.st_size


def _keep(key: tuple[object, ...], clients: Clients) -> Clients:
    _kept.pop(key, None)
    while len(_kept) >= KEPT:
        _kept.pop(next(iter(_kept)))
    _kept[key] = clients
    return clients


def _same(one: Clients, other: Clients) -> bool:
    """Whether both sign alike. When found credentials are to be renewed is no part of them."""
    names = ("access_key_id", "secret_access_key", "token")
    ours, theirs = (each.credential or {} for each in (one, other))
    return all(ours.get(name) == theirs.get(name) for name in names)


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

    def make(retries: int, tried_s: float, timeout_s: float, longest_s: float) -> Requests:
        return ObstoreRequests(
            bucket,
            found,
            retries=retries,
            limit_s=tried_s,
            timeout_s=timeout_s,
            wait_s=FIRST_WAIT_S,
            longest_wait_s=longest_s,
        )

    return (
        make(RETRIES, limit_s(answered=True), 300.0, LONGEST_WAIT_S),
        make(RETRIES, limit_s(answered=False), 15.0, 4.0),
        make(0, 0.0, 60.0, 1.0),
    )


def _s3fs_clients(bucket: str, found: Resolved) -> tuple[Requests, Requests, Requests]:
    from ucpstore.storage.s3_s3fs import S3fsRequests

    patient = S3fsRequests(bucket, found, timeout_s=60.0)
    return patient, S3fsRequests(bucket, found, timeout_s=15.0), patient
